"""An optimizer that combines gradients over the replicas and updates mirrored variables, over any optax transformation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import keystr

from . import _process, _tf_names
from ._errors import ContextError, PerReplicaError
from ._jax import user_code
from ._jax.marks import Mark, Purpose, mark
from ._models.libraries import own_variable
from ._options import ReduceOp, Storage
from ._program.refusals import check_outside
from ._replicas import cross_replica, frames
from ._replicas.collectives import ReplicaAxis, all_reduce
from ._replicas.context import axis_of, own_parts
from ._replicas.frames import Frame
from ._replicas.mesh import ReplicaMesh
from ._replicas.per_replica import PerReplica, is_per_replica, proven_of, stack_of
from ._text import call_it, shown
from ._transforms.gradients import check_variables, value_and_grad
from ._typing import PyTree
from ._variables.access import copied, lent
from ._variables.assignment import check_per_replica
from ._variables.making import make
from ._variables.tree import trainable
from ._variables.variable import Variable, is_variable, spec_of

Aggregate = Literal["sum", "mean"] | ReduceOp | bool | None
_SAID = {ReduceOp.SUM: Purpose.SUMMED_GRADIENT, ReduceOp.MEAN: Purpose.MEAN_GRADIENT}


@_tf_names.hints("mr.Optimizer")
class Optimizer:
    """An optax transformation and the variables that it updates. In a step it first combines the replicas' gradients.

    Make it in `strategy.scope()`, like the variables: it creates the transformation's state once, as mirrored variables.

    Args:
        tx: an `optax.GradientTransformation`, for example `optax.adam(1e-3)`.
        variables: the mirrored floating point variables to train, in any nest.
        aggregate: how `apply_gradients` combines the replicas' gradients. Default: as the loss says. One loss for each example
            and the losses of `mr.losses` are shares, whose gradients are summed. For any other scalar, `"mean"` says that the
            loss is a mean over the replica's own rows, `jnp.mean(per_example_loss)`: gradients are averaged, weighted by the
            replicas' rows. `"sum"`: the loss was divided by all rows. `False`: the gradients are already combined.
        shard_state: whether large arrays of the state are stored in parts (`mr.Storage`), also where the variables are not: each
            device stores and updates its parts, and gets the variables' other parts from other devices. The numbers are the same.

    Raises:
        TypeError: when `tx` is no transformation or `variables` holds anything else.
        ValueError: for a sync-on-read variable, a variable listed twice, and any other `aggregate`.

    >>> with strategy.scope():
    ...     w = mr.Variable(1.0, name="w")
    ...     optimizer = mr.Optimizer(optax.sgd(0.1), [w])
    >>> def step(x):
    ...     losses, gradients = mr.value_and_grad(lambda: w.value * x, [w])()  # one loss for each example
    ...     optimizer.apply_gradients(gradients)
    >>> [x] = strategy.distribute_dataset([np.array([1.0, 2.0])])
    >>> strategy.run(step, args=(x,))  # 1 - 0.1 * (1 + 2) / 2
    >>> round(float(w), 6)
    0.85

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/keras/optimizers/Optimizer
    """

    def __init__(
        self, tx: optax.GradientTransformation, variables: PyTree, *, aggregate: Aggregate = None, shard_state: bool = False
    ) -> None:
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise TypeError(f"tx is {shown(tx)}; expected an optax transformation, for example optax.adam(1e-3).")
        if (frame := frames.current()) is not None and frame.bindings is not None:
            raise ContextError(
                f"mr.Optimizer was created inside a step, at {user_code.user_line()}. Its state must outlive the step: create "
                "it once, before, next to the variables."
            )
        self._aggregate = _parse_aggregate(aggregate)
        self._tx = tx
        self._leaves, self._treedef = check_variables(variables, "mr.Optimizer", "mr.Optimizer(optax.adam(1e-3), [w, b])")
        for name in (variable.name for variable in self._leaves if spec_of(variable).is_on_read):
            raise ValueError(
                f"variable {name!r} is sync-on-read: each replica has its own value, and an optimizer needs mirrored ones."
            )
        # The state is on the variables' devices, even if the optimizer is made outside their scope.
        mesh = spec_of(self._leaves[0]).mesh
        with frames.entered(Frame(None, mesh)):
            is_sharded = (shard_state or _process.what_if.shard_state) and mesh.storage is Storage.WHOLE
            storage = Storage.PARTS if is_sharded else None
            state = self._first_state(mesh)
            paths, self._state_treedef = jax.tree_util.tree_flatten_with_path(state)
            del state  # `paths` has the arrays
            self._state: list[Variable] = []
            while paths:  # removed one by one, so that all arrays never exist twice
                path, leaf = paths.pop(0)
                self._state.append(Variable(leaf, name=f"optimizer{keystr(path)}", trainable=False, storage=storage))
            self._iterations = Variable(np.int32(0), name="optimizer.iterations", trainable=False)

    def _first_state(self, mesh: ReplicaMesh) -> PyTree:
        """Return the transformation's first state; make it in parts if a variable is stored in parts."""
        if not any(spec_of(variable).division for variable in self._leaves):
            return mesh.evaluate(self._tx.init, self._as_tree(copied(self._leaves)))
        with lent(self._leaves) as arrays:
            given = list(zip(map(spec_of, self._leaves), arrays, strict=True))
            return make(lambda *values: self._tx.init(self._as_tree(list(values))), mesh, given=given)

    @property
    def variables(self) -> PyTree:
        """The trained variables, in the structure that the user passed."""
        return self._as_tree(self._leaves)

    @property
    def state(self) -> PyTree:
        """The transformation's state: its tree, with variables as leaves."""
        return jax.tree.unflatten(self._state_treedef, self._state)

    @property
    def iterations(self) -> Variable:
        """The number of updates by `apply_gradients` or `minimize`: an int32 variable, saved in checkpoints."""
        return self._iterations

    def minimize(self, loss: Callable[[], Any], var_list: PyTree = None, **options: Any) -> jax.Array:
        """Differentiate a loss, update the variables with its gradients, and return its value.

        It calls `mr.value_and_grad(loss, variables)()` and `apply_gradients`, so inside a step the loss is this replica's own.

        Args:
            loss: a function without arguments that returns one loss for each example, or a scalar, as for `mr.value_and_grad`.
            var_list: the variables to update, in any nest. Default: all.
            **options: options of `apply_gradients`.

        Raises:
            TypeError: when `loss` is no function, or returns no loss.
            ValueError: for a variable of another optimizer, and as in `apply_gradients`.

        >>> with strategy.scope():
        ...     w = mr.Variable(1.0, name="w")
        ...     optimizer = mr.Optimizer(optax.sgd(0.1), [w])
        >>> [x] = strategy.distribute_dataset([np.array([1.0, 2.0])])
        >>> loss = strategy.run(lambda x: optimizer.minimize(lambda: w.value * x), args=(x,))  # 1 - 0.1 * (1 + 2) / 2
        >>> float(strategy.reduce("sum", loss)), round(float(w), 6), int(optimizer.iterations)
        (1.5, 0.85, 1)

        In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/keras/optimizers/Optimizer
        """
        if not callable(loss):
            raise TypeError(
                f"minimize got an object of type {type(loss).__name__} as its loss; expected a function of no arguments that "
                "computes it, so that it can be differentiated: optimizer.minimize(lambda: loss_of(x))."
            )
        variables = self.variables
        if var_list is not None:
            variables = trainable(var_list)
        value, gradients = value_and_grad(loss, variables)()
        leaves = jax.tree.leaves(variables, is_leaf=is_variable)
        self.apply_gradients(zip(jax.tree.leaves(gradients), leaves, strict=True), **options)
        return value

    @user_code.shorten_errors
    def apply_gradients(self, grads: PyTree | Iterable[tuple[Any, Variable]], aggregate: Aggregate = None, **extra: Any) -> None:
        """Combine the gradients over the replicas, in one packed all-reduce, and update the variables.

        Outside a step each gradient is already one value, and the update happens at once. (A PerReplica is combined
        first; a mean gives all replicas equal weight.)

        Args:
            grads: a tree like `variables`, or `zip(grads, variables)`. A variable whose gradient is None or not in
                the zip does not change, nor does its part of the state.
            aggregate: `"sum"`, `"mean"`, or False if the gradients are already combined over the replicas, as in
                `mr.Optimizer`. Default: the optimizer's own `aggregate`, or else what the loss says. True is `"sum"`.
            **extra: further arguments of the transformation's `update`, such as `value=loss` for
                `optax.contrib.reduce_on_plateau`, or `value`, `grad` and `value_fn` for `optax.lbfgs`. They must be the same
                on every replica, so sum a loss over the replicas. Other transformations ignore them.

        Raises:
            FactorOfReplicasError: (a ValueError) for a sum of gradients that are already combined, and for a mean of gradients
                whose loss is a share of the global batch's.
            ReplicasDivergeError: (a ValueError) for gradients that are not combined yet, if `aggregate` is False.
            UnevenReplicasError: (a ValueError) for a mean in an uneven step whose arguments divide differently.
            ValueError: for any other `aggregate`, structure or shape, for a variable that is twice in the zip, when there is no
                gradient at all, or when an update changes the structure of the transformation's state.
            TypeError: for a gradient that is neither an array nor None.
        """
        said = self._aggregate if aggregate is None else _parse_aggregate(aggregate)
        gradients = self._aligned(grads)
        pairs = list(zip(gradients, self._leaves, strict=True))
        combined = iter(self._combined([(gradient, v) for gradient, v in pairs if gradient is not None], said))
        complete = [jnp.zeros(v.shape, v.dtype) if gradient is None else next(combined) for gradient, v in pairs]
        self._update(complete, [gradient is None for gradient in gradients], extra)

    def _update(self, gradients: list[jax.Array], is_skipped: list[bool], extra: dict[str, Any]) -> None:
        def compute(gradients: list[Any], values: list[Any], state: list[Any]) -> tuple[list[Any], list[Any]]:
            tree, gradient_tree = self._as_tree(values), self._as_tree(gradients)
            if isinstance(gradient_tree, optax.LookaheadParams):
                gradient_tree = gradient_tree.fast  # `optax.lookahead` takes gradients only of the fast values
            state_tree = jax.tree.unflatten(self._state_treedef, state)
            updates, new_state = optax.with_extra_args_support(self._tx).update(gradient_tree, state_tree, tree, **extra)
            if (changed := jax.tree.structure(new_state)) != self._state_treedef:
                raise ValueError(
                    f"an update has made a state of another structure, {changed}; expected that of tx.init, "
                    f"{self._state_treedef}, which is kept in variables. optax.monitor does so: leave it out, and return what it "
                    "measures from the step."
                )
            return jax.tree.leaves(optax.apply_updates(tree, updates)), jax.tree.leaves(new_state)

        new_values, new_state = compute(gradients, [v.value for v in self._leaves], [v.value for v in self._state])
        new = list(zip(self._leaves, new_values, is_skipped, strict=True))
        new += zip(self._state, new_state, self._skipped_state(is_skipped), strict=True)
        for variable, value, keep in new:
            if not keep:
                variable.assign(value)
        self._iterations.assign_add(1)

    def _skipped_state(self, is_skipped: list[bool]) -> list[bool]:
        """Return a flag for each state variable: whether its trained variable has no gradient."""
        if not any(is_skipped):
            return [False] * len(self._state)
        variables, _ = jax.tree_util.tree_flatten_with_path(self._as_tree(is_skipped))
        skipped = {keystr(path): skip for path, skip in variables}

        def of_state(path: str) -> bool:
            # `[0].mu['w']` belongs to `['w']`: in `optax.masked` the state has fewer leaves than there are variables.
            owners = [owner for owner in skipped if path.endswith(owner)]
            return bool(owners) and skipped[max(owners, key=len)]

        paths = jax.tree.unflatten(self._state_treedef, [variable.name for variable in self._state])
        flags = optax.tree_map_params(self._tx.init, of_state, paths, transform_non_params=lambda _: False)
        return jax.tree.leaves(flags)

    def _combined(self, pairs: list[tuple[Any, Variable]], said: ReduceOp | Literal[False] | None) -> list[jax.Array]:
        frame = frames.current()
        op, purpose, where = said or None, Purpose.GRADIENT, user_code.user_line()
        if said is None:  # the loss says it
            op = ReduceOp.SUM
        elif op is not None:
            purpose = _SAID[op]
        notes = [Mark(purpose, v.name, where, id(self)) for _, v in pairs]
        if frame is None or frame.replica is None:
            axis = None if frame is None else frame.axis
            values = [_one_value(gradient, v, op, axis, note) for note, (gradient, v) in zip(notes, pairs, strict=True)]
            if axis is None:
                given = [(note, proven_of(gradient)) for note, (gradient, _) in zip(notes, pairs, strict=True)]
                check_outside(given, spec_of(self._leaves[0]).mesh.num_replicas)
            return values
        if op is None:
            return [gradient for gradient, _ in pairs]
        marked = [mark(jnp.asarray(gradient), note) for note, (gradient, _) in zip(notes, pairs, strict=True)]
        return all_reduce(op, marked, axis_of(frame.replica))  # type: ignore[no-any-return]

    def _aligned(self, grads: PyTree | Iterable[tuple[Any, Variable]]) -> list[Any]:
        """Return the gradients in the variables' order, with None for a variable without one."""
        pairs = _as_pairs(grads)
        given = self._from_pairs(pairs) if pairs is not None else self._from_tree(grads)
        if all(gradient is None for gradient in given):
            raise ValueError(
                "apply_gradients got no gradient for any variable: every one is None. Check that the loss depends on the "
                "variables."
            )
        return list(map(_checked_gradient, given, self._leaves))

    def _from_pairs(self, pairs: list[tuple[Any, Variable]]) -> list[Any]:
        given: dict[Variable, Any] = {}
        for gradient, variable in pairs:
            if all(variable is not leaf for leaf in self._leaves):
                raise ValueError(
                    f"variable {variable.name!r} in zip(grads, variables) is not one that this optimizer was made for "
                    f"({', '.join(repr(v.name) for v in self._leaves)}). Pass it to mr.Optimizer(tx, variables) too."
                )
            if variable in given:
                raise ValueError(f"variable {variable.name!r} is twice in zip(grads, variables); add its gradients first.")
            given[variable] = gradient
        return list(map(given.get, self._leaves))

    def _from_tree(self, grads: PyTree) -> list[Any]:
        try:
            return self._treedef.flatten_up_to(grads)  # None in a variable's place means no gradient
        except ValueError as error:
            treedef = jax.tree.structure(grads, is_leaf=lambda x: is_per_replica(x) or is_variable(x))
            raise ValueError(
                f"apply_gradients got gradients of structure {treedef}; expected {self._treedef}, like the variables, or "
                f"zip(grads, variables).{call_it(grads)}"
            ) from error

    def _as_tree(self, leaves: list[Any]) -> PyTree:
        return jax.tree.unflatten(self._treedef, leaves)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _tf_names.INSTEAD["mr.Optimizer"]:  # else a user would set a learning rate that nobody reads
            raise _tf_names.missing("mr.Optimizer", name)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        names = ", ".join(repr(variable.name) for variable in self._leaves)
        return f"mr.Optimizer({names}; {len(self._state)} state variables)"


