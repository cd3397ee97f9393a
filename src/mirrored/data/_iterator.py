"""The iterator over a distributed dataset: it makes batches ahead, on the devices, and knows its position."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Generator
from types import TracebackType
from typing import Any, Self

import jax

from .. import _process, _tf_names
from .._errors import ContextError
from .._jax import user_code
from .._replicas import frames, placement
from .._replicas.mesh import PlannedMesh, ReplicaMesh
from .._replicas.per_replica import Origin, PerReplica
from .._replicas.spent import waited
from .._typing import PyTree
from .._workers.coordination import Channel
from .._workers.progress import NEXT_BATCH, in_main_thread, progress
from ._passes import Elements, Passes
from ._prefetch import MAX_WAIT_SECONDS, Ahead
from ._sharing.files import BY_FILE, dealt, parts_of
from ._sharing.rows import split_sizes
from ._sharing.steps import LocalReplicas, Step, Steps
from ._sources.kinds import kind_of
from ._sources.open import Position
from ._sources.verbs import check_places

#: The version of the states that `get_state` returns.
_VERSION = 1
#: How many steps workers with their own batches tell each other at once, if they read ahead at all.
_LOOKAHEAD = 4

Batches = Generator[tuple[PyTree, Step], None, None]


@_tf_names.hints("mr.data.DistributedIterator")
class DistributedIterator:
    """An iterator over a distributed dataset, made by `iter(distributed_dataset)`.

    A thread prepares batches and moves them to the devices in the background. It ends, and frees files and memory,
    when the data ends, when the pipeline raises, and when the program leaves the loop. If you keep an iterator, call
    `close`, or use a `with` block. Several threads may take batches from one iterator: each batch comes once.

    >>> iterator = iter(strategy.distribute_dataset([np.arange(2), np.arange(2, 4)]))
    >>> _ = next(iterator)
    >>> state = iterator.get_state()
    >>> resumed = iter(mr.MirroredStrategy(["cpu:0"]).distribute_dataset([np.arange(2), np.arange(2, 4)]))
    >>> resumed.set_state(state)
    >>> [batch.values[0].tolist() for batch in resumed]
    [[2, 3]]

    In TensorFlow: https://www.tensorflow.org/api_docs/python/tf/distribute/DistributedIterator
    """

    def __init__(self, elements: Elements, layout: LocalReplicas, mesh: ReplicaMesh, prefetch: int) -> None:
        """Keep the parts of a DistributedDataset; read nothing yet."""
        self._elements = elements
        self._plan = elements.plan
        self._layout = layout
        self._mesh = mesh
        self._prefetch = prefetch
        self._reading, self._lock = _process.Lock(), _process.Lock()  # held while reading; guards what follows
        self._passes: Passes | None = None
        self._batches: Ahead[Any] | Batches | None = None
        self._position: Position = ValueError("the iterator was closed before it read anything, and has no position.")
        self._extra: dict[str, Any] = {"places": [0] * len(elements.limits)} if elements.limits else {}
        self._is_closed = False
        self._failure = ""  # the pipeline's error: without it the data would seem to have ended
        self._channel: Channel | None = None
        self._is_saved = False  # a checkpoint needs positions: then a batch without one is an error at once

    @property
    def element_spec(self) -> PyTree:
        """The shapes and dtypes of a batch on each replica: see `DistributedDataset.element_spec`."""
        return self._elements.spec()

    def __iter__(self) -> Self:
        return self

    @user_code.shorten_errors
    def __next__(self) -> PyTree:
        if frames.is_traced():
            raise ContextError(
                "the next batch was asked for inside a function that is traced: a step, or one with mr.function or jax.jit. It "
                "would be read once, and be the same batch in each call. Take it outside, and give it as an argument: for batch "
                "in dataset: train_step(batch). Of several steps in one program, give all: train_steps([next(iterator) for _ in "
                "range(k)])."
            )
        start = time.perf_counter()
        with self._reading:
            try:
                batch, step = self._next()
                with self._lock:
                    self._position, self._extra = step.position, step.extra
                if self._is_saved and isinstance(step.position, TypeError):
                    raise TypeError(f"mr.Checkpoint cannot save the position of this iterator: {step.position}")
            except BaseException as error:
                if not isinstance(error, KeyboardInterrupt) or not self._goes_on():
                    self._is_closed = True
                    if not isinstance(error, StopIteration):
                        self._failure = self._failure or repr(error)
                    elif self._passes is not None and self._passes.why_no_step:
                        user_code.warn(f"no step was made in a pass over the dataset. {self._passes.why_no_step}")
                raise
            finally:
                if self._is_closed:  # by this thread, or meanwhile by another
                    self._free()
        if in_main_thread():
            waited.input += time.perf_counter() - start
        return batch

    def _goes_on(self) -> bool:
        """Tell whether this iterator can go on after a Ctrl-C: with `prefetch` the pipeline's thread is not interrupted."""
        if self._prefetch:
            return True
        if not isinstance(self._position, str) or self._layout.worker.count > 1:
            return False
        self._free()  # the next call opens the source again, after the last batch
        return True

    def _next(self) -> tuple[PyTree, Step]:
        batches = self._started()
        if self._channel is None:
            return next(batches)
        where = self._channel.describe if in_main_thread() else "in a thread of the program"
        with progress.phase(NEXT_BATCH, where):
            batch, step = next(batches)
        progress.took_batch(step.place, step.sizes)
        return batch, step

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch that this iterator yielded, as a dict of JSON values.

        Batches that were prepared ahead do not count. The position holds for any number of replicas. If workers
        read different records, each worker must save its own position.

        Raises:
            TypeError: when the dataset has no position that can be saved.
        """
        with self._lock:
            if self._passes is None and not self._is_closed:
                self._open()
            position, extra = self._position, self._extra
        if isinstance(position, Exception):
            raise position
        worker, source, policy = self._layout.worker, json.loads(position), self._plan.kind
        if isinstance(source, dict) and BY_FILE in source:
            policy = "FILE"  # perhaps only in this pass
        whose = None if policy == "DATA" else [worker.index, worker.count]
        state = {"version": _VERSION, "policy": policy, "worker": whose, "source": source}
        if sizes := self._sizes(policy):
            state["sizes"] = sizes
        return state | extra

    def _sizes(self, policy: str) -> list[int]:
        """Return the batch sizes on which a position under this policy depends."""
        dataset = self._plan.dataset
        return kind_of(dataset).counted_sizes(dataset, policy == "FILE", list(self._plan.sizes))

    @user_code.shorten_errors
    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a position that `get_state` returned, here or in an earlier run.

        Args:
            state: the position of an iterator over the same dataset; the number of replicas may differ.

        Raises:
            TypeError: when `state` is no such dict, or the dataset has no position.
            ValueError: when `state` belongs to another dataset, policy or worker. Nothing has changed then.
        """
        extra = self._checked(state)
        source = self._source_of(state)
        with self._reading:
            if hasattr(self._plan.dataset, "load_state_dict"):
                self._free()  # now, or the thread would move the dataset's one position, which its iterators share
            passes = Passes(self._elements, source, extra)
            self._free()
            with self._lock:
                self._is_closed, self._failure = False, ""
                self._passes, self._extra, self._position = passes, extra, passes.start

    def close(self) -> None:
        """End the preparation in the background, free files and memory, and yield no more batches. Further calls do nothing."""
        self._is_closed, self._failure = True, ""
        if self._prefetch:
            self._free()
        elif True in map(self._reading.acquire, [True], [MAX_WAIT_SECONDS]):  # else a thread in the pipeline frees all later
            try:
                self._free()
            finally:
                self._reading.release()

    def _free(self) -> None:
        with self._lock:
            batches, self._batches = self._batches, None
            passes, self._passes = self._passes, None
        if batches is not None:
            batches.close()
        if passes is not None and not isinstance(batches, Ahead):  # the thread of an Ahead closes them
            passes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self) -> Passes:
        """Open the dataset at its beginning or, after a failure has closed all, after the last batch."""
        if self._passes is None:
            state = json.loads(self._position) if isinstance(self._position, str) else None
            self._passes = Passes(self._elements, state, self._extra)
            self._position = self._passes.start
        return self._passes

    def _started(self) -> Ahead[Any] | Batches:
        with self._lock:
            if self._failure:
                raise RuntimeError(
                    f"the input failed before, with {self._failure[:300]}, and the batches from there on would be lost. Try the "
                    "failed batch again by iterator.set_state(iterator.get_state()), or begin anew: iter(dataset)."
                )
            if self._is_closed:
                raise StopIteration
            if self._batches is None:
                passes, worker = self._open(), self._layout.worker.for_iterator(is_noted=in_main_thread())
                self._channel = worker.channel
                lookahead = _LOOKAHEAD if self._prefetch else 1
                layout = dataclasses.replace(self._layout, worker=worker, lookahead=lookahead)
                batches = _batches(passes.steps(layout), self._mesh, layout, self._elements)
                self._batches = Ahead(self, batches, passes.close, self._prefetch, worker.close) if self._prefetch else batches
            return self._batches

    def _source_of(self, state: dict[str, Any]) -> Any:
        """Return the position from which this worker's source goes on, given a checked state."""
        plan, worker = self._plan, self._layout.worker
        if not plan.goes_on_by_file(state["policy"]):
            return state["source"]
        parts = parts_of(plan.dataset, state)
        if not state["worker"]:  # one position of all workers
            parts = dealt(plan.dataset, parts, worker.index, worker.count)
        return {BY_FILE: parts}

    def _checked(self, state: object) -> dict[str, Any]:
        """Return a state without the source's position; refuse a state that does not fit this iterator."""
        if not isinstance(state, dict) or not {"version", "policy", "worker", "source"} <= set(state) or state["source"] is None:
            raise TypeError(f"state is {state!r}; expected what get_state() of an iterator over this dataset returned.")
        if state["version"] != _VERSION:
            raise ValueError(f"the state has version {state['version']!r}, and this library reads version {_VERSION}.")
        policy, plan = state["policy"], self._plan
        if policy != plan.kind and not plan.goes_on_by_file(policy):
            raise ValueError(
                f"the state was saved under the policy {policy}, and this dataset is shared out by {plan.kind}. "
                "Name one policy in both runs, for example mr.InputOptions(auto_shard_policy='data')."
            )
        worker = self._layout.worker
        if policy != "DATA" and state["worker"] != [worker.index, worker.count]:
            raise ValueError(
                f"the state is that of worker {state['worker']} (number, of how many), and this is worker "
                f"{[worker.index, worker.count]}; under {policy} each worker has a position of its own. With "
                "mr.InputOptions(auto_shard_policy='data') a position holds for any number of workers."
            )
        sizes = self._sizes(policy)
        is_same_size = state.get("sizes", sizes) == sizes
        if not is_same_size and policy != "FILE":
            raise ValueError(
                f"the state counts batches of {state['sizes']} rows, and they have {sizes} here: rows would be used twice, "
                "or left out. Go on with the same sizes. A position that counts rows holds for any: strategy.make_numpy_dataset("
                "arrays).batch(n), or in grain dataset.to_iter_dataset().batch(n). What context.get_per_replica_batch_size "
                "gives is the same for as many replicas as before; strategy.distribute_dataset(dataset) takes global batches."
            )
        names = ("rows", "batch_size") if is_same_size else ("rows",)  # else global batches are as large as the pipeline's
        extra = {name: state[name] for name in names if name in state}
        if not all(type(value) is int and value >= 0 for value in extra.values()):
            raise ValueError(f"the state holds {extra}; expected numbers of rows.")
        extra.pop("rows", None)  # see `_source_of`
        if places := check_places(state.get("places", []), self._elements.limits):
            extra["places"] = places
        return extra


