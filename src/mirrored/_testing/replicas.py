"""Compares the results of a training on different numbers of replicas."""

from __future__ import annotations

import collections.abc
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from .._errors import ContextError
from .._options import VariableAggregation, VariableSynchronization
from .._program import recompilations
from .._replicas import frames
from .._replicas.per_replica import PerReplica
from .._strategy.strategies import MirroredStrategy
from .._strategy.strategy import parts_of
from .._text import counted, list_lines, shown
from .._typing import PyTree
from .._variables.variable import Variable, live_variables
from .._variables.variable import listeners as variable_listeners

#: Bytes of a floating number -> relative tolerance: over a few steps, sums in another order differ by no more.
_RTOL = {2: 2e-2, 4: 1e-4, 8: 1e-8}

_REASONS = """The usual reasons, most frequent first:
  * a loss that is the mean over the replica's own rows: the optimizer sums the gradients, which are then R times too large.
    Return one loss for each example, or mr.losses.mean_over_own_rows(loss); for regularization
    mr.losses.scale_regularization_loss(loss); or say it to the optimizer: apply_gradients(gradients, aggregate='mean');
  * a batch that each replica gets whole: pass what strategy.distribute_dataset(batches) yields;
  * rows that meet in the model or the loss (BatchNorm by hand, a baseline, InfoNCE, mixup) and are the replica's own: write
    ctx.all_reduce('mean', ...) or ctx.all_gather(rows, axis=0) there;
  * random numbers that do not belong to rows: a key without ctx.rng(key), an old key (PRNGKey), jax.random.gamma, or a draw
    whose first axis is not that of the rows;
  * a batch size, number of steps or learning rate that is computed from strategy.num_replicas_in_sync;
  * rounding that grows: Adam makes a whole step of a gradient near zero. Train fewer steps, or pass rtol and atol."""