def _as_pairs(grads: PyTree | Iterable[tuple[Any, Variable]]) -> list[tuple[Any, Variable]] | None:
    """Return the pairs of `zip(grads, variables)`, an iterator or a list; None for a tree."""
    pairs = list(grads) if isinstance(grads, Iterator) else grads
    if isinstance(pairs, list) and pairs and all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        pairs = [(gradient, own_variable(variable)) for gradient, variable in pairs]
        if all(isinstance(variable, Variable) for _, variable in pairs):
            return pairs
    if isinstance(grads, Iterator):
        raise TypeError(f"apply_gradients got an iterator of {shown(pairs)}; expected pairs, as of zip(grads, variables).")
    return None


def _checked_gradient(gradient: object, variable: Variable) -> Any:
    name = variable.name
    if gradient is None:
        return None
    if not isinstance(gradient, PerReplica):
        if not hasattr(gradient, "shape") and not isinstance(gradient, int | float):
            raise TypeError(f"the gradient of variable {name!r} is {shown(gradient)}; expected an array.{call_it(gradient)}")
        gradient = jnp.asarray(gradient)
        if jnp.iscomplexobj(gradient) and not jnp.issubdtype(variable.dtype, jnp.complexfloating):
            raise TypeError(f"the gradient of variable {name!r} has dtype {gradient.dtype}; expected {variable.dtype}.")
    if tuple(gradient.shape) != variable.shape:
        raise ValueError(f"the gradient of variable {name!r} has shape {tuple(gradient.shape)}; expected {variable.shape}.")
    return gradient


