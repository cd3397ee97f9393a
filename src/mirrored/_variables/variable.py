"""Named mutable state: one class, two policies (mirrored, sync-on-read)."""

from __future__ import annotations

import collections
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .. import _html, _tf_names
from .._errors import ContextError, StrategyMismatchError
from .._jax import tracing, user_code
from .._options import AggregationName, Storage, StorageName, SynchronizationName, VariableAggregation, VariableSynchronization
from .._replicas import collectives, cross_replica, frames, in_flight, placement
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica
from .._replicas.planned import Planned
from .._typing import PyTree, Shape
from .._workers import joint_programs
from . import storage
from .arithmetic import add_operators
from .assignment import Assignment, placed, placed_copy
from .making import Made, called
from .scatter import ScatterMethods
from .spec import Given, VariableSpec, check_name, creation_mesh, initial_array, stored_in, takes_each_value
from .storage import Slot
from .tree import VariableTree, is_tree

_NONE = VariableAggregation.NONE
ResultT = TypeVar("ResultT")

#: Names of JAX's arrays beyond `jax.Array`, without those of their buffers (`delete`), which are the variable's.
_ALSO_FORWARDED = frozenset({"block_until_ready", "devices", "tobytes", "tolist"})
#: Every variable that is alive, for `strategy.assert_mirrored()`.
_live: weakref.WeakSet[Variable] = weakref.WeakSet()
#: Called with each new variable, for tests of a training, which keep its variables alive until they are compared.
listeners: list[Callable[[Variable], None]] = []
#: Numbers of the variables on some devices; every worker creates those of a cluster, so the numbers agree.
_created: dict[ReplicaMesh, Iterator[int]] = collections.defaultdict(itertools.count)

if TYPE_CHECKING:  # to type checkers a variable is an array, because it is used as one: `x @ w`, `jnp.sum(w)`
    _Array = jax.Array
else:
    _Array = object


