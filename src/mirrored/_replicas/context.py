"""The replica context: the replica that runs a step, and its collectives with the others."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from .. import _tf_names
from .._errors import ContextError, UnevenReplicasError
from .._jax import tracing, user_code
from .._options import ReduceOp, ReduceOpName
from .._text import shown
from .._typing import REPLICA_AXIS, ArrayLike, PyTree
from . import arrays, collectives, rows_drawn
from .collectives import ReplicaAxis
from .frames import Frame, current, entered
from .per_replica import PerReplica, stack_of, uneven_shapes


@_tf_names.hints("mr.ReplicaContext")
class ReplicaContext:
    """The replica that a step runs on: its number, its strategy, and its collectives with the other replicas.

    `mr.get_replica_context()` returns it inside the function passed to `strategy.run`. You may call its collectives
    under `jax.lax.scan`, `cond`, `while_loop` and nested `jax.jit`, as long as all replicas reach them.

    >>> def step():
    ...     ctx = mr.get_replica_context()
    ...     return ctx.all_reduce("sum", ctx.replica_id_in_sync_group + 1)
    >>> int(strategy.run(step))
    3

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/ReplicaContext
    """

    __slots__ = ("_axis", "_knows_id", "_strategy")

    def __init__(self, strategy: object, axis: ReplicaAxis) -> None:
        """Make a strategy's context; users get theirs from `mr.get_replica_context()`."""
        self._strategy = strategy
        self._axis = axis
        self._knows_id = False

    @property
    def strategy(self) -> Any:
        """The strategy whose step this is."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run this step together."""
        return self._axis.size

    @property
    def replica_id_in_sync_group(self) -> jax.Array:
        """This replica's number, 0 to R - 1: a traced int32, because all replicas run one program."""
        self._check_current("replica_id_in_sync_group")
        self._knows_id = True
        return jnp.asarray(self._axis.index(), jnp.int32)

    @overload
    def all_reduce(self, reduce_op: ReduceOp | ReduceOpName, value: ArrayLike, by_rows: bool | None = None) -> jax.Array: ...
    @overload
    def all_reduce(self, reduce_op: ReduceOp | ReduceOpName, value: PyTree, by_rows: bool | None = None) -> PyTree: ...
    def all_reduce(self, reduce_op: ReduceOp | ReduceOpName, value: PyTree, by_rows: bool | None = None) -> PyTree:
        """Combine each leaf of `value` element by element over the replicas; all replicas get the result.

        Each dtype that is added takes one collective for the whole tree. A MEAN adds floating point numbers in float32, and
        integers as integers, so that only its result is rounded. The gradient of a SUM or MEAN is the SUM or MEAN of the incoming
        gradients, as in TensorFlow; that of a MAX or MIN is their SUM, shared by the values that equal the result.

        Args:
            reduce_op: `"sum"`, `"mean"`, `"max"` or `"min"`, in any case. A SUM has the dtype of `jnp.sum`; an
                integer SUM that its dtype does not hold wraps around. A MEAN of integers is floating point; one of float16
                or bfloat16 is added in float32. In a step with an uneven batch, a MEAN weighs each replica by its rows and
                ignores one without rows: so the mean of the replicas' means is the mean over all rows. A replica's rows are
                the sizes in which its PerReplica arguments differ from those of other replicas. For a MAX of rows, of which a
                replica may have none, write `ctx.strategy.reduce("max", x, axis=0)`.
            value: arrays of any dtypes and Python numbers, in any nest. None stays None.
            by_rows: False gives all replicas the same weight in a mean. With an even batch it changes nothing.

        Raises:
            ValueError: for another operation, and for a sum by rows.
            TypeError: for a leaf that is not a number or an array.
            UnevenReplicasError: (a ValueError) for a MEAN by rows in a step with an uneven batch, if it is of gradients that
                came back through a collective, or if the arguments divide differently among the replicas.

        >>> def step(x):
        ...     return mr.get_replica_context().all_reduce("mean", {"a": x, "b": 2.0})
        >>> x = strategy.distribute_values_from_function(lambda ctx: float(ctx.replica_id_in_sync_group))
        >>> {name: float(v) for name, v in strategy.run(step, args=(x,)).items()}
        {'a': 0.5, 'b': 2.0}
        """
        self._check_current("all_reduce")
        op = ReduceOp.parse(reduce_op, "reduce_op")
        if by_rows and op is not ReduceOp.MEAN:
            raise ValueError(f"all_reduce({reduce_op!r}, by_rows=True): only a mean has weights. Write all_reduce('mean', ...).")
        return collectives.all_reduce(op, value, self._axis, by_rows=by_rows is not False)

    @overload
    def all_gather(self, value: ArrayLike, axis: int) -> jax.Array: ...
    @overload
    def all_gather(self, value: PyTree, axis: int) -> PyTree: ...
    def all_gather(self, value: PyTree, axis: int) -> PyTree:
        """Concatenate each leaf over the replicas along `axis`, in replica order; all replicas get the result.

        Args:
            value: arrays with at least one axis, in any nest.
            axis: the axis along which to join the leaves; negative counts from the end.

        Raises:
            ValueError: when a leaf has no such axis.

        >>> def step():
        ...     ctx = mr.get_replica_context()
        ...     return ctx.all_gather(ctx.replica_id_in_sync_group[None], axis=0)
        >>> print(strategy.run(step))
        [0 1]
        """
        self._check_current("all_gather")
        return collectives.all_gather(value, axis, self._axis)

    def merge_call(
        self, merge_fn: Callable[..., PyTree], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> PyTree:
        """Call `merge_fn(strategy, *args, **kwargs)` once, in cross-replica context.

        JAX arrays among the arguments arrive as PerReplica values that hold all replicas' arrays; everything else, also
        variables, arrives unchanged. PerReplica values in the result come back as this replica's part.

        Args:
            merge_fn: a function of the strategy and the arguments.
            args: positional arguments.
            kwargs: keyword arguments.

        >>> def step(x):
        ...     total = lambda strategy, x: strategy.reduce("sum", x)
        ...     return mr.get_replica_context().merge_call(total, args=(x,))
        >>> x = strategy.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group + 1)
        >>> int(strategy.run(step, args=(x,)))
        3
        """
        self._check_current("merge_call")
        check_call("merge_call", "ctx.merge_call(merge, args=(x,))", merge_fn, args, kwargs)
        merge = lambda v: PerReplica(*collectives.stack_uneven(v, self._axis)) if isinstance(v, jax.Array) else v  # noqa: E731
        merged_args, merged_kwargs = jax.tree.map(merge, (tuple(args), kwargs or {}), is_leaf=arrays.is_wrapped)
        outer = current() or Frame(self._strategy, None)
        with entered(dataclasses.replace(outer, strategy=self._strategy, replica=None, axis=self._axis)):
            result = merge_fn(self._strategy, *merged_args, **merged_kwargs)
        return own_parts(result, self._axis)

    def rng(self, key: jax.Array | int, rows: int | None = None, by_rows: bool = True) -> jax.Array:
        """Make a random key whose draws belong to this replica's rows: those of one device, on any number of replicas.

        A draw whose first axis counts the replica's rows, or several elements for each row, gets the numbers that one device
        draws for these rows of the whole batch. A draw of shape `[1, 1, n, ...]`, such as the one mask of Flax'
        attention, is the same on all replicas, unless they have one row each. Any other draw differs by replica. On the first
        replica all draws are those of `key`. Keys split or folded from this one draw by rows, too.

        The rows are those of the step's arguments. Keys other than `jax.random.key(seed, impl="threefry2x32")` are folded:
        their draws differ on each replica. So do `gamma`, `permutation`, and what is made of them.

        Args:
            key: a key from `jax.random.key`, or an int to make one from, the same on all replicas; or an array of such keys.
            rows: how many rows this replica draws for, where the replicas' arguments have several numbers of rows, or none.
            by_rows: False folds the replica's number into the key, except on the first replica: for `jax.random.poisson`, which
                takes JAX's own keys only, and for a key to keep.

        Raises:
            TypeError: for another key, and for `rows` that are no int.

        >>> def step(x):
        ...     return jax.random.uniform(mr.get_replica_context().rng(0), x.shape)
        >>> [x] = strategy.distribute_dataset([np.zeros(5)])
        >>> drawn = strategy.gather(strategy.run(step, args=(x,)), axis=0)
        >>> bool((drawn == jax.random.uniform(jax.random.key(0), 5)).all())
        True
        """
        keys, index = _as_key(key), self.replica_id_in_sync_group
        return rows_drawn.key_of(keys, self._axis, index, None if rows is None else _as_count(rows), by_rows)

    def row_keys(self, key: jax.Array | int, num_rows: int) -> jax.Array:
        """Make a key for each of this replica's rows: those that `jax.random.split(key, batch_size)` gives to these rows.

        It is for a model that `jax.vmap` applies to each row. Keys of other kinds than threefry differ by replica.

        Args:
            key: a key from `jax.random.key` or `ctx.rng`, or an int.
            num_rows: how many rows this replica has, such as `x.shape[0]`.

        Raises:
            TypeError: for another key, and for `num_rows` that is no int.

        >>> def step(x):
        ...     return jax.vmap(jax.random.uniform)(mr.get_replica_context().row_keys(0, x.shape[0]))
        >>> [x] = strategy.distribute_dataset([np.zeros(5)])
        >>> drawn = strategy.gather(strategy.run(step, args=(x,)), axis=0)
        >>> bool((drawn == jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(0), 5))).all())
        True
        """
        keys, index = _as_key(key, "row_keys"), self.replica_id_in_sync_group
        return rows_drawn.keys_of(keys, self._axis, index, _as_count(num_rows))

    def _check_current(self, verb: str) -> None:
        frame = current()
        if frame is not None and frame.replica is not None:
            is_current = frame.strategy is self._strategy and frame.replica._axis == self._axis
        else:
            is_current = not self._axis.bound and (frame is None or (frame.strategy is None and frame.axis is None))
        if not is_current:
            raise ContextError(
                f"{verb} of the replica context of {self._strategy!r} was used outside the step to which the context "
                "belongs. Ask for it where you use it: ctx = mr.get_replica_context() inside the step."
            )
        if self._axis.bound and tracing.is_mapped_over(REPLICA_AXIS):
            raise ContextError(
                f"ctx.{verb} was called under jax.vmap(..., axis_name={REPLICA_AXIS!r}), at {user_code.user_line()}: it would "
                "combine the elements of that axis, not the replicas. Give the axis of vmap another name."
            )


#: A context's way to the other replicas.
axis_of: Callable[[ReplicaContext], ReplicaAxis] = operator.attrgetter("_axis")
#: Whether a step has asked for the replica's number.
knows_id: Callable[[ReplicaContext], bool] = operator.attrgetter("_knows_id")


def current_replica() -> ReplicaContext | None:
    """Return the context of the replica whose program is being traced or run; None in cross-replica context."""
    frame = current()
    return None if frame is None else frame.replica


def _as_key(key: Any, verb: str = "rng") -> jax.Array:
    if isinstance(key, int | np.integer):
        return jax.random.key(key)
    if hasattr(key, "dtype"):
        array = jnp.asarray(key)
        if array.ndim == 0 and jnp.issubdtype(array.dtype, jnp.integer):
            return jax.random.key(array)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) or array.dtype == jnp.uint32:
            return array
    raise TypeError(f"{verb} got {shown(key)}; expected a key from jax.random.key(seed), or an int from which one is made.")