def _parse_aggregate(aggregate: Aggregate) -> ReduceOp | Literal[False] | None:
    if aggregate is True:
        return ReduceOp.SUM
    if aggregate is None or aggregate is False:
        return aggregate
    return ReduceOp.parse(aggregate, "aggregate", among=_SAID)


def _one_value(
    gradient: jax.Array | PerReplica, variable: Variable, op: ReduceOp | None, axis: ReplicaAxis | None, note: Mark
) -> jax.Array:
    if not isinstance(gradient, PerReplica):
        return gradient
    if op is None:
        raise PerReplicaError(
            f"apply_gradients(aggregate=False) outside a step got a PerReplica as the gradient of {variable.name!r}. Reduce "
            "it with strategy.reduce('sum', gradient), or leave aggregate=False out."
        )
    spec, stack = spec_of(variable), stack_of(gradient)
    check_per_replica(spec, "apply_gradients", gradient)
    if axis is not None:  # in merge_call, where the rows are known, and what the loss says
        return all_reduce(op, mark(own_parts(gradient, axis), note), axis)
    if isinstance(stack, jax.core.Tracer):
        return cross_replica.reduce_stack(stack, op, (), None)
    return cross_replica.compiled(cross_replica.reduce_stack, spec.mesh.mirrored, op, (), None)(stack)
