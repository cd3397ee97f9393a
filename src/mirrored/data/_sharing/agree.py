"""Which of the workers that read the input together this is, and how they agree on each step."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from ..._text import escape
from ..._typing import PyTree
from ..._workers.coordination import Channel, Coordination

#: Gives a JSON value to all workers and returns those of all, in worker order; every worker must call it.
Exchange: TypeAlias = Callable[[Any], Sequence[Any]]


#: Characters of the structure of another worker's batch that are shown.
_MAX_SHOWN = 1000


def _alone(value: Any) -> Sequence[Any]:
    return [value]


@dataclasses.dataclass(frozen=True)
class InputWorker:
    """This worker, among those that read the input together.

    Attributes:
        index: its number.
        count: how many workers there are, W; each has the same number of replicas, in worker order.
        exchange: how they agree on the sizes of a step; the identity for one worker.
        close: ends an exchange that another thread is waiting in.
        coordination: how an iterator gets an exchange of its own.
        channel: that exchange.
    """

    index: int = 0
    count: int = 1
    exchange: Exchange = _alone
    close: Callable[[], None] = lambda: None
    coordination: Coordination | None = None
    channel: Channel | None = None

    def for_iterator(self) -> InputWorker:
        """Return this worker with an exchange of its own, for one iterator and its thread."""
        if self.coordination is None or self.count == 1:
            return self
        channel = self.coordination.channel("input")
        return dataclasses.replace(self, exchange=channel.exchange, close=channel.close, channel=channel)


@dataclasses.dataclass(frozen=True)
class CommonStep:
    """What all workers know of a step before they take it.

    Attributes:
        sizes: the rows of each replica of all workers.
        like: arrays without rows, in the structure of a batch.
        num_ended: how many workers have no more rows.
    """

    sizes: tuple[int, ...]
    like: PyTree
    num_ended: int


def agree(worker: InputWorker, sizes: Sequence[int], like: PyTree, num_replicas: int) -> CommonStep:
    """Tell the other workers how many rows this one's replicas have, and learn the same of them.

    Args:
        worker: this worker.
        sizes: rows by replica of this worker; empty when it has no more rows.
        like: arrays of one of its batches without rows; None when it has not had one.
        num_replicas: of all workers.

    Raises:
        ValueError: when the workers' batches have different structures, dtypes or shapes of rows.
    """
    num_local = num_replicas // worker.count
    if worker.count == 1:
        return CommonStep(tuple(sizes) or (0,) * num_local, like, int(not sizes))
    message = {"sizes": list(sizes), "rows": _encode(like) if sizes else None}
    messages = worker.exchange(message)
    with_rows = {index: m["rows"] for index, m in enumerate(messages) if m["sizes"]}
    for index, rows in with_rows.items():
        first = next(iter(with_rows))
        if rows != with_rows[first]:
            raise ValueError(
                f"the workers yielded batches that do not fit together: worker {first} {_show(with_rows[first])}, worker {index} "
                f"{_show(rows)}. Structure, dtypes and shapes must be the same apart from the number of rows."
            )
    if with_rows and not sizes:
        like = _decode(next(iter(with_rows.values())), like)
    every = tuple(size for m in messages for size in (m["sizes"] or (0,) * num_local))
    return CommonStep(every, like, len(messages) - len(with_rows))


def agree_on_batch(worker: InputWorker, batch: PyTree | None, num_rows: int) -> bool:
    """Compare a global batch, which every worker has read by itself, with those of the others; return whether there is one.

    Args:
        worker: this worker.
        batch: its next batch; None at the end of its data.
        num_rows: of the batch.

    Raises:
        ValueError: when the batches differ, so that rows would be lost and others used twice, or not all workers have one.
    """
    if worker.count == 1:
        return batch is not None
    own = None if batch is None else [num_rows, _digest(batch)]
    every = worker.exchange(own)
    for index, other in enumerate(every):
        if other == every[0]:
            continue
        if other is None or every[0] is None:
            ended, going = (index, 0) if other is None else (0, index)
            what = f"the data of worker {ended} has ended, and worker {going} has more"
        elif other[0] != every[0][0]:
            what = f"the next batch of worker 0 has {every[0][0]} rows, and that of worker {index} {other[0]}"
        else:
            what = f"the next batches of worker 0 and worker {index} hold different records"
        raise ValueError(
            f"{what}. Under AutoShardPolicy.DATA every worker reads the same batches and takes its rows of each; now rows "
            "would be lost and others used twice. Give what shuffles one seed on all workers, and read the same files in the "
            "same order; or let each worker read records of its own: auto_shard_policy='file' or 'off', or "
            "distribute_datasets_from_function."
        )
    return own is not None


def _digest(batch: PyTree) -> int:
    """Return a checksum of all bytes: to compute it takes a tenth of the time that a copy of the batch takes."""
    digest = 0
    for leaf in jax.tree.leaves(batch):
        digest = zlib.crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8), digest)
    return digest


def _encode(tree: PyTree) -> dict[str, Any]:
    """Write the structure of a batch, and the dtypes and shapes of its rows, as JSON."""
    leaves, treedef = jax.tree.flatten(tree)
    rows = [[leaf.dtype.name, list(leaf.shape[1:])] for leaf in leaves]
    return {"structure": str(treedef), "skeleton": _skeleton(tree), "leaves": rows}


def _show(rows: dict[str, Any]) -> str:
    text = f"{rows['structure']} of " + ", ".join(f"{dtype}{shape}" for dtype, shape in rows["leaves"])
    return escape(text, _MAX_SHOWN)


def _decode(rows: dict[str, Any], like: PyTree) -> PyTree:
    """Make arrays without rows of what another worker wrote, in the structure of `like` if there is one."""
    leaves = [np.zeros((0, *shape), dtype) for dtype, shape in rows["leaves"]]
    treedef = jax.tree.structure(_from_skeleton(rows["skeleton"]) if like is None else like)
    return jax.tree.unflatten(treedef, leaves)


def _skeleton(tree: PyTree) -> Any:
    if type(tree) is dict:
        return {"dict": [[key, _skeleton(child)] for key, child in tree.items()]}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: [_skeleton(child) for child in tree]}
    return None if tree is None else 0 if isinstance(tree, np.ndarray) else {"class": type(tree).__name__}


def _from_skeleton(skeleton: Any) -> PyTree:
    match skeleton:
        case {"dict": items}:
            return {key: _from_skeleton(child) for key, child in items}
        case {"list": children}:
            return [_from_skeleton(child) for child in children]
        case {"tuple": children}:
            return tuple(_from_skeleton(child) for child in children)
        case {"class": name}:
            raise TypeError(
                f"this worker has had no record, and so cannot make an empty batch of class {name}. Yield batches made of dicts, "
                "lists and tuples, or use mr.InputOptions(auto_shard_policy='data')."
            )
    return skeleton
