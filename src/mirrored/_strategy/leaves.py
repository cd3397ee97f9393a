"""A strategy's reduce, gather and local_results, for each leaf: a PerReplica, a variable, an array or a number."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._errors import PerReplicaError, StrategyMismatchError
from .._jax import user_code
from .._jax.marks import Mark, mark
from .._options import ReduceOp, ReductionToOneDevice, VariableSynchronization
from .._program.advice import Said
from .._program.refusals import check_outside
from .._replicas import arrays, collectives, cross_replica, frames, host_memory, placement
from .._replicas.cross_replica import Task
from .._replicas.division import placement_of_array
from .._replicas.mesh import ReplicaMesh
from .._replicas.per_replica import PerReplica, carried_sums, proven_of, require_whole, stack_of, uneven_shapes
from .._replicas.reductions import REDUCTIONS
from .._typing import REPLICA_AXIS, PyTree
from .._variables.access import all_copies, lent
from .._variables.variable import Variable, local_arrays, note_use, spec_of, use_value


@dataclasses.dataclass(frozen=True)
class Leaves:
    """The verbs of a strategy that work leaf by leaf, in cross-replica context."""

    mesh: ReplicaMesh
    strategy: object  # shown in messages
    ops: ReductionToOneDevice | None = None  # the user's function that replaces sums, if any

    def local_results(self, value: PyTree) -> tuple[Any, ...]:
        """Return a nest's local values, one nest for each local replica; a 1-tuple if it holds no PerReplica or variable."""
        frames.require_no_mesh_around()
        leaves, treedef = jax.tree.flatten(value, is_leaf=_is_distributed)
        for leaf in leaves:
            _refuse_stack(leaf, "local_results", self.mesh)
        if not any(map(_is_distributed, leaves)):
            return (value,)
        columns = [self._local_values(leaf) if _is_distributed(leaf) else itertools.repeat(leaf) for leaf in leaves]
        return tuple(jax.tree.unflatten(treedef, row) for row in zip(*columns, strict=False))

    def reduce(self, op: ReduceOp, tree: PyTree, axis: collectives.AxesLike) -> PyTree:
        values = (tree,) if type(tree) is PerReplica else jax.tree.leaves(tree, is_leaf=arrays.is_wrapped)
        is_mean, marks = op is ReduceOp.MEAN, REDUCTIONS[op].marks
        for state in filter(None, map(proven_of, values)):
            if marks is None:
                break
            is_judged = bool(state.advice.gradient)  # a sum of gradients
            if is_mean:  # of shares, or of values that replicas made of different numbers of rows
                is_judged = state.advice.said is Said.SHARE or (axis is None and state.of_uneven)
            if is_judged:
                note = Mark(marks[0], "strategy.reduce", user_code.user_line())
                check_outside([(note, proven_of(value)) for value in values], self.mesh.num_replicas)
                break
        if axis is None and type(tree) is PerReplica and (found := _carried_sum(op, tree, self.mesh)) is not None:
            return found
        return self._compute(tree, "reduce", lambda value: self._plan_reduce(op, value, axis))

    def _plan_reduce(self, op: ReduceOp, value: PerReplica | jax.Array, axis: collectives.AxesLike) -> Task | jax.Array:
        axes = collectives.normalize_axes(axis, value.ndim, "reduce")
        if not isinstance(value, PerReplica):
            return Task(cross_replica.reduce_mirrored, (op, axes, self.mesh.num_replicas, self.ops))
        cross_replica.require_equal_except(axes, value, "reduce")
        if not axes and (known := _carried_sum(op, value, self.mesh)) is not None:
            return known
        return Task(cross_replica.reduce_stack, (op, axes, uneven_shapes(value), self.ops))

    def gather(self, tree: PyTree, axis: int) -> PyTree:
        return self._compute(tree, "gather", lambda value: self._plan_gather(value, axis))

    def _plan_gather(self, value: PerReplica | jax.Array, axis: int) -> Task | jax.Array:
        position = collectives.check_axis(axis, value.ndim, "gather")
        if not isinstance(value, PerReplica):
            return Task(cross_replica.gather_mirrored, (position, self.mesh.num_replicas))
        cross_replica.require_equal_except((position,), value, "gather")
        shapes = uneven_shapes(value)
        if not _is_merged() and host_memory.gathers(self.mesh, stack_of(value)):
            return host_memory.gather(self.mesh, stack_of(value), position, shapes)
        whole = None if shapes is None or _is_merged() else self.mesh.mirrored
        return Task(cross_replica.gather_stack, (position, shapes, whole))

    def _compute(self, tree: PyTree, verb: str, task_of: Callable[[Any], Task | jax.Array]) -> PyTree:
        """Compute a result for each leaf of a nest: `task_of` returns the result or a task; one program runs all tasks."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=arrays.is_wrapped)
        results: list[Any] = [None] * len(leaves)
        tasks: dict[int, Task] = {}
        stacks: list[jax.Array] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Variable) and leaf.synchronization is not VariableSynchronization.ON_READ:
                self._note(leaf, verb)
                results[position] = use_value(leaf, lambda value: self._run([value], [task_of(value)])[0])
                continue
            value = self._own(leaf, verb)
            task = task_of(value)
            if isinstance(task, Task):
                tasks[position] = task
                stacks.append(stack_of(value) if isinstance(value, PerReplica) else value)
            else:
                results[position] = task
        for position, result in zip(tasks, self._run(stacks, list(tasks.values())), strict=True):
            results[position] = result
        return jax.tree.unflatten(treedef, results)

    def _run(self, stacks: list[jax.Array], tasks: Sequence[Any]) -> list[jax.Array]:
        if _is_merged():  # every replica holds the whole stacks
            return [task.function(_noted(array, task), *task.static) for array, task in zip(stacks, tasks, strict=True)]
        frames.require_no_mesh_around()
        return cross_replica.run_tasks(stacks, tasks, self.mesh.mirrored)

    def _note(self, variable: Variable, verb: str) -> None:
        self._check_own_variable(variable, verb)
        note_use(variable, verb)

    def _own(self, leaf: Any, verb: str) -> PerReplica | jax.Array:
        if isinstance(leaf, PerReplica):
            self._check_own(leaf, verb)
            return leaf
        if isinstance(leaf, Variable):
            self._note(leaf, verb)
            return all_copies(leaf)
        array = arrays.as_array(leaf, f"strategy.{verb}")
        _refuse_stack(array, verb, self.mesh)
        if self.mesh.is_alone and not self._is_elsewhere(array):
            return array
        if not self.mesh.is_alone and (frames.is_traced() or isinstance(array, jax.core.Tracer)):
            return array  # a constant of the program: all workers compare it later
        differ = functools.partial(placement.refuse_argument, f"what strategy.{verb} was given, no PerReplica")
        return placement.mirror(self.mesh, [array], differ)[0]

    def _check_own(self, value: PerReplica, verb: str) -> None:
        require_whole(value, lambda: f"{verb} got")
        if value.num_replicas != self.mesh.num_replicas or self._is_elsewhere(stack_of(value)):
            devices = sorted(map(str, getattr(getattr(stack_of(value), "sharding", None), "device_set", ())))
            raise StrategyMismatchError(
                f"{verb} got a PerReplica of {value.num_replicas} replicas, whose values lie on {devices}, but this is "
                f"{self.strategy!r}; it comes from another strategy. Use that strategy's verb."
            )

    def _check_own_variable(self, variable: Variable, verb: str) -> None:
        if spec_of(variable).mesh != self.mesh:
            raise StrategyMismatchError(
                f"{verb} got variable {variable.name!r}, which lives on {spec_of(variable).mesh}, but this is {self.strategy!r}. "
                "Use the strategy in whose scope it was created, or pass variable.value."
            )

    def _is_elsewhere(self, array: object) -> bool:
        """Tell whether an array is tied to devices of another strategy."""
        if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array) or not array.committed:
            return False
        return array.sharding is not self.mesh.stacked and array.sharding.device_set != self.mesh.mirrored.device_set

    def _local_values(self, leaf: PerReplica | Variable) -> tuple[Any, ...]:
        if isinstance(leaf, Variable):
            self._check_own_variable(leaf, "local_results")
            if spec_of(leaf).is_on_read or frames.is_traced():
                leaf = all_copies(leaf)
        if isinstance(leaf, Variable):  # the copies on this worker; others are not asked
            with lent([leaf]) as [stored]:
                copies = [copy for _, copy in local_arrays(leaf, stored) for _ in range(self.mesh.per_device)]
                if spec_of(leaf).division is not None:
                    copies = [leaf.value] * len(copies)
                values = tuple(map(jax.numpy.copy, copies))
        else:
            self._check_own(leaf, "local_results")
            values = leaf.values
        if isinstance(values[0], jax.core.Tracer):
            return values
        # All on one device, because JAX does not combine arrays on different devices.
        device = self.mesh.local_devices[0]
        return tuple(jax.device_put(value, device) for value in values)


def _carried_sum(op: ReduceOp, value: PerReplica, mesh: ReplicaMesh) -> jax.Array | None:
    """Return a value's SUM or MEAN if its step has computed it on this mesh, and nobody has deleted it."""
    known = carried_sums(value)
    if known is None or known[2] is not mesh:
        return None
    result = {ReduceOp.SUM: known[0], ReduceOp.MEAN: known[1]}.get(op)
    if result is None or isinstance(result, jax.core.Tracer):
        return result
    return None if result.is_deleted() or stack_of(value).is_deleted() else result


