"""Simulates the input of several workers in one process, with a thread for each worker."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from .._options import AutoShardPolicy, InputOptions, check_int
from .._text import list_lines
from .._typing import PyTree
from ..data._dataset import check_dataset
from ..data._input_context import InputContext
from ..data._sharing.agree import InputWorker
from ..data._sharing.plan import SharingPlan, make_plan, plan_of_function
from ..data._sharing.rows import count_rows, to_numpy
from ..data._sharing.steps import LocalReplicas
from ..data._sources.open import adapted, open_source


@dataclasses.dataclass(frozen=True)
class InputOfWorkers:
    """The input of several simulated workers: the result of `testing.input_of_workers`.

    Attributes:
        steps: for each step, the rows of each replica, worker by worker, as nests of numpy arrays without padding.
        how: how the workers share out the records, in the words of the first worker's log.
        is_whole: whether every row must appear, because neither `drop_remainder` nor `max_steps` leaves any out.
    """

    steps: list[list[PyTree]]
    how: str
    is_whole: bool

    def assert_each_row_once(self, batches: Iterable[PyTree]) -> None:
        """Fail unless the replicas got exactly the rows of these batches, each once, in any order.

        If `drop_remainder` or `max_steps` left rows out, rows may be missing, but none may come twice.

        Args:
            batches: the batches that all workers together read, such as `make_dataset()`, or `[arrays]` with one large batch.
                Rows are compared by their bytes, so leave out random transformations.

        Raises:
            AssertionError: when rows are missing, come too often, or are not in `batches`; it shows some, and their replicas.
        """
        check_dataset(batches, "assert_each_row_once")
        with contextlib.closing(open_source(adapted(batches))) as source:
            left = collections.Counter(row for batch in source for row in _rows(to_numpy(batch)))
        extra: list[str] = []
        for number, step in enumerate(self.steps):
            for replica, rows in enumerate(step):
                for row in _rows(rows):
                    left[row] -= 1
                    if left[row] < 0:
                        extra.append(f"{_show(row)} in step {number}, replica {replica}")
        missing = [_show(row) for row, count in left.items() for _ in range(count)] if self.is_whole else []
        if extra or missing:
            raise AssertionError(
                f"{len(missing)} rows are missing, and {len(extra)} come too often or are not in the dataset ({self.how})."
                + f"\nmissing:{list_lines(missing)}" * bool(missing)
                + f"\ntoo often:{list_lines(extra)}" * bool(extra)
            )


def input_of_workers(
    make_dataset: Callable[..., Any],
    *,
    num_workers: int,
    replicas_per_worker: int = 1,
    options: InputOptions | None = None,
    from_function: bool = False,
    max_steps: int | None = None,
) -> InputOfWorkers:
    """Return the rows that each replica of several workers would get in each step, without starting the workers.

    This runs the same code as training: the policies, the split, the agreement on when the data ends, and the errors when
    workers read different batches. The workers are threads of this process.

    Only the input is simulated, without devices, prefetching and positions. For all else start processes on this machine:
    `mirrored launch -n 2 train.py`. The simulated workers share this process's state, such as random state and files.

    Args:
        make_dataset: called once for each worker, like its script; returns a new dataset, as for `strategy.distribute_dataset`.
        num_workers: W, at least 1.
        replicas_per_worker: L; there are R = W x L replicas.
        options: as for `strategy.distribute_dataset`; `prefetch` is not used.
        from_function: whether `make_dataset` is a function for `strategy.distribute_datasets_from_function`: it takes a
            `mr.InputContext` and returns one worker's batches, one for each replica.
        max_steps: the most steps; needed if the data never ends.

    Raises:
        TypeError, ValueError: for wrong arguments, a dataset that cannot be distributed, or workers' batches that differ.

    >>> from mirrored import testing
    >>> def make_dataset():
    ...     return [np.arange(7), np.arange(7, 10)]
    >>> found = testing.input_of_workers(make_dataset, num_workers=2, replicas_per_worker=2)
    >>> for step in found.steps:
    ...     print([rows.tolist() for rows in step])
    [[0, 1], [2, 3], [4, 5], [6]]
    [[7], [8], [9], []]
    >>> found.assert_each_row_once(make_dataset())
    """
    check_int("num_workers", num_workers, 1, "workers")
    check_int("replicas_per_worker", replicas_per_worker, 1, "replicas of each worker")
    if max_steps is not None:
        check_int("max_steps", max_steps, 1, "steps")
    if not callable(make_dataset):
        raise TypeError(
            f"make_dataset is {make_dataset!r}; expected a function that makes the dataset, because each worker has its own: "
            "testing.input_of_workers(lambda: dataset, num_workers=2)."
        )
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"options is {options!r}; expected mr.InputOptions(...).")
    options = options or InputOptions()
    if from_function and options.auto_shard_policy in (AutoShardPolicy.FILE, AutoShardPolicy.DATA):
        raise ValueError(
            f"auto_shard_policy is {options.auto_shard_policy}, but make_dataset shares the records out. Leave it out."
        )
    workers, num_replicas = _make_workers(num_workers), num_workers * replicas_per_worker
    verb = "distribute_datasets_from_function" if from_function else "distribute_dataset"
    datasets = []
    for index in range(num_workers):
        context = (InputContext(num_workers, index, num_replicas),) if from_function else ()
        datasets.append(make_dataset(*context))
        check_dataset(datasets[-1], verb)

    def read(worker: InputWorker) -> tuple[SharingPlan, list[list[PyTree]]]:
        dataset = adapted(datasets[worker.index])
        if from_function:
            plan = plan_of_function(dataset, worker)
        else:
            plan = make_plan(dataset, options.auto_shard_policy, worker, num_replicas, options.drop_remainder)
        return plan, _read(plan, LocalReplicas(num_replicas, worker, options.drop_remainder), max_steps)

    plans, steps = zip(*_run_together(read, workers), strict=True)
    of_all = [[rows for replicas in by_worker for rows in replicas] for by_worker in zip(*steps, strict=True)]
    return InputOfWorkers(of_all, plans[0].how, max_steps is None and not options.drop_remainder)


def _read(plan: SharingPlan, layout: LocalReplicas, max_steps: int | None) -> list[list[PyTree]]:
    """Return the rows of one worker's replicas in each step, without padding."""
    found: list[list[PyTree]] = []
    with contextlib.closing(plan.open()) as source:
        for step in plan.steps(source, layout, {}):
            found.append([_without_padding(step.stacked, *place) for place in enumerate(layout.mine(step.sizes))])
            if len(found) == max_steps:
                break
    return found


