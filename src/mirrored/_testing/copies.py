"""Shows and compares the copies that the replicas' devices hold."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._errors import ContextError
from .._replicas import frames
from .._replicas.division import division_in
from .._replicas.per_replica import PerReplica
from .._strategy.strategy import Strategy, parts_of
from .._text import shown
from .._typing import PyTree
from .._variables.variable import Variable, live_variables, local_copies, spec_of

_HAS_COPIES = (Variable, PerReplica, jax.Array)


def copies(value: Variable | jax.Array) -> dict[int, np.ndarray]:
    """Return the copies of a variable or a mirrored array on this worker's devices, by replica number.

    The copies are on the host, and do not change with the variable. Those of a random key are the key's data.

    Args:
        value: a variable of any kind (of one that is stored in parts, the parts are returned), or an array that is the same on
            each replica, such as a mirrored result of `strategy.run`.

    Returns:
        A dict: replica number -> its copy, in the variable's shape. With several workers it has this worker's replicas.

    Raises:
        TypeError: for anything else; a PerReplica has values, which are not copies of each other.
        ValueError: for an array that is divided among the devices.
        ContextError: (a RuntimeError) inside a step, which sees only one replica's value.

    >>> from mirrored import testing
    >>> with strategy.scope():
    ...     w = mr.Variable(np.zeros(2), name="w")
    >>> testing.copies(w)
    {0: array([0., 0.], dtype=float32), 1: array([0., 0.], dtype=float32)}
    """
    _require_outside("copies")
    if isinstance(value, Variable):
        return dict(local_copies(value))
    if isinstance(value, PerReplica):
        raise TypeError(
            f"testing.copies got a PerReplica of shape {value.shape}: each replica has a value of its own, and there are no "
            "copies. Write strategy.local_results(x)."
        )
    if not isinstance(value, jax.Array):
        raise TypeError(
            f"testing.copies got {shown(value)} of type {type(value).__name__}; expected a mr.Variable, or an array that "
            "strategy.run returned: testing.copies(variable)."
        )
    return _of_array(value)


def assert_equal_copies(value: Strategy | PyTree) -> None:
    """Fail unless all copies on this worker's devices are equal, bit by bit.

    It shows where copies differ and by how much. In production, `strategy.assert_mirrored()` compares all workers' checksums.

    Args:
        value: a strategy, to compare every mirrored variable on its devices; or a nest of mirrored variables and arrays.

    Raises:
        AssertionError: when copies differ; it names the variable, the replicas, the place and the largest difference.
        ValueError: for a sync-on-read variable, which holds different values by design, and when there is nothing to compare.
        TypeError: for a value without copies.

    >>> from mirrored import testing
    >>> with strategy.scope():
    ...     w = mr.Variable(np.zeros(2), name="w")
    >>> testing.assert_equal_copies(w)
    >>> testing.assert_equal_copies(strategy)
    """
    _require_outside("assert_equal_copies")
    if isinstance(value, Strategy):
        named = [(_name_of(v), v) for v in live_variables(parts_of(value).mesh) if not spec_of(v).is_on_read]
    else:
        leaves = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda leaf: isinstance(leaf, _HAS_COPIES))[0]
        named = [(_name_of(leaf, jax.tree_util.keystr(path)), leaf) for path, leaf in leaves]
    if not named:
        raise ValueError(
            f"testing.assert_equal_copies got {shown(value)}, in which there is no mirrored variable and no array: nothing would "
            "be compared. Make the variables in `with strategy.scope():`, and keep them."
        )
    for name, leaf in named:
        division = isinstance(leaf, jax.Array) and division_in(leaf)
        if isinstance(leaf, Variable):
            division = spec_of(leaf).division
        if division:  # each element is on one device only
            continue
        if isinstance(leaf, Variable) and spec_of(leaf).is_on_read:
            raise ValueError(
                f"{name} is a sync-on-read variable: each replica has its own value, so that no copies are to be equal. Leave it "
                "out, or look at testing.copies(variable)."
            )
        _compare(name, copies(leaf))


def _compare(name: str, found: dict[int, np.ndarray]) -> None:
    (first, reference), *others = found.items()
    for replica, copy in others:
        if copy.tobytes() != reference.tobytes():
            raise AssertionError(
                f"the copies of {name} differ: replica {replica} from replica {first}, {_find_largest(reference, copy)}. They "
                "were changed behind the library's back, or a device computes wrongly."
            )


def _find_largest(a: np.ndarray, b: np.ndarray) -> str:
    """Describe the largest difference between two arrays of one shape and dtype."""
    bits = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1) for array in (a, b)]
    differs = (bits[0] != bits[1]).any(axis=1)
    with np.errstate(all="ignore"):
        sizes = np.abs(b.astype(np.complex128) - a.astype(np.complex128)).reshape(-1)
    place = int(np.argmax(np.where(differs, np.nan_to_num(sizes, nan=np.inf), -1.0)))
    at = [int(i) for i in np.unravel_index(place, a.shape)]
    pair = f"{b.reshape(-1)[place]} and {a.reshape(-1)[place]}"
    return f"in {differs.sum()} of {a.size} elements, most at {at}: {pair}, a difference of {sizes[place]:.3g}"


def _of_array(array: jax.Array) -> dict[int, np.ndarray]:
    if not array.is_fully_replicated:
        raise ValueError(
            f"testing.copies got an array of shape {array.shape} that is divided among the devices ({array.sharding}); expected "
            "one that is the same on each replica."
        )
    plain = jax.random.key_data(array) if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) else array
    mesh = getattr(plain.sharding, "mesh", None)
    devices = sorted(plain.sharding.device_set, key=lambda device: device.id) if mesh is None else list(mesh.devices.flat)
    found = {devices.index(shard.device): np.array(shard.data) for shard in plain.addressable_shards}
    return dict(sorted(found.items()))


def _name_of(leaf: Any, path: str = "") -> str:
    if isinstance(leaf, Variable):
        return f"variable {leaf.name!r}"
    return "the array" + f" at {path}" * bool(path)


def _require_outside(name: str) -> None:
    if frames.is_traced():
        raise ContextError(
            f"testing.{name} was called inside a step or another traced function, where no device holds anything yet. "
            f"Call testing.{name}(...) outside, after it."
        )