class Variable(ScatterMethods, _Array):
    """Named mutable state: the same on every replica, or one value for each.

    Create variables in `strategy.scope()`; there the initial value is computed once and copied to every
    replica. A variable is used like an array (`x @ w + b`, `jnp.sum(w)`), and as a pytree it stands for its
    value, so `jax.grad` and `optax` take trees of variables.

    A mirrored variable (the default) holds provably equal copies: inside a step it takes a value that is
    the same on every replica, or aggregates the replicas' values when it has an `aggregation`.
    A sync-on-read variable (`synchronization="on_read"`) belongs to each replica inside a step and is
    aggregated when it is read outside: counters and metrics.

    A nest of arrays, a module or a train state becomes one variable for each of its arrays: a `mr.VariableTree`,
    with `value`, `assign` and `numpy` of the whole tree.

    Args:
        initial_value: an array or number of any shape, or a tree of arrays. It is copied, so later changes of a numpy array do
            not matter. Or a function of no arguments that makes one; it is called once. Where variables are in parts, JAX
            traces it, so that no device makes a whole large array.
        name: for messages and checkpoints. Default: `"variable_<n>"`.
        trainable: a hint for optimizers and libraries. Default: True unless sync-on-read.
        dtype: convert the initial value to it. Default: its own.
        synchronization: `"auto"` or `"on_write"` (mirrored), or `"on_read"`.
        aggregation: `"none"`, `"sum"`, `"mean"`, `"max"`, `"min"` or `"only_first_replica"`: how the replicas' values become
            one, when a mirrored variable is written in a step and when a sync-on-read variable is read.
        storage: `"whole"` or `"parts"` of a large mirrored variable on each device, see `mr.Storage`. Default: the strategy's.

    Raises:
        ValueError: for `synchronization="none"`, an unknown mode, or a MEAN of a non-floating dtype.
        TypeError: when the initial value is not an array or number.
        ContextError: when it is created inside a step or another trace.

    >>> with strategy.scope():
    ...     w = mr.Variable(np.zeros(3), name="w")
    ...     seen = mr.Variable(0, name="seen", synchronization="on_read", aggregation="sum")
    >>> def step():
    ...     seen.assign_add(10)
    ...     w.assign(w + 1)
    >>> strategy.run(step)
    >>> seen.numpy(), w.numpy()
    (array(20, dtype=int32), array([1., 1., 1.], dtype=float32))

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/Variable
    """

    __slots__ = ("__weakref__", "_slot", "_spec")

    if not TYPE_CHECKING:  # type checkers take the signature of `__init__`; `help` and `inspect.signature` take this one

        def __new__(
            cls, initial_value: PyTree, *, name: str | None = None, trainable: bool | None = None, dtype: Any = None,
            synchronization: VariableSynchronization | SynchronizationName = "auto",
            aggregation: VariableAggregation | AggregationName = "none", storage: Storage | StorageName | None = None,
        ) -> Variable | VariableTree:  # fmt: skip
            """Make a variable, or one of each array in a tree."""
            if callable(initial_value) and not is_tree(initial_value):  # called here, because it may return a tree
                is_on_read = takes_each_value(synchronization, name or "of a function")
                initial_value = called(initial_value, creation_mesh(name or "of a function"), storage, is_on_read, dtype)
            if is_tree(initial_value):
                modes = {"synchronization": synchronization, "aggregation": aggregation, "storage": storage}
                make = functools.partial(cls, trainable=trainable, dtype=dtype, **modes)
                return VariableTree(initial_value, make, check_name(name))
            self = super().__new__(cls)
            self._slot = Slot()  # here, because `__del__` finds it also where `__init__` does not take the arguments
            self._slot.array = initial_value  # for `__init__`, if a function made it
            return self

    @user_code.shorten_errors
    def __init__(
        self,
        initial_value: PyTree,
        *,
        name: str | None = None,
        trainable: bool | None = None,
        dtype: DTypeLike | None = None,
        synchronization: VariableSynchronization | SynchronizationName = "auto",
        aggregation: VariableAggregation | AggregationName = "none",
        storage: Storage | StorageName | None = None,
    ) -> None:
        self._slot.name = name = check_name(name)
        is_on_read = takes_each_value(synchronization, name)
        how = VariableAggregation.parse(aggregation, "aggregation")
        mesh = creation_mesh(name)
        value = self._slot.array if callable(initial_value) else initial_value
        array: Any = value
        if isinstance(value, Made):
            self._slot.array, division = value.stored, value.division
        else:
            if isinstance(value, Variable):
                value = value.value
            array = initial_array(value, dtype, name)
            division = stored_in(storage, mesh, array, is_on_read, name)
            placement.check_later(mesh, [array], lambda _: f"the initial value of variable {name!r}")
            if is_on_read:
                broadcast = cross_replica.compiled(cross_replica.broadcast_stack, mesh.stacked, mesh.num_replicas)
                self._slot.array = broadcast(placed(array, mesh, name))
            else:
                self._slot.array = placed_copy(array, mesh, name, division)
        self._spec = VariableSpec(
            name=name,
            shape=tuple(array.shape),
            dtype=array.dtype,
            mesh=mesh,
            number=next(_created[mesh]),  # now, so that numbers agree with other workers' even if placing fails here
            is_on_read=is_on_read,
            aggregation=how,
            trainable=(not is_on_read) if trainable is None else bool(trainable),
            division=division,
        )
        _live.add(self)
        for tell in listeners:
            tell(self)

    #: The stored array.
    _array = property(operator.attrgetter("_slot.array"), lambda self, array: setattr(self._slot, "array", array))

    def __del__(self) -> None:
        self._slot.clear()

    # -- what it is

    @property
    def name(self) -> str:
        """The variable's name, for messages and checkpoints."""
        return self._spec.name

    @property
    def shape(self) -> Shape:
        """The shape of one copy."""
        return self._spec.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which no assignment changes."""
        return self._spec.dtype

    ndim = property(lambda self: len(self.shape), doc="The number of axes of one copy.")
    size = property(lambda self: int(np.prod(self.shape, dtype=int)), doc="The number of elements of one copy.")

    @property
    def trainable(self) -> bool:
        """Whether optimizers should train it; a hint."""
        return self._spec.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """`ON_WRITE` (mirrored) or `ON_READ`."""
        return VariableSynchronization.ON_READ if self._spec.is_on_read else VariableSynchronization.ON_WRITE

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values become one."""
        return self._spec.aggregation

    # -- reading

    @property
    def value(self) -> jax.Array:
        """The value as an array: this replica's inside a step, the one value (or the aggregate) outside.

        An array that was taken out of a variable stays valid, whatever happens to the variable later.

        Raises:
            ContextError: under a JAX transformation outside a step that would bake the value in.
            ValueError: outside a step, for a sync-on-read variable with aggregation NONE, or a sum that its dtype does not hold.
        """
        return self._use(lambda value: value)

    @user_code.shorten_errors
    def read_value(self) -> jax.Array:
        """Return `value`, under the name of TensorFlow's method."""
        return self.value

    @user_code.shorten_errors
    def numpy(self) -> np.ndarray:
        """Return a copy of the value as a numpy array."""
        return self._use(np.array)

    def _use(self, use: Callable[[jax.Array], ResultT]) -> ResultT:
        """Call a function on the value. No program overwrites the value meanwhile, nor later if the function returns it."""
        frame = frames.current()
        return self._use_stored(frame, lambda stored: use(self._value_of(frame, stored)))

    def _use_stored(self, frame: Frame | None, use: Callable[[jax.Array], ResultT]) -> ResultT:
        """As `_use`, on the stored array: outside of a step, a sync-on-read variable's is the stack of its copies."""
        if frame is not None and frame.bindings is not None:
            self._check_mesh(frame)
            return use(frame.bindings.read(self))
        if tracing.is_staging():
            raise ContextError(frames.foreign_trace_message("read", self.name, frame))
        in_flight.require_threads()
        with storage.lent([self._slot]) as [stored]:
            result = use(self._joined(stored))
            if result is self._slot.array:
                self._slot.note_held()
            return result

    def _joined(self, stored: jax.Array) -> jax.Array:
        """Return the value of a lent array."""
        if (division := self._spec.division) is None:
            return stored
        note_use(self, "read")
        return placement.join(self._spec.mesh, division, stored)

    def _value_of(self, frame: Frame | None, stored: jax.Array) -> jax.Array:
        if not self._spec.is_on_read or (frame is not None and frame.replica is not None):
            return stored
        if self._spec.aggregation is _NONE:
            raise ValueError(
                f"variable {self.name!r} has one value per replica and aggregation NONE, so it has no single value "
                "outside a step. Give it an aggregation, such as 'sum' or 'max', or look at all of "
                "them with strategy.local_results(variable)."
            )
        if frame is not None and frame.axis is not None:
            return collectives.aggregate(self._spec.aggregation, stored, frame.axis)
        note_use(self, "read")
        return cross_replica.aggregated(stored, self._spec.aggregation, self._spec.mesh.mirrored, self.name)

    def _load(self, frame: Frame | None) -> jax.Array:
        """Return the stored array, or its value in a trace."""
        return self._use_stored(frame, lambda stored: stored)

    # -- writing

    @user_code.shorten_errors
    def assign(self, value: Given) -> Variable:
        """Set the value, and return the variable.

        Inside a step: a mirrored variable without an aggregation takes only what is provably the same on
        every replica; with one, the replicas' values are aggregated first (a plain number counts as the same
        value on each). A sync-on-read variable changes on this replica. Outside a step: all copies are set;
        for a sync-on-read variable with aggregation SUM, to parts that add up to exactly `value`.

        Args:
            value: shape and dtype of the variable; floats are converted to its floating dtype, numbers to
                any. Outside a step also a PerReplica, which is aggregated.

        Raises:
            ReplicasDivergeError: (a ValueError) when the copies would differ, or cannot be shown to be equal.
            ValueError: for another shape. TypeError: for a dtype of another kind.
            ContextError: under a JAX transformation that would leak the value.
        """
        return self._write("assign", value, None)

    @user_code.shorten_errors
    def assign_add(self, delta: Given) -> Variable:
        """Add to the value, and return the variable; an aggregation applies to `delta`. See `assign`."""
        return self._write("assign_add", delta, jnp.add)

    @user_code.shorten_errors
    def assign_sub(self, delta: Given) -> Variable:
        """Subtract from the value, and return the variable; an aggregation applies to `delta`. See `assign`."""
        return self._write("assign_sub", delta, jnp.subtract)

    def _write(self, method: str, operand: Given, combine: Callable[..., jax.Array] | None) -> Variable:
        frame = frames.current()
        in_flight.require_threads()
        with storage.claimed([self._slot], frame):
            self._store(frame, self._new_value(frame, method, operand, combine))
        return self

    def _new_value(self, frame: Frame | None, method: str, operand: Given, combine: Callable[..., jax.Array] | None) -> jax.Array:
        load = functools.partial(self._load, frame)
        read = lambda: self._value_of(frame, load())  # noqa: E731
        return Assignment(self._spec, method, operand, combine, load, read).new_value(frame)

    def _store(self, frame: Frame | None, value: jax.Array) -> None:
        """Set the stored array, or its value in a trace; outside one the caller has claimed the variable."""
        if frame is not None and frame.bindings is not None:
            self._check_mesh(frame)
            frame.bindings.write(self, value)
            return
        if isinstance(value, jax.core.Tracer):
            raise ContextError(frames.foreign_trace_message("written", self.name, frame))
        if self._spec.is_on_read:
            self._keep(self._spec.mesh.fresh(value))
        else:
            self._keep(placed_copy(value, self._spec.mesh, division=self._spec.division))

    def _keep(self, array: jax.Array) -> None:
        """Set the stored array, which nobody else holds; the caller has claimed the variable."""
        note_use(self, "assign to")
        storage.held.discard(self._slot)  # first: who reads the new array meanwhile notes it again
        self._slot.array = array

    def _check_mesh(self, frame: Frame) -> None:
        if frame.mesh is not None and frame.mesh != self._spec.mesh:
            raise StrategyMismatchError(
                f"variable {self.name!r} lives on {self._spec.mesh}, but {frame.strategy!r} runs on "
                f"{frame.mesh}. Create it inside that strategy: `with strategy.scope(): v = mr.Variable(...)`."
            )

    # -- used as an array

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: DTypeLike | None = None, context: None = None, copy: bool | None = None) -> np.ndarray:
        return self._use(lambda value: np.array(value, dtype=dtype))

    __array_priority__ = 100  # numpy arrays leave the operators to the variable, as to JAX arrays

    if not TYPE_CHECKING:  # so that type checkers find misspelt names

        def __getattr__(self, name: str) -> Any:
            """Give the attributes and methods of arrays, such as `w.T` and `w.astype`, through the value."""
            if name.startswith("_") or not (hasattr(jax.Array, name) or name in _ALSO_FORWARDED):
                raise _tf_names.missing("mr.Variable", name)
            return getattr(self.value, name)

    def _apply(self, method: str, *operands: object) -> Any:
        """Call an operator of the value."""
        return self._use(lambda value: getattr(value, method)(*operands))

    def _apply_to(self, method: str, other: object) -> Any:
        """Call an operator of the value with another operand, or with the value of another variable."""
        if isinstance(other, PerReplica):
            return NotImplemented
        if isinstance(other, Variable):
            return other._use(lambda value: self._apply(method, value))
        return self._apply(method, other)

    def __getitem__(self, key: Any) -> jax.Array:  # type: ignore[override]
        return self._apply("__getitem__", key)

    __hash__ = object.__hash__  # of the variable, so that it is a key of dicts and a member of sets

    def __eq__(self, other: object) -> Any:
        if other is self:  # JAX's caches compare an object with itself
            return np.True_
        return self._apply_to("__eq__", other)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"variable {self.name!r} is a scalar and has no len().")
        return self.shape[0]

    def __iter__(self) -> Any:
        return iter(self._use(list))

    def __format__(self, spec: str) -> str:
        if not spec:
            return repr(self)
        return self._use(lambda value: format(value, spec))

    def __reduce_ex__(self, protocol: object) -> Any:
        raise TypeError(
            f"variable {self.name!r} cannot be copied or pickled: two variables with one name would drift apart. Make a new "
            "one with mr.Variable(variable.value), or keep variable.numpy()."
        )

    def __repr__(self) -> str:
        head = f"mr.Variable(name={self.name!r}, shape={self._spec.shape}, dtype={self._spec.dtype}"
        if self._spec.is_on_read:
            head += ", synchronization=ON_READ"
        if self._spec.aggregation is not _NONE:
            head += f", aggregation={self._spec.aggregation.name}"
        if (division := self._spec.division) is not None:
            head += f", {division}"
        if _is_traced():
            return f"{head}, traced)"
        if isinstance(self._slot.array, storage.Lost):
            return f"{head}): {self._slot.array}"
        if isinstance(self._slot.array, Planned):
            return f"{head}, planned)"
        heads = [(f"  {i}: ", copy) for i, copy in local_copies(self)]
        copies = ",\n".join(begin + np.array2string(copy, threshold=20, prefix=begin) for begin, copy in heads)
        return f"{head},\n{copies})"

    def _repr_html_(self) -> str:
        if _is_traced() or isinstance(self._slot.array, storage.Lost | Planned):
            return _html.element("pre", repr(self))
        title = f"mr.Variable {self.name!r}, shape {self._spec.shape}, dtype {self._spec.dtype}"
        return _html.copies(title, local_copies(self), self._spec.is_on_read)


