"""The base class of the strategies: a mesh, and the verbs that users call."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Self, overload

import jax

from .. import _html, _process, _tf_names
from .._cluster.spec import Cluster
from .._errors import ContextError, StrategyMismatchError
from .._jax import user_code
from .._models import libraries
from .._options import AutoShardPolicy, InputOptions, ReduceOp, ReduceOpName, ReductionToOneDevice
from .._program.program import describe_program
from .._program.steps import Steps
from .._replicas import collectives, context, frames, in_flight, spent
from .._replicas.frames import Frame
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica
from .._text import shown
from .._typing import ArrayLike, PyTree, UserFunction
from .._variables import equal_copies, in_parts
from .._variables.access import lent
from .._variables.variable import live_variables
from .._workers.coordination import Coordination
from .._workers.progress import progress
from .._workers.same_program import require_same_history
from ..data._dataset import DistributedDataset, check_dataset
from ..data._input_context import InputContext
from ..data._sharing.agree import InputWorker
from ..data._sharing.plan import make_plan, plan_of_function
from ..data._sources.numpy_dataset import NumpyDataset, stacked_lists
from ..data._sources.open import adapted
from .leaves import Leaves
from .values import ValueContext, distribute

_logger = logging.getLogger("mirrored")


class _Scope(contextlib.AbstractContextManager["Strategy"], contextlib.ContextDecorator):
    """The scope of a strategy; it may be entered again, even inside itself."""

    _open: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar("mirrored_scopes", default=())  # innermost last

    def __init__(self, enter: Callable[[], contextlib.AbstractContextManager[Strategy]]) -> None:
        self._enter = enter

    def __enter__(self) -> Strategy:
        block = self._enter()
        strategy = block.__enter__()
        self._open.set((*self._open.get(), block))
        return strategy

    def __exit__(self, *error: object) -> bool | None:
        *outer, block = self._open.get()
        self._open.set(tuple(outer))
        return block.__exit__(*error)


@_tf_names.hints("mr.Strategy")
class Strategy:
    """The replicas that run one program together and keep their variables the same.

    Do not make one directly. Its subclasses differ only in their devices: `mr.MirroredStrategy`, `mr.OneDeviceStrategy`,
    `mr.MultiWorkerMirroredStrategy`, and the default strategy that `mr.get_strategy()` returns outside every scope.

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy
    """

    _coordination = Coordination()
    _cluster: Cluster | None = None

    def __init__(self, mesh: ReplicaMesh, *, bytes_per_pack: int = 0, ops: ReductionToOneDevice | None = None) -> None:
        """Make a strategy on a mesh; users call a subclass."""
        if not isinstance(mesh, ReplicaMesh):
            raise TypeError("mr.Strategy is not made directly; write mr.MirroredStrategy(devices), mr.OneDeviceStrategy(device).")
        self._mesh = mesh
        self._steps = Steps(mesh, bytes_per_pack, ops)
        self._leaves, self._ops = Leaves(mesh, self, ops), ops
        _process.strategies.add(self)
        self._datasets: weakref.WeakSet[DistributedDataset] = weakref.WeakSet()
        _logger.info("%s: %s", type(self).__name__, mesh)

    # -- its replicas and workers

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas, R."""
        return self._mesh.num_replicas

    @property
    def num_workers(self) -> int:
        """The number of processes that run the program together, W; each has R / W replicas."""
        return self._coordination.num_workers

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and logs: worker 0, so always when there is one process."""
        return self._coordination.worker == 0

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The replicas' devices, in replica order; fewer than R if each device has several replicas."""
        return self._mesh.devices

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices as JAX's own mesh, for `jax.NamedSharding` and other libraries.

        Its one axis is called `"replica"`; if each device has several replicas, `mesh.axis_names` has another name.
        """
        return self._mesh.mesh

    @property
    def cluster(self) -> Cluster | None:
        """The cluster; None if this strategy is for one process.

        `cluster.spec.as_dict()` has its tasks; `task_type` and `task_id` say which task this process is.
        """
        return self._cluster

    @user_code.shorten_errors
    def barrier(self, name: str) -> None:
        """Wait until every worker has reached this barrier, and all programs dispatched before it have ended.

        Args:
            name: the same on all workers; the error for a missing worker shows it.

        Raises:
            ProgramMismatchError: (a RuntimeError) on every worker, if they have not run the same programs in the same order.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"barrier: name is {name!r}; expected a non-empty string.")
        _require_untraced("barrier")
        with lent(live_variables(self._mesh)) as arrays:
            jax.block_until_ready(arrays)
        if not self._mesh.is_alone:
            progress.trail.take_over()
            with progress.phase(f"the barrier {name!r}", waits=True):
                in_flight.finish()
                histories = self._coordination.barrier(name, progress.history())
                require_same_history(histories, lambda: self._coordination.exchange("barrier", progress.tell()))

    def __repr__(self) -> str:
        return f"mr.{type(self).__name__}({self._mesh})"

    def __deepcopy__(self, memo: object = None) -> Self:
        return self  # variables and datasets know their strategy by identity

    __copy__ = __deepcopy__

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled: its devices are those of this process. Pickle what it is made from, such as a list of "
            "device names, and make the strategy where it is used."
        )

    def _repr_html_(self) -> str:
        return _html.outline(self.explain())

    def explain(self) -> str:
        """Describe this strategy's devices, what its programs communicate and why they were compiled, and how data is split.

        >>> _ = strategy.run(lambda: mr.get_replica_context().all_reduce("sum", jnp.ones(256)))
        >>> print(strategy.explain())  # doctest: +ELLIPSIS
        MirroredStrategy: 2 replicas (cpu:0, cpu:1)
        ...all-reduce of 1.0 KiB...
        """
        lines = [f"{type(self).__name__}: {self._mesh}" + (f", adds up by {self._ops}" if self._ops is not None else "")]
        for program, cause in self._steps.programs.causes():
            lines += [f"program {describe_program(program)}", *[f"  compiled again, because {cause}"] * bool(cause)]
        lines += [*in_parts.describe(self._mesh), *(f"dataset {dataset.describe()}" for dataset in self._datasets)]
        lines += self._steps.spent.in_words()
        if (profiled := spent.last_profile(self._mesh, self._steps.spent.since)) is not None:
            lines.append(profiled.in_words())
        lines += [line for library in libraries.imported() for line in library.describe(self._mesh)]
        return "\n".join(lines)

    # -- its scope

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Make this the current strategy inside a `with` block: variables created there are its variables.

        Raises:
            StrategyMismatchError: inside the scope of another strategy.
            ContextError: inside a step.

        >>> with strategy.scope():
        ...     mr.get_strategy() is strategy
        True

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#scope
        """
        return _Scope(self._entered)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[Strategy]:
        frames.check_enterable(self)
        outer = frames.current()
        frame = dataclasses.replace(outer or Frame(self, self._mesh), strategy=self, mesh=self._mesh)
        with libraries.in_scope(), frames.entered(frame):
            yield self

    def _check_current(self, verb: str) -> None:
        in_flight.require_threads()
        if (frame := frames.current()) is not None and frame.strategy is not None and frame.strategy is not self:
            raise StrategyMismatchError(
                f"{verb} of {self!r} was called in the scope of {frame.strategy!r}. Leave that scope first, or call {verb} of "
                "the strategy whose scope it is."
            )

    # -- verbs

    @overload
    def run(self, fn: Callable[..., None], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> None: ...
    @overload
    def run(self, fn: UserFunction, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> PyTree: ...
    def run(self, fn: UserFunction, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> PyTree:
        """Call `fn` on every replica, as one compiled program.

        In the arguments, each PerReplica leaf becomes this replica's value. An array (jax, numpy) or a Python number
        goes whole to every replica. Everything else (bools, strings, None, functions, variables) is compiled in, and
        so are values that the code of `fn` names, such as `self.lr`: each new value makes another program. In the
        result, an array that is provably the same on all replicas comes back as an ordinary array, any other array
        as a PerReplica, and everything else unchanged.

        Tracing `fn` finds the variables that it reads or writes; their new values are visible at once. If `fn`
        raises, the exception comes through unchanged and no variable has changed.

        Args:
            fn: one replica's program; `mr.get_replica_context()` works in it.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Raises:
            ReplicasDivergeError: (a ValueError) when copies of a mirrored variable would differ.
            CollectiveHangError: (a ValueError) when only some replicas would reach a collective.
            FactorOfReplicasError: (a ValueError) when gradients would be summed twice.
            OneProgramError: (a TypeError) when Python branches on the replica's number.
            UnevenReplicasError: (a ValueError) for a PerReplica whose shapes differ.
            ContextError: (a RuntimeError) inside a step.

        >>> x = strategy.distribute_values_from_function(lambda ctx: np.full(2, 1.0 + ctx.replica_id_in_sync_group))
        >>> strategy.run(lambda x, y: x * y, args=(x, np.float32(10)))
        PerReplica(shape=(2,), dtype=float32,
          0: [10. 10.],
          1: [20. 20.])

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#run
        """
        try:
            if type(args) is not tuple or kwargs is not None or not callable(fn):
                context.check_call("strategy.run", "strategy.run(step, args=(x,))", fn, args, kwargs)
            if frames.current() is not None:
                frames.require_cross_replica("run", "Call the function directly.")
                self._check_current("run")
            return self._steps.dispatch(self, fn, args, kwargs or {})
        except (Exception, KeyboardInterrupt) as error:
            user_code.show_users_lines(error)
            raise

    @overload
    def reduce(
        self, reduce_op: ReduceOp | ReduceOpName, value: PerReplica | ArrayLike, axis: int | Sequence[int] | None = None
    ) -> jax.Array: ...
    @overload
    def reduce(self, reduce_op: ReduceOp | ReduceOpName, value: PyTree, axis: int | Sequence[int] | None = None) -> PyTree: ...
    @user_code.shorten_errors
    def reduce(self, reduce_op: ReduceOp | ReduceOpName, value: PyTree, axis: int | Sequence[int] | None = None) -> PyTree:
        """Combine a value over the replicas, and optionally over axes of each replica's value.

        With `axis=None` it combines element by element over the replicas. With an axis (usually 0, the batch), it
        combines along that axis in each replica, then over the replicas; MEAN divides by the true number of rows, even
        if the replicas have different numbers. A mirrored value, a number or a host array counts as the same value on
        each replica: its SUM is R times the value, any other result the value. A MEAN of integers is floating point. A SUM
        has the dtype of `jnp.sum`; a SUM of 32-bit integers is awaited, and raises where it would wrap around.

        Inside a step it is `all_reduce`, which does not raise for such a SUM.

        Args:
            reduce_op: `"sum"`, `"mean"`, `"max"` or `"min"`, in any case, or `mr.ReduceOp`.
            value: a PerReplica, array, number or variable, or a nest of them.
            axis: an axis or several of each replica's value; negative counts from the end.

        Returns:
            Mirrored arrays, in the structure of `value`.

        Raises:
            ValueError: for another operation, a missing axis, a SUM too large for its integers, and a MAX of no rows.
            UnevenReplicasError: (a ValueError) when shapes differ along an axis that is not reduced.
            TypeError: for a leaf that holds no numbers.

        >>> x = strategy.distribute_values_from_function(lambda ctx: np.arange(2.0) + 2 * ctx.replica_id_in_sync_group)
        >>> strategy.reduce("sum", x), strategy.reduce("mean", x, axis=0)
        (Array([2., 4.], dtype=float32), Array(1.5, dtype=float32))

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#reduce
        """
        op = ReduceOp.parse(reduce_op, "reduce_op")
        self._check_current("reduce")
        frame = frames.current()
        if frame is not None and frame.replica is not None:
            return collectives.all_reduce(op, value, context.axis_of(frame.replica), axis, "strategy.reduce")
        return self._leaves.reduce(op, value, axis)

    @overload
    def gather(self, value: PerReplica | ArrayLike, axis: int) -> jax.Array: ...
    @overload
    def gather(self, value: PyTree, axis: int) -> PyTree: ...
    @user_code.shorten_errors
    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenate the replicas' values along `axis`, in replica order.

        Sizes may differ along `axis`, and may be 0. A mirrored value, which is the same on each replica, is
        concatenated R times.

        Args:
            value: a PerReplica, array or variable with at least one axis, or a nest of them; any dtype.
            axis: the axis along which to join; negative counts from the end.

        Raises:
            ValueError: for an axis that a leaf does not have.
            UnevenReplicasError: (a ValueError) when shapes differ along another axis.
            ContextError: (a RuntimeError) inside a step.

        >>> x = strategy.distribute_values_from_function(lambda ctx: np.zeros(1 + ctx.replica_id_in_sync_group))
        >>> strategy.gather(x, axis=0).shape
        (3,)

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#gather
        """
        frames.require_cross_replica("gather", "Use mr.get_replica_context().all_gather(value, axis) there.")
        self._check_current("gather")
        return self._leaves.gather(value, axis)

    @user_code.shorten_errors
    def local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Return this worker's values, one for each local replica.

        All arrays are on the first local replica's device, so that you can combine them:
        `jnp.concatenate(strategy.local_results(x))`. (`x.values` stay on their devices.)

        Args:
            value: a PerReplica or a variable gives one value for each replica; a nest that contains any gives
                one nest for each replica; anything else gives a 1-tuple.

        >>> x = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
        >>> strategy.local_results(x), strategy.local_results(7)
        ((Array(0, dtype=int32), Array(1, dtype=int32)), (7,))

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#experimental_local_results
        """
        frames.require_cross_replica("local_results", "The value there is this replica's own already.")
        self._check_current("local_results")
        return self._leaves.local_results(value)

    # -- input

    @user_code.shorten_errors
    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Divide each global batch of a dataset among the replicas.

        The R replicas get contiguous parts of the n rows, in order; the first `n mod R` replicas get one more row.
        If R does not divide n, the replicas really see different numbers of rows; a replica may get none.

        Args:
            dataset: yields global batches, nests of arrays with equally many rows. It is a grain dataset, a torch DataLoader,
                `mr.data.tfrecord_dataset`, `strategy.make_numpy_dataset(arrays).batch(n)`, a Hugging Face dataset with
                `.batch(n)`, any iterable that can be iterated again, or a function that makes an iterator, once a pass.
            options: see `mr.InputOptions`.

        Returns:
            A dataset of the same length that yields nests of PerReplica values.

        Raises:
            TypeError: when `dataset` is none of these.
            ValueError: when the policy in `options` cannot divide its files among the workers.

        >>> rows = strategy.make_numpy_dataset((np.arange(7), np.arange(7) % 2)).batch(4)
        >>> for x, y in strategy.distribute_dataset(rows):
        ...     print([value.tolist() for value in x.values])
        [[0, 1], [2, 3]]
        [[4, 5], [6]]

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#experimental_distribute_dataset
        """
        options, worker = self._checked_input(options, "distribute_dataset")
        check_dataset(dataset, "distribute_dataset", options.auto_shard_policy)
        policy, num_replicas = options.auto_shard_policy, self.num_replicas_in_sync
        plan = make_plan(adapted(dataset), policy, worker, num_replicas, options.drop_remainder)
        return self._register(DistributedDataset(self._mesh, options, worker, plan))

    @user_code.shorten_errors
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Give each replica the next element of a dataset that a function makes for its worker.

        The function itself makes batches and divides the records among the workers. R elements make one step;
        if the data ends within a step, the remaining replicas get no rows, so no element is dropped.

        Args:
            dataset_fn: takes a `mr.InputContext` and returns a dataset of per-replica batches, of the kinds that
                `distribute_dataset` takes. Called once on each worker, now.
            options: see `mr.InputOptions`.

        Raises:
            TypeError: when `dataset_fn` is no function, or does not return such a dataset.
            ValueError: when `options` names a policy for dividing records, and, while iterating, when the elements of
                one step have rows of different shapes.

        >>> def per_replica_batches(context):
        ...     size = context.get_per_replica_batch_size(4)
        ...     return [np.arange(start, min(start + size, 5)) for start in range(0, 5, size)]
        >>> for x in strategy.distribute_datasets_from_function(per_replica_batches):
        ...     print([value.tolist() for value in x.values])
        [[0, 1], [2, 3]]
        [[4], []]

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#distribute_datasets_from_function
        """
        if not callable(dataset_fn):
            raise TypeError(f"dataset_fn is {shown(dataset_fn)}; expected a function of a mr.InputContext.")
        options, worker = self._checked_input(options, "distribute_datasets_from_function")
        if options.auto_shard_policy in (AutoShardPolicy.FILE, AutoShardPolicy.DATA):
            raise ValueError(
                f"auto_shard_policy is {options.auto_shard_policy}, but dataset_fn shares the records out by itself, by "
                "context.input_pipeline_id. Leave the policy out, or use strategy.distribute_dataset(dataset, options)."
            )
        context = InputContext(worker.count, worker.index, self.num_replicas_in_sync)
        dataset = dataset_fn(context)
        check_dataset(dataset, "distribute_datasets_from_function")
        plan = plan_of_function(adapted(dataset), worker, context)
        return self._register(DistributedDataset(self._mesh, options, worker, plan))

    def _checked_input(self, options: InputOptions | None, verb: str) -> tuple[InputOptions, InputWorker]:
        if options is not None and not isinstance(options, InputOptions):
            raise TypeError(f"options is {shown(options)}; expected mr.InputOptions(...).")
        frames.require_cross_replica(verb, "Distribute the dataset before the step and pass its batches to it.")
        self._check_current(verb)
        workers = self._coordination
        return options or InputOptions(), InputWorker(workers.worker, workers.num_workers, coordination=workers)

    def _register(self, dataset: DistributedDataset) -> DistributedDataset:
        self._datasets.add(dataset)
        return dataset

    @user_code.shorten_errors
    def make_numpy_dataset(self, numpy_input: PyTree) -> NumpyDataset:
        """Make a dataset of the rows of arrays in memory; continue with `.shuffle(seed=0).batch(n)`.

        Args:
            numpy_input: a nest of numpy arrays with the same number of rows; lists are stacked. Arrays are not
                copied.

        >>> dataset = strategy.make_numpy_dataset(np.arange(6)).shuffle(seed=0).batch(4)
        >>> sorted(np.concatenate(list(dataset)).tolist())
        [0, 1, 2, 3, 4, 5]

        In TensorFlow: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/distribute/Strategy
        """
        return NumpyDataset(stacked_lists(numpy_input))

    @user_code.shorten_errors
    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], PyTree]) -> PyTree:
        """Make a PerReplica value by calling a function once for each replica, in order.

        Args:
            value_fn: takes a `mr.ValueContext` and returns an array or number, or a nest of them. The
                structure and dtypes must be the same for all replicas, and so must the ranks; shapes may differ.

        Raises:
            TypeError: for leaves that hold no numbers, or different dtypes.
            ValueError: for different structures or ranks.

        >>> strategy.distribute_values_from_function(lambda ctx: np.ones(ctx.replica_id_in_sync_group))
        PerReplica(shape=(None,), dtype=float32,
          0: [],
          1: [1.])

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/Strategy#experimental_distribute_values_from_function
        """
        if not callable(value_fn):
            raise TypeError(f"value_fn is {shown(value_fn)}; expected a function of a mr.ValueContext.")
        frames.require_cross_replica("distribute_values_from_function", "Compute the value in the step itself.")
        self._check_current("distribute_values_from_function")
        trees = (value_fn(ValueContext(i, self.num_replicas_in_sync)) for i in self._mesh.local_replicas)
        return distribute(self._mesh, self._coordination, trees)

    # -- guarantees

    def assert_mirrored(self) -> None:
        """Compare the real copies of every mirrored variable of this strategy, on all workers.

        This library's programs cannot make them differ, but a broken device or another library can. With several
        workers, all must call it; they compare checksums.

        Raises:
            ReplicasDivergeError: (a ValueError) naming the variable and the replicas that differ from replica 0.
            ContextError: (a RuntimeError) inside a step or an `mr.function`.
        """
        _require_untraced("assert_mirrored")
        equal_copies.check(self._mesh, live_variables(self._mesh))


def joint_strategy() -> Strategy | None:
    """Return one of this process's strategies for several workers, or None; all of them have the same workers."""
    return next((strategy for strategy in list(_process.strategies) if strategy.num_workers > 1), None)


class Parts(NamedTuple):
    """The parts of a strategy, for reports: `datasets` that still exist, and `ops`, the user's function in place of sums."""

    mesh: ReplicaMesh
    steps: Steps
    datasets: Iterable[DistributedDataset]
    ops: ReductionToOneDevice | None


def parts_of(strategy: Strategy) -> Parts:
    """Return the parts of a strategy."""
    return Parts(strategy._mesh, strategy._steps, strategy._datasets, strategy._ops)


def coordination_of(strategy: Strategy) -> Coordination:
    """Return the coordination between a strategy's workers."""
    return strategy._coordination


def _require_untraced(verb: str) -> None:
    if (frame := frames.current()) is not None and frame.bindings is not None:
        raise ContextError(
            f"strategy.{verb} was called inside a step or an mr.function, which is traced once and then run many times. "
            f"Call strategy.{verb}(...) outside, after it."
        )