def _refuse_stack(leaf: object, verb: str, mesh: ReplicaMesh) -> None:
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    if not is_array or REPLICA_AXIS not in getattr(leaf.sharding, "spec", ()) or leaf.sharding == placement_of_array(mesh, leaf):
        return
    arguments = {"reduce": "'sum', nest", "gather": "nest, axis=0"}.get(verb, "nest")
    raise PerReplicaError(
        f"{verb} got the array of all replicas that jax.tree.map takes out of a PerReplica. Give it the nest as it is: "
        f"strategy.{verb}({arguments}). Where a function looks at each leaf, keep them whole: jax.tree.map(fn, nest, "
        "is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))."
    )


def _noted(stack: jax.Array, task: Task) -> jax.Array:
    """Mark a stack, for the proof, that merged code adds up over all replicas."""
    if task.function is not cross_replica.reduce_stack or (marks := REDUCTIONS[task.static[0]].marks) is None:
        return stack
    return mark(stack, Mark(marks[1], "strategy.reduce", user_code.user_line()))


def _is_merged() -> bool:
    """Tell whether the program is in merged code, where every replica holds all replicas' values."""
    return (frame := frames.current()) is not None and frame.axis is not None


def _is_distributed(value: object) -> bool:
    return isinstance(value, PerReplica | Variable)