def _without_padding(stacked: PyTree, replica: int, size: int) -> PyTree:
    return jax.tree.map(lambda leaf: np.array(leaf[replica, :size]), stacked)


def _make_workers(count: int) -> list[InputWorker]:
    """Make workers that exchange values like processes: as JSON, and all of them at once."""
    barrier, slots = threading.Barrier(count), [""] * count

    def of_worker(index: int) -> InputWorker:
        def exchange(value: Any) -> Sequence[Any]:
            slots[index] = json.dumps(value)
            barrier.wait()
            values = [json.loads(text) for text in slots]
            barrier.wait()  # all have read before anybody writes the next value
            return values

        return InputWorker(index, count, exchange, close=barrier.abort)

    return [of_worker(index) for index in range(count)]


def _run_together(read: Callable[[InputWorker], Any], workers: Sequence[InputWorker]) -> list[Any]:
    """Call a function once for each worker, in a thread each; if one fails, stop all and raise its error."""
    is_x64 = jax.config.jax_enable_x64  # pyrefly: ignore[missing-attribute]

    def work(worker: InputWorker) -> Any:
        try:
            with jax.enable_x64(is_x64):  # a new thread would have JAX's default
                return read(worker)
        except BaseException:  # the others would wait for this worker for ever
            worker.close()
            raise

    with ThreadPoolExecutor(len(workers), "mirrored-worker") as pool:
        futures = [pool.submit(work, worker) for worker in workers]
        try:
            errors = [error for future in futures if (error := future.exception()) is not None]
        except BaseException:  # Ctrl-C: no worker may wait for another any longer
            workers[0].close()
            raise
    if errors:  # raise the cause, not the interruptions of the others
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in futures]


def _rows(batch: PyTree) -> list[tuple[Any, ...]]:
    """Return a hashable for each row of a batch: name, dtype, shape and bytes of each leaf."""
    paths, _ = jax.tree_util.tree_flatten_with_path(batch)
    leaves = [(jax.tree_util.keystr(path), leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))) for path, leaf in paths]
    return [
        tuple((name, str(leaf.dtype), leaf.shape[1:], leaf[i].tobytes()) for name, leaf in leaves)
        for i in range(count_rows(batch))
    ]


def _show(row: tuple[Any, ...]) -> str:
    leaves = ((name, np.frombuffer(data, np.dtype(dtype)).reshape(shape)) for name, dtype, shape, data in row)
    return ", ".join(f"{name} {np.array2string(leaf, threshold=6)}".strip() for name, leaf in leaves)