def _as_count(rows: object) -> int:
    if isinstance(rows, int | np.integer) and not isinstance(rows, bool) and rows >= 0:
        return int(rows)
    raise TypeError(f"the number of rows is {shown(rows)}; expected an int that is known while tracing, such as x.shape[0].")


def check_call(verb: str, example: str, function: object, args: object, kwargs: object) -> None:
    """Refuse wrong arguments of a verb that calls a user's function: it takes a function, a tuple and a dict."""
    if not callable(function):
        raise TypeError(f"{verb} got {shown(function)}; expected a function, not called: {example}.")
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"args of {verb} is {type(args).__name__}; expected a tuple or list of the positional arguments. For one argument "
            f"write {example}, with the comma."
        )
    if kwargs is not None and not (isinstance(kwargs, dict) and all(isinstance(name, str) for name in kwargs)):
        raise TypeError(f"kwargs of {verb} is {shown(kwargs)}; expected a dict of keyword arguments.")


def own_parts(tree: PyTree, axis: ReplicaAxis) -> PyTree:
    """Replace the PerReplica values in a tree by this replica's values, after a `merge_call`."""

    def own(value: Any) -> Any:
        if not isinstance(value, PerReplica):
            return value
        if uneven_shapes(value) is not None:
            raise UnevenReplicasError(
                f"a PerReplica with different shapes {value.shapes} cannot be handed to the replicas of one program. "
                "Pad the values to one shape first."
            )
        return jax.lax.dynamic_index_in_dim(stack_of(value), axis.index(), keepdims=False)

    return jax.tree.map(own, tree, is_leaf=arrays.is_wrapped)