def _is_traced() -> bool:
    frame = frames.current()
    return frame is not None and frame.bindings is not None


add_operators(Variable)


def is_variable(value: object) -> bool:
    """Tell whether a value is a Variable; the `is_leaf` of every flattening that must see them whole."""
    return isinstance(value, Variable)


def live_variables(mesh: ReplicaMesh) -> list[Variable]:
    """Return the variables that live on some devices, in the order of their creation, which is the same on all workers."""
    return sorted((v for v in list(_live) if v._spec.mesh == mesh), key=lambda v: v._spec.number)


#: Call a function on the value; the value is copied before the next step only if the function returns it.
use_value = Variable._use
#: Return the facts of a variable.
spec_of: Callable[[Variable], VariableSpec] = operator.attrgetter("_spec")


def note_use(variable: Variable, what: str) -> None:
    """Note a use of a variable, so that the workers' next comparison shows whether all used the same one."""
    if not variable._spec.mesh.is_alone and not frames.is_traced():
        joint_programs.note(f"{what} variable {variable.name!r}", f"{what} {variable._spec.number}")


def local_arrays(variable: Variable, stored: jax.Array) -> list[tuple[int, jax.Array]]:
    """Return a lent array's data on this worker's devices, in order, each with the number of its first replica."""
    mesh = variable._spec.mesh
    replicas = {device: i * mesh.per_device for i, device in enumerate(mesh.devices)}
    return sorted(((replicas[s.device], s.data) for s in stored.addressable_shards), key=operator.itemgetter(0))


def local_copies(variable: Variable) -> list[tuple[int, np.ndarray]]:
    """Return this worker's copies, or its parts, as numpy arrays, with their replica numbers."""
    is_key = jnp.issubdtype(variable.dtype, jax.dtypes.prng_key)
    plain: Callable[[Any], Any] = jax.random.key_data if is_key else np.asarray
    with storage.lent([variable._slot]) as [stored]:
        arrays = [(i, np.array(plain(copy))) for i, copy in local_arrays(variable, stored)]
    if (division := variable._spec.division) is not None:
        return [(i, division.without_padding(part, i // variable._spec.mesh.per_device)) for i, part in arrays]
    if not variable._spec.is_on_read:
        return arrays
    return [(first + row, np.asarray(value)) for first, array in arrays for row, value in enumerate(array)]


def flatten(variable: Variable) -> tuple[tuple[jax.Array], None]:
    """Flatten a variable, as a pytree, into its value."""
    return (variable.value,), None


def unflatten(_: None, children: tuple[Any]) -> Any:
    """Return the value itself: unflattening a tree of variables gives a tree of values (docs/design/variables.md)."""
    return children[0]


jax.tree_util.register_pytree_node(Variable, flatten, unflatten)