def joined(iterator: DistributedIterator, by_worker: list[Any]) -> Any:
    """Merge the states that all workers saved, perhaps more or fewer of them, into one from which this worker continues."""
    is_by_file = isinstance(by_worker[0], dict) and by_worker[0].get("policy") == "FILE"
    if not is_by_file or not isinstance(iterator, DistributedIterator) or not iterator._plan.goes_on_by_file("FILE"):
        return by_worker[0]  # perhaps refused; an iterator of another library decides itself
    worker, dataset = iterator._layout.worker, iterator._plan.dataset
    parts = [part for state in by_worker for part in parts_of(dataset, state)]
    mine = {"worker": [worker.index, worker.count], "source": {BY_FILE: dealt(dataset, parts, worker.index, worker.count)}}
    return {"batch_size": 0} | max(by_worker, key=lambda state: state.get("batch_size", 0)) | mine


def num_workers_of(iterator: DistributedIterator) -> int:
    """Return the number of workers that share an iterator's batches."""
    return iterator._layout.worker.count


def expect_saves(iterator: DistributedIterator) -> None:
    """Let the iterator raise at the first batch without a position; a loader may have none before its first batch."""
    iterator._is_saved = True


def _batches(steps: Steps, mesh: ReplicaMesh, layout: LocalReplicas, elements: Elements) -> Batches:
    """Yield each step's rows as PerReplica values, together with the step."""
    is_planned = isinstance(mesh, PlannedMesh)
    cut = None if is_planned and _process.what_if.rows else elements.uneven_end(layout)
    origin = Origin(elements.plan.token, elements.plan.is_auto_by_file)
    whole: dict[int, Origin] = {}  # rows of a batch before an uneven last one -> its origin
    if cut is not None:
        whole[cut.batch_size] = origin._replace(last_sizes=tuple(split_sizes(cut.rest, layout.num_replicas)))
    try:
        for step in steps:
            elements.note(step.stacked)
            step = _planned(step) if is_planned else step
            # Without a name for the batch: it would hold the batch's memory until the next one is made.
            yield _to_devices(step, mesh, layout, whole.get(sum(step.sizes), origin)), dataclasses.replace(step, stacked=None)
    finally:
        layout.worker.close()  # even if the program leaves the loop: else its messages stay until the program ends


