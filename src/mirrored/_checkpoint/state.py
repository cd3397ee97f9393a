"""Copies a program's state into plain host data, and restores it from there."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._models import objects
from .._options import VariableAggregation, VariableSynchronization
from .._replicas import cross_replica
from .._replicas.division import Division, division_in
from .._typing import PyTree
from .._variables.access import lent, lose, store, store_in_parts
from .._variables.variable import Variable, spec_of
from ..data._iterator import DistributedIterator, expect_saves, joined
from .array_files import Pieces
from .leaves import NUMBERS, Leaves, children_of, dtype_name, has_position, is_key, key_impl, kind_of, variables_of
from .verify import RECORD, DamagedStep


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a program at one step.

    Attributes:
        leaves: path -> description of the leaf, with the keys of its arrays, as JSON.
        arrays: key -> array that nothing else refers to; a restored one may be `InFiles`.
        pieces: this worker's parts of divided arrays; None without divided arrays.
    """

    leaves: dict[str, dict[str, Any]]
    arrays: dict[str, Any]
    pieces: Pieces | None = None


def positions_of(leaves: Leaves) -> dict[str, Any]:
    """Return the positions of this worker's iterators, as JSON, by path."""
    positions = {}
    for path, leaf in leaves.items():
        if has_position(leaf):
            try:
                positions[path] = json.loads(json.dumps(leaf.get_state()))
            except TypeError as error:
                raise TypeError(f"mr.Checkpoint: the position of {path} cannot be saved: {error}") from error
    return positions


def require_positions(leaves: Leaves) -> None:
    """Raise TypeError for an iterator whose position cannot be saved: now, not at the first save an hour later."""
    for path, leaf in leaves.items():
        try:
            positions_of({path: leaf})
        except TypeError:
            raise
        except Exception:
            pass  # some have a position only after their first batch; a broken pipeline raises when it is read
        if isinstance(leaf, DistributedIterator):
            expect_saves(leaf)


def take_snapshot(
    leaves: Leaves, positions: Sequence[Mapping[str, Any]], is_kept: bool, start: Callable[[Snapshot], None] = lambda _: None
) -> Snapshot | None:
    """Copy the state to this host, with every worker's positions; return None on a worker that writes nothing.

    All workers call this, because reading sync-on-read variables is a collective operation.

    Args:
        start: starts the thread that writes the snapshot; the pieces are queued afterwards.
    """
    on_devices: dict[str, jax.Array] = {}
    entries: dict[str, dict[str, Any]] = {}
    host: dict[str, np.ndarray] = {}
    variables = variables_of(leaves)
    with lent(variables) as stored:  # all at one moment, between two steps of other threads
        held = dict(zip(variables, stored, strict=True))
        for path, leaf in leaves.items():
            if has_position(leaf):
                entries[path] = {"kind": "position", "by_worker": [worker[path] for worker in positions]}
            elif isinstance(leaf, Variable | jax.Array):
                entries[path] = entry = _array_entry(leaf, held, on_devices)
                if "parts" in entry:
                    entry["value"] = f"p{len(entries)}"
            elif hasattr(leaf, "dtype"):
                entries[path] = {"kind": "array", "value": f"h{len(host)}"}
                host[f"h{len(host)}"] = np.array(leaf, dtype=leaf.dtype.newbyteorder("="))
            else:
                entries[path] = {"kind": "number", "type": type(leaf).__name__, "value": repr(leaf)}
        divided = {entries[path]["value"]: leaf for path, leaf in leaves.items() if "parts" in entries[path]}
        if not is_kept and not divided:
            return None
        pieces = Pieces() if divided else None
        for key, array in on_devices.items():
            if array.is_fully_replicated:
                on_devices[key] = array.addressable_data(0)
            on_devices[key].copy_to_host_async()  # all at once, before the first is awaited
        host |= {key: np.array(array) for key, array in on_devices.items()}
        for path, leaf in leaves.items():
            if entries[path].get("aggregation") == "SUM" and leaf.dtype.kind in "iu":
                exact = host[entries[path]["copies"]].sum(axis=0)  # in 64 bits; the device's sum may have wrapped around
                if not np.array_equal(exact, host[entries[path]["value"]]):
                    host[entries[path]["value"]] = np.asarray(exact)
        start(snapshot := Snapshot(entries, host, pieces))
        if pieces is not None:
            _give_pieces(pieces, divided, held)
    return snapshot