def assert_same_on_any_replicas(
    train: Callable[..., PyTree],
    *args: Any,
    num_replicas: Sequence[int] = (1, 2, 3, 8),
    devices: Sequence[str | jax.Device] | None = None,
    rtol: float | None = None,
    atol: float = 1e-6,
    ignore: Sequence[str] = (),
) -> None:
    """Fail unless a training gives the same numbers on each number of replicas as on the first.

    It compares all arrays, numbers and variables in the result, and every other variable that the training made and a step
    used. For a sync-on-read variable it compares the aggregate, and skips one without an aggregation. If numbers differ, it
    repeats the training on the first number of replicas, to see whether the training gives the same numbers twice.

    Args:
        train: takes a strategy, then `args`. It makes its variables in `strategy.scope()`, and may return values to compare,
            such as the losses: a nest of mirrored arrays, variables and numbers. It must not depend on anything that changes.
        args: further arguments of `train`, such as a list of global batches. Each call gets the same objects.
        num_replicas: at least two numbers. If a number does not divide the batches, its steps are uneven.
        devices: at least as many as the largest number, of one kind. Default: virtual CPU devices, made if JAX has not started.
        rtol, atol: floating numbers a and b are the same when `abs(a - b) <= atol + rtol * abs(a)`. `rtol` by default: 1e-4 for
            float32, 1e-8 for float64, 0.02 for 16 bits. Integers, booleans and random keys must be equal. NaN equals NaN.
        ignore: names of variables that are not compared.

    Raises:
        AssertionError: when a value differs; it names it, the numbers of replicas, the largest difference and the usual reasons.
        TypeError: for a PerReplica or something that holds no numbers in the result, and for wrong arguments.
        ValueError: when there is nothing to compare, and when `train` does not use the strategy that it is given.
        DeviceError: (a ValueError) for too few devices.
        ContextError: (a RuntimeError) in a scope or step.
        Exception: any exception of `train`, with the number of replicas as a note.

    >>> from mirrored import testing
    >>> def train(strategy, batches):
    ...     with strategy.scope():
    ...         w = mr.Variable(np.zeros(3), name="w")
    ...         optimizer = mr.Optimizer(optax.sgd(0.1), [w])
    ...     def step(x):
    ...         loss = lambda: (jnp.matmul(x, w) - 1) ** 2
    ...         value, gradients = mr.value_and_grad(loss, [w])()
    ...         optimizer.apply_gradients(gradients)
    ...         return value
    ...     return [strategy.reduce("sum", strategy.run(step, args=(x,))) for x in strategy.distribute_dataset(batches)]
    >>> batches = [np.ones((4, 3), np.float32), np.ones((3, 3), np.float32)]
    >>> testing.assert_same_on_any_replicas(train, batches, num_replicas=(1, 2))
    """
    _check(train, args, num_replicas, ignore)
    for name, value in (("rtol", 0.0 if rtol is None else rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating) or not value >= 0:
            raise ValueError(f"{name} is {value!r}; expected a number of 0 or more, such as {name}=1e-3.")
    differ = functools.partial(_differ, rtol=rtol, atol=atol)
    largest = max(num_replicas)
    devices = [f"cpu:{i}" for i in range(largest)] if devices is None else devices
    all_devices = MirroredStrategy(devices).devices  # makes the missing ones
    if len(all_devices) < largest:
        raise ValueError(
            f"num_replicas has {largest}, and devices only {len(all_devices)}: {devices}. Each replica needs its own; "
            "leave devices out for virtual CPU devices."
        )
    first, *others = num_replicas
    reference, is_used = _train(train, args, all_devices[:first], ignore)
    if not reference:
        raise ValueError(
            "there is nothing to compare: train(strategy) returned no array, number or variable, and no step of this strategy "
            "has used a variable that was made in it. Make the variables in `with strategy.scope():`, run the steps by "
            "strategy.run, and return what shall be compared, such as the losses."
        )
    for count in others:
        found, is_used_too = _train(train, args, all_devices[:count], ignore)
        is_used = is_used and is_used_too
        if differences := _compare(reference, found, first, count, differ):
            twice, _ = _train(train, args, all_devices[:first], ignore)
            reasons = _REASONS
            if again := _compare(reference, twice, first, first, differ):
                reasons = (
                    f"But it gives other numbers each time; twice with {_replicas(first)}:{list_lines(again)}\n"
                    "Give initial values, shuffling and keys fixed seeds, and make them in train(strategy): nothing may go on "
                    "from before."
                )
            pair = f"with {_replicas(count)} than with {_replicas(first)}"
            raise AssertionError(f"train gives other numbers {pair}:{list_lines(differences)}\n{reasons}")
    if not is_used:
        raise ValueError(
            "nothing was tested: train(strategy) gives the same numbers, but it has run no step, made no variable and "
            "distributed no dataset with the strategy that it was given. Use that one in train(strategy), and make no other."
        )


def _differ(expected: np.ndarray, actual: np.ndarray, rtol: float | None, atol: float) -> np.ndarray:
    """Return the mask of the elements in which two arrays of one shape and dtype differ by more than rounding."""
    if not _is_floating(expected):
        return np.asarray(expected != actual)
    most = 8 if jax.config.jax_enable_x64 else 4  # Python's floats come from JAX, which computes in 32 bits
    size = min(most, expected.dtype.itemsize // (1 + np.iscomplexobj(expected)))
    rtol = _RTOL[max(2, size)] if rtol is None else rtol
    return ~np.isclose(_wide(actual), _wide(expected), rtol=rtol, atol=atol, equal_nan=True)


def _check(train: Any, args: Sequence[Any], num_replicas: Any, ignore: Any) -> None:
    if not callable(train):
        raise TypeError(
            f"train is {train!r}; expected a function of a strategy: def train(strategy, batches): ... that makes its "
            "variables in strategy.scope(), runs steps, and returns what shall be compared."
        )
    counts = list(num_replicas) if isinstance(num_replicas, Sequence) and not isinstance(num_replicas, str) else []
    is_count = [isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts]
    if len(set(counts)) < max(2, len(counts)) or not all(is_count):
        raise ValueError(
            f"num_replicas is {num_replicas!r}; expected two or more different numbers of replicas, such as (1, 2, 3)."
        )
    for position, arg in enumerate(args):
        if isinstance(arg, collections.abc.Iterator):
            raise TypeError(
                f"argument {position} after train is {arg!r}, an iterator that can be used only once; the second training "
                "would get nothing of it. Pass list(batches)."
            )
    if isinstance(ignore, str):
        raise TypeError(f"ignore is {ignore!r}; expected a list of names of variables: ignore=[{ignore!r}].")
    if frames.current() is not None:
        raise ContextError(
            "testing.assert_same_on_any_replicas was called in a scope or a step; it makes strategies of its own. Call it "
            "outside, and enter `with strategy.scope():` in train(strategy)."
        )


def _train(
    train: Callable[..., PyTree], args: Sequence[Any], devices: Sequence[jax.Device], ignore: Sequence[str]
) -> tuple[list[tuple[str, np.ndarray]], bool]:
    """Train on some devices; return all numbers by name, and whether the training used the strategy."""
    strategy = MirroredStrategy(list(devices))
    created: list[Variable] = []  # also those of other strategies
    programs: list[Any] = []
    note_program = lambda program, reason: programs.append(program)  # noqa: E731
    variable_listeners.append(created.append)
    recompilations.listeners.append(note_program)
    try:
        result = train(strategy, *args)
    except Exception as error:
        error.add_note(f"(in train(strategy) with {_replicas(len(devices))}, for testing.assert_same_on_any_replicas)")
        raise
    finally:
        variable_listeners.remove(created.append)
        recompilations.listeners.remove(note_program)
    live = set(live_variables(parts_of(strategy).mesh))
    made = [variable for variable in created if variable in live]
    names = [variable.name for variable in made]
    if unknown := sorted(set(ignore) - set(names)):
        raise ValueError(f"ignore has {unknown}, and the variables of train(strategy) are {names}. Leave the others out.")
    found = _of_result(result)
    for number, variable in enumerate(made):
        if variable.name not in ignore and not _is_without_value(variable):
            found.append((_name_of(variable, number), _numbers(variable)))
    has_run = any(program.mesh.devices == strategy.devices for program in programs)
    return found, bool(made) or has_run or "\n" in strategy.explain()  # `explain` has a line for each program and dataset


def _of_result(result: PyTree) -> list[tuple[str, np.ndarray]]:
    is_leaf = lambda leaf: isinstance(leaf, Variable | PerReplica)  # noqa: E731
    found = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(result, is_leaf=is_leaf)[0]:
        name = f"the result{jax.tree_util.keystr(path)}"
        if isinstance(leaf, PerReplica):
            raise TypeError(
                f"{name} of train(strategy) is a PerReplica, one value for each replica, which other numbers of them "
                "cannot have. Return strategy.reduce('sum', x), or strategy.gather(x, axis=0) for rows."
            )
        if isinstance(leaf, Variable) and _is_without_value(leaf):
            continue
        numbers = _numbers(leaf)
        if not jax.numpy.issubdtype(numbers.dtype, np.number) and numbers.dtype != np.bool_:
            raise TypeError(
                f"{name} of train(strategy) is {shown(leaf)}; expected arrays, numbers and variables only. Leave it out."
            )
        found.append((name, numbers))
    return found


def _numbers(leaf: Any) -> np.ndarray:
    value = leaf.value if isinstance(leaf, Variable) else leaf
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.array(value)


def _is_without_value(variable: Variable) -> bool:
    is_on_read = variable.synchronization is VariableSynchronization.ON_READ
    return is_on_read and variable.aggregation is VariableAggregation.NONE


def _name_of(variable: Variable, number: int) -> str:
    has_name = re.fullmatch(r"variable_\d+", variable.name) is None  # the number differs in each training
    return f"variable {variable.name!r}" if has_name else f"variable number {number} without a name, of shape {variable.shape},"


def _compare(
    reference: list[tuple[str, np.ndarray]],
    found: list[tuple[str, np.ndarray]],
    first: int,
    count: int,
    differ: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> list[str]:
    """Describe each difference between the numbers with `first` and with `count` replicas."""
    names, others = [name for name, _ in reference], [name for name, _ in found]
    if names != others:
        some = [f"{name} is only there with {_replicas(first)}" for name in names if name not in others]
        some += [f"{name} is only there with {_replicas(count)}" for name in others if name not in names]
        return some or [f"{len(names)} results and variables with {_replicas(first)}, {len(others)} with {_replicas(count)}"]
    lines = []
    for (name, a), (_, b) in zip(reference, found, strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            lines.append(f"{name} is {a.dtype}{list(a.shape)}, and {b.dtype}{list(b.shape)} with {_replicas(count)}")
        elif (differs := differ(a, b)).any():
            lines.append(f"{name} differs {_describe_largest(a, b, differs, first, count)}")
    return lines


def _describe_largest(expected: np.ndarray, actual: np.ndarray, differs: np.ndarray, first: int, count: int) -> str:
    """Describe the largest difference, and a common factor if there is one."""
    a, b = _wide(expected), _wide(actual)
    with np.errstate(all="ignore"):
        sizes = np.where(differs, np.nan_to_num(np.abs(b - a), nan=np.inf), -1.0).reshape(-1)
        place = int(np.argmax(sizes))
        factor = float(np.median(np.abs(b[a != 0] / a[a != 0]))) if (a != 0).any() else np.nan
        is_common = _is_floating(expected) and np.allclose(b, factor * a, rtol=1e-3, atol=0)
        is_common &= a.size > 1 or np.isclose(factor, (count / first, first / count), rtol=1e-3).any()  # else chance
    at = f" at {[int(i) for i in np.unravel_index(place, a.shape)]}" if a.ndim else ""
    where = f" in {differs.sum()} of {a.size} elements, most" * (a.size > 1)
    pair = f"{actual.reshape(-1)[place]} with {_replicas(count)}, {expected.reshape(-1)[place]} with {_replicas(first)}"
    return f"by {sizes[place]:.3g}{where}{at}: {pair}" + f"; {factor:.4g} times as large" * bool(is_common)


def _is_floating(array: np.ndarray) -> bool:
    return bool(jax.numpy.issubdtype(array.dtype, np.inexact))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _replicas(count: int) -> str:
    return counted(count, "replica")