def _planned(step: Step) -> Step:
    """Return a plan's step with the rows of `mirrored plan --rows`; without this option, note the step's own number of rows."""
    if not (rows := _process.what_if.rows):
        _process.what_if.given_rows = max(step.sizes)
        return step
    stacked = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0], rows, *a.shape[2:]), a.dtype), step.stacked)
    return dataclasses.replace(step, stacked=stacked, sizes=(rows,) * len(step.sizes))


def _to_devices(step: Step, mesh: ReplicaMesh, layout: LocalReplicas, origin: Origin) -> PyTree:
    """Put each replica's rows on its device."""
    leaves, treedef = jax.tree.flatten(step.stacked)
    is_alone = layout.worker.count == 1  # then one call brings all of them
    arrays = mesh.put(leaves, mesh.stacked) if is_alone else [placement.stack(mesh, leaf) for leaf in leaves]
    if len(set(step.sizes)) == 1:
        return jax.tree.unflatten(treedef, [PerReplica(array, None, None, origin) for array in arrays])
    shapes = [tuple((size, *array.shape[2:]) for size in step.sizes) for array in arrays]
    values = [PerReplica(array, by_replica, None, origin) for array, by_replica in zip(arrays, shapes, strict=True)]
    return jax.tree.unflatten(treedef, values)