def _division_of(leaf: Variable | jax.Array) -> Division | None:
    return spec_of(leaf).division if isinstance(leaf, Variable) else division_in(leaf)


def _give_pieces(pieces: Pieces, divided: Mapping[str, Variable | jax.Array], held: Mapping[Variable, jax.Array]) -> None:
    """Queue this worker's parts, one after the other as they are written; workers with copies of the parts share the writing."""
    try:
        for key, leaf in divided.items():
            stored = held[leaf] if isinstance(leaf, Variable) else leaf
            division = _division_of(leaf)
            assert division is not None and isinstance(stored.sharding, jax.sharding.NamedSharding)
            devices = list(stored.sharding.mesh.devices.flat)
            for shard in stored.addressable_shards:
                copy, number = divmod(devices.index(shard.device), division.num_parts)
                if copy == number % division.num_copies:
                    pieces.put(f"{key}.{number}", division.without_padding(np.array(shard.data), number))
        pieces.end()
    except BaseException as error:
        pieces.end(error)
        raise


def _array_entry(leaf: Variable | jax.Array, held: Mapping[Variable, jax.Array], arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Return the entry of a leaf on devices; add those of its arrays that this process can read to `arrays`."""
    entry: dict[str, Any] = {"key": key_impl(leaf)} if is_key(leaf) else {}

    def add(array: jax.Array) -> str:
        key = f"d{len(arrays)}"
        arrays[key] = jax.random.key_data(array) if is_key(array) else array
        return key

    if (division := _division_of(leaf)) is not None:
        kind = "mirrored" if isinstance(leaf, Variable) else "array"
        parts = {"axis": division.axis, "count": division.num_parts, "shape": list(leaf.shape)}
        return {"kind": kind, "value": "", "parts": parts}
    if not isinstance(leaf, Variable):
        return entry | {"kind": "array", "value": add(leaf)}
    stored, mesh = held[leaf], spec_of(leaf).mesh
    is_mirrored = leaf.synchronization is VariableSynchronization.ON_WRITE
    copies = stored
    if not (mesh.is_alone or is_mirrored):  # this worker holds some rows only
        copies = cross_replica.compiled(jnp.asarray, mesh.mirrored)(stored)
    if is_mirrored:
        return entry | {"kind": "mirrored", "value": add(copies)}
    entry |= {"kind": "on_read", "aggregation": leaf.aggregation.name, "copies": add(copies)}
    if leaf.aggregation is not VariableAggregation.NONE:
        entry["value"] = add(cross_replica.compiled(cross_replica.aggregate_stack, mesh.mirrored, leaf.aggregation)(stored))
    return entry


# -- restoring

#: Similar names are suggested for so many problems only, because finding one takes up to a second.
_MOST_LIKENED = 5
#: A field that every entry of a kind has.
_WRITTEN = {"position": "by_worker", "number": "type", "array": "value", "mirrored": "value", "on_read": "copies"}


def require_readable(saved: Snapshot) -> None:
    """Raise DamagedStep for an entry that no save writes, before anything is assigned."""
    for path, entry in saved.leaves.items():
        try:
            written = entry[_WRITTEN[entry["kind"]]]
            if entry["kind"] == "position":
                written[0]
            elif entry["kind"] == "number":
                NUMBERS[written](entry["value"].strip())
            else:
                alike = [saved.arrays[entry["value"]]] if "value" in entry else []
                if "copies" in entry:
                    alike.append(saved.arrays[entry["copies"]][0])
                if len({(array.shape, array.dtype.kind) for array in alike}) > 1:
                    raise ValueError("its copies are not like its value")
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise DamagedStep(f"{RECORD} says of {path} what no save writes: {type(error).__name__}: {error}") from error


def find_differences(leaves: Leaves, saved: Snapshot, names: Iterable[str]) -> list[str]:
    """Return why leaves do not fit their saved values; `names` are all paths in the checkpoint."""
    problems = []
    for path in sorted({*leaves, *saved.leaves}):
        if path not in saved.leaves:
            problem = f"{path} ({kind_of(leaves[path])}) is not in the checkpoint"
            if len(problems) < _MOST_LIKENED:
                alike = difflib.get_close_matches(path, [name for name in names if name not in leaves], 1, 0.4)
                problem += "".join(f", which has {name}" for name in alike)
            problems.append(problem)
        elif path not in leaves:
            problems.append(f"{path} ({_saved_kind(saved, path)}) is in the checkpoint, and not among what is to be restored")
        else:
            problems += [f"{path} {problem}" for problem in _find_difference(leaves[path], saved, path)]
    return problems


def _find_difference(leaf: Any, saved: Snapshot, path: str) -> Iterator[str]:
    entry, here, there = saved.leaves[path], kind_of(leaf), _saved_kind(saved, path)
    if {here, there} & {"iterator", "number"}:
        is_single = entry["kind"] == "array" and "key" not in entry and _saved_contents(saved, entry)[1] == ()
        is_equal = here == there or (here == "number" and is_single)
    else:
        is_equal = (dtype_name(leaf), tuple(leaf.shape)) == _saved_contents(saved, entry)
    on_read_here = isinstance(leaf, Variable) and leaf.synchronization is VariableSynchronization.ON_READ
    if not is_equal:
        yield f"is {here} here, and {there} in the checkpoint"
    elif _takes_copies(leaf, saved, entry):
        return
    elif "copies" in entry and "value" not in entry:
        count = saved.arrays[entry["copies"]].shape[0]
        yield (
            f"was saved as {count} values, one for each replica, with aggregation NONE, so there is no single value for {here}"
            + (f" on {spec_of(leaf).mesh.num_replicas} replicas" if on_read_here else "")
            + f". Restore on {count} replicas, or save it with an aggregation, such as 'sum' or 'max'"
        )
    elif "copies" in entry and (total := saved.arrays[entry["value"]]).dtype != (copies := saved.arrays[entry["copies"]]).dtype:
        yield (
            f"was saved as {len(copies)} values whose sum {total} does not fit {copies.dtype}. Restore on {len(copies)} "
            "replicas, or leave it out: restore_latest(partial=True)"
        )
    elif on_read_here and leaf.aggregation is VariableAggregation.NONE:
        yield (
            f"is {here} with aggregation NONE here, and {there} in the checkpoint: one value does not say what each replica "
            "gets. Give the variable an aggregation"
        )


def _saved_contents(saved: Snapshot, entry: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    array = saved.arrays[entry.get("copies", entry.get("value"))]
    shape = array.shape
    if "copies" in entry:  # the first axis is that of the replicas
        shape = shape[1:]
    if "key" not in entry:
        return array.dtype.name, shape
    impl, data = entry["key"], jax.ShapeDtypeStruct(shape, array.dtype)
    return f"keys of {impl} ", jax.eval_shape(functools.partial(jax.random.wrap_key_data, impl=impl), data).shape


def _saved_kind(saved: Snapshot, path: str) -> str:
    entry = saved.leaves[path]
    if name := {"position": "iterator", "number": "number"}.get(entry["kind"]):
        return name
    dtype, shape = _saved_contents(saved, entry)
    kind = {"mirrored": "mirrored ", "on_read": "sync-on-read "}.get(entry["kind"], "")
    return f"{kind}{dtype}{list(shape)}"


def _takes_copies(leaf: Any, saved: Snapshot, entry: Mapping[str, Any]) -> bool:
    """Tell whether each replica can get back its own copy."""
    return (
        isinstance(leaf, Variable)
        and leaf.synchronization is VariableSynchronization.ON_READ
        and entry.get("aggregation") == leaf.aggregation.name
        and saved.arrays[entry["copies"]].shape[0] == spec_of(leaf).mesh.num_replicas
    )


def restore_positions(leaves: Leaves, saved: Snapshot, worker: int, num_workers: int) -> list[tuple[Any, Any]]:
    """Restore the positions of this worker's iterators; return each with its former position, to undo it.

    On another number of workers, positions by file are divided anew. Other iterators get worker 0's position, or raise if each
    worker reads its own batches. When an iterator raises, the others get back their former positions.
    """
    moved: list[tuple[Any, Any]] = []
    for path, entry in saved.leaves.items():
        if entry["kind"] == "position":
            iterator, by_worker = leaves[path], entry["by_worker"]
            state = by_worker[worker] if len(by_worker) == num_workers else joined(iterator, by_worker)
            try:
                before = iterator.get_state()
            except Exception:  # some pipelines have no position before their first batch
                before = None
            try:
                iterator.set_state(state)
            except Exception:
                undo_positions(moved)
                raise
            moved.append((iterator, before))
    return moved


def undo_positions(moved: Sequence[tuple[Any, Any]]) -> None:
    """Give iterators back their former positions."""
    for iterator, before in moved:
        if before is not None:
            iterator.set_state(before)


def restore_values(named: Mapping[str, PyTree], leaves: Leaves, saved: Snapshot) -> None:
    """Write variables and numpy arrays in place; put other restored values into the dicts and lists that held the old ones.

    When this fails, the variables restored so far are lost, and nothing else has changed. Keeping the old values until all
    new ones are read would need twice the memory; state in parts may fill a device or host already.
    """
    new: Leaves = {}
    in_place: list[tuple[np.ndarray, np.ndarray]] = []
    written: list[Variable] = []
    for path, leaf in leaves.items():
        entry = saved.leaves[path]
        if entry["kind"] == "number":
            new[path] = NUMBERS[entry["type"]](entry["value"])
        elif isinstance(leaf, np.ndarray) and leaf.flags.writeable:
            in_place.append((leaf, np.asarray(saved.arrays[entry["value"]])))
        elif entry["kind"] != "position" and not isinstance(leaf, Variable):
            new[path] = _plain_value(leaf, saved.arrays[entry["value"]], entry)
    try:
        variables = [(path, leaf) for path, leaf in leaves.items() if isinstance(leaf, Variable)]
        variables.sort(key=lambda item: spec_of(item[1]).division is None)  # those in parts first: they are still on the disk
        for path, variable in variables:
            _restore_variable(variable, saved, saved.leaves[path])
            written.append(variable)
    except BaseException as error:
        lose(written, error)
        raise
    for array, host in in_place:
        array[...] = host
    for name, tree in named.items():
        _replace_leaves(name, tree, new)


def _restore_variable(variable: Variable, saved: Snapshot, entry: Mapping[str, Any]) -> None:
    mesh, impl = spec_of(variable).mesh, entry.get("key")
    if spec_of(variable).division is not None:
        store_in_parts(variable, saved.arrays[entry["value"]])
    elif _takes_copies(variable, saved, entry):
        store(variable, _on_devices(saved.arrays[entry["copies"]], mesh.stacked, impl))
    else:
        variable.assign(_on_devices(saved.arrays[entry["value"]], mesh.mirrored, impl))


def _on_devices(host: np.ndarray, placement: jax.sharding.Sharding, impl: str | None) -> jax.Array:
    """Place an array on devices without communication: every worker has read all of it."""
    array = jax.make_array_from_callback(host.shape, placement, lambda index: host[index])
    if impl is None:
        return array
    return jax.jit(functools.partial(jax.random.wrap_key_data, impl=impl), out_shardings=placement)(array)


def _plain_value(leaf: object, host: np.ndarray, entry: Mapping[str, Any]) -> Any:
    if not hasattr(leaf, "dtype"):
        return host.item()  # exact, and of the type that was saved
    if isinstance(leaf, np.generic):
        return host[()]
    if not isinstance(leaf, jax.Array):
        return host
    if leaf.committed or not leaf.is_fully_addressable:
        return _on_devices(host, leaf.sharding, entry.get("key"))
    if "key" in entry:
        return jax.random.wrap_key_data(jnp.asarray(host), impl=entry["key"])
    host = np.asarray(host)
    if leaf.weak_type and not host.shape:
        return jnp.asarray(host.item())  # from a Python number, so that the type stays weak
    return jax.device_put(host)


def _replace_leaves(path: str, tree: PyTree, new: Mapping[str, Any]) -> PyTree:
    """Return a tree with new leaves: dicts and lists are changed in place, other nodes are made anew."""
    if objects.is_object(tree):
        objects.set_arrays(tree, {name.removeprefix(path): value for name, value in new.items() if name.startswith(path)})
    if path in new or (children := children_of(tree)) is None:
        return new.get(path, tree)
    pairs, treedef = children
    values = [_replace_leaves(path + jax.tree_util.keystr(key), child, new) for key, child in pairs]
    if all(value is child for value, (_, child) in zip(values, pairs, strict=True)):
        return tree
    if not isinstance(tree, dict | list):
        return jax.tree.unflatten(treedef, values)
    for (key, _), value in zip(pairs, values, strict=True):
        tree[key[0].key if isinstance(tree, dict) else key[0].idx] = value
    return tree
