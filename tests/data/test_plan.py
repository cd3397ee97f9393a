"""Several workers, one dataset: every record exactly once, pairs paired, all workers the same number of steps."""

import gc
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grain
import hypothesis
import jax
import numpy as np
import pytest
from grain import experimental as gx
from hypothesis import strategies as st
from pipelines import Files, interleaved, make_files, pairs
from simulated_workers import Run, run_workers

import mirrored as mr
from mirrored.data._dataset import DistributedDataset
from mirrored.data._sharing import agree
from mirrored.data._sharing import rows as _rows
from mirrored.data._sharing.agree import InputWorker, _checksum
from mirrored.data._sharing.plan import SharingPlan, make_plan
from mirrored.data._sharing.steps import LocalReplicas
from mirrored.data._sources.open import open_source

few_examples = hypothesis.settings(deadline=None, max_examples=20, derandomize=True)

pytestmark = pytest.mark.usefixtures("grains_threads_end")


def zipped_with_numbers(files: Sequence[Sequence[int]]) -> grain.IterDataset:
    total = sum(map(len, files))
    numbered = gx.ZipIterDataset([Files(files), grain.MapDataset.range(1, total + 1).to_iter_dataset()])
    return numbered.map(lambda pair: pair[0] if pair[0] == pair[1] else -1)  # -1 is a record of no file: mispaired


SOURCES: dict[str, Callable[..., grain.IterDataset]] = {"files": Files, "interleave": interleaved, "zip": zipped_with_numbers}
TRANSFORMATIONS: dict[str, Callable[[grain.IterDataset], grain.IterDataset]] = {
    "filter": lambda ds: ds.filter(lambda n: n % 3 != 1),
    "shuffle": lambda ds: gx.WindowShuffleIterDataset(ds, window_size=4, seed=7),
    "repeat": lambda ds: gx.RepeatIterDataset(ds, num_epochs=2),
    "map": lambda ds: ds.map(lambda n: n),
    "prefetch": lambda ds: gx.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2),
    "limit": lambda ds: gx.LimitIterDataset(ds, 5),
    "index": lambda ds: ds.map_with_index(lambda index, n: n),
}


def records(batches: list[Any]) -> Counter[int]:
    for batch in batches:
        np.testing.assert_array_equal(batch["y"], 10 * np.stack([batch["x"]] * 2, axis=1))
    return Counter(int(x) for batch in batches for x in batch["x"])


def kinds(run: Run) -> str:
    [kind] = {plan.kind for plan in run.plans}
    return kind


@few_examples
@hypothesis.given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    source=st.sampled_from(sorted(SOURCES)),
    steps=st.lists(st.sampled_from(sorted(TRANSFORMATIONS)), max_size=3, unique=True),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(1, 4),
    num_local=st.integers(1, 3),
    policy=st.sampled_from(["auto", "data", "file"]),
)
def test_every_record_exactly_once_and_paired_whatever_the_pipeline(
    sizes: list[int], source: str, steps: list[str], batch_size: int, num_workers: int, num_local: int, policy: str
) -> None:
    def make(worker: int) -> grain.IterDataset:
        ds = SOURCES[source](make_files(sizes))
        for step in steps:
            ds = TRANSFORMATIONS[step](ds)
        return pairs(ds).batch(batch_size)

    whole = list(make(0))
    can_split = source != "zip" and not {"limit", "index"} & set(steps) and num_workers > 1
    if policy == "file" and num_workers > 1 and not can_split:
        with pytest.raises(ValueError, match="auto_shard_policy FILE cannot share this dataset out"):
            run_workers(make, num_workers, num_local, policy)
        return
    try:
        run = run_workers(make, num_workers, num_local, policy)
    except ValueError as error:
        assert policy == "file" and ("files for" in str(error) or "no file, or no record" in str(error))
        return
    if source == "files" and policy != "data":
        assert kinds(run) == ("FILE" if can_split and len(sizes) >= num_workers else "DATA")
    batches = run.global_batches()
    assert records(batches) == records(whole)
    if kinds(run) == "DATA":
        assert [batch["x"].tolist() for batch in batches] == [batch["x"].tolist() for batch in whole]
        for step in run.steps[0]:
            assert list(step.sizes) == _rows.split_sizes(sum(step.sizes), num_workers * num_local)


@few_examples
@hypothesis.given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(2, 4),
    num_local=st.integers(1, 2),
)
def test_by_file_a_step_is_one_global_batch_while_all_workers_have_records(sizes, batch_size, num_workers, num_local) -> None:
    sizes = sizes + [3] * max(0, num_workers - len(sizes))
    count = num_workers * num_local
    run = run_workers(lambda worker: pairs(Files(make_files(sizes))).batch(batch_size), num_workers, num_local, "file")
    held = [sum(sizes[worker::num_workers]) for worker in range(num_workers)]
    full = _rows.split_sizes(max(count, min(batch_size, max(held))), count)
    share = [sum(full[w * num_local : (w + 1) * num_local]) for w in range(num_workers)]
    expected = []
    while any(held):
        taken = [min(rows, most) for rows, most in zip(held, share, strict=True)]
        expected.append(tuple(itertools.chain(*(_rows.split_sizes(rows, num_local) for rows in taken))))
        held = [rows - gone for rows, gone in zip(held, taken, strict=True)]
    assert [step.sizes for step in run.steps[0]] == expected
    run.global_batches()


@few_examples
@hypothesis.given(
    sizes=st.lists(st.integers(0, 9), min_size=4, max_size=6),
    batch_size=st.integers(1, 9),
    num_workers=st.integers(1, 4),
    policy=st.sampled_from(["file", "data", "off"]),
)
def test_drop_remainder_gives_all_replicas_equal_numbers(sizes, batch_size, num_workers, policy) -> None:
    run = run_workers(lambda worker: pairs(Files(make_files(sizes))).batch(batch_size), num_workers, 2, policy, True)
    batches = run.global_batches()
    assert all(len(set(step.sizes)) == 1 and step.sizes[0] for step in run.steps[0])
    assert max(records(batches).values(), default=0) <= (num_workers if policy == "off" else 1)


def test_by_file_dropping_the_remainder_ends_with_the_first_worker_that_runs_out() -> None:
    """The third row of each batch of three is no loss: it begins the next step. What other workers have left is."""
    run = run_workers(lambda worker: pairs(Files([[1, 2, 3, 4, 5], [6, 7]])).batch(3), 2, policy="file", drop_remainder=True)
    assert [batch["x"].tolist() for batch in run.global_batches()] == [[1, 6], [2, 7]]
    assert run.dropped == 2  # as told on each of two workers: one row of the step in which worker 1 had none


def test_by_file_a_pipeline_may_use_one_buffer_for_all_batches() -> None:
    """Rows of a batch wait while the next is read."""

    def make(worker: int) -> grain.IterDataset:
        buffer = np.zeros(3, "int32")
        ds = Files([range(1, 8), range(11, 16)]).map(np.int32).batch(3)
        return ds.map(lambda batch: np.copyto(buffer[: len(batch)], batch) or buffer[: len(batch)])

    run = run_workers(make, 2, policy="file")
    assert [batch.tolist() for batch in run.global_batches()] == [[1, 2, 11], [3, 4, 12], [5, 6, 13], [7, 14], [15]]


def test_a_worker_without_records_takes_part_in_every_step() -> None:
    """Its files hold records, but the filter leaves none: it learns the structure of a batch from the others."""

    def of(worker: int) -> grain.IterDataset:
        ds = Files(make_files([4, 4])).filter(lambda n: n <= 4)
        return ds.map(lambda n: {"x": np.int32(n), "y": (np.ones(3), [np.float16(n)], None), "a*b, *": ({3: np.ones(1)},)})

    run = run_workers(lambda worker: of(worker).batch(3), 2, policy="file")
    [*_, last] = run.global_batches()
    assert run.steps[1][0].sizes == (2, 0)
    assert run.steps[1][0].stacked["y"][0].shape == (1, 2, 3)
    assert run.steps[1][0].stacked["y"][1][0].dtype == np.float16
    assert last["x"].tolist() == [3, 4]
    with pytest.raises(TypeError, match=r"this worker has had no record, and so cannot make an empty batch of class Custom\."):
        run_workers(lambda worker: of(worker).map(Custom).batch(3), 2, policy="file")


@jax.tree_util.register_pytree_node_class
class Custom:
    """A batch class that only its own process knows, and whose text is never the same twice, as one with an address in it."""

    made = itertools.count()

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    def tree_flatten(self) -> Any:
        return (self.fields,), None

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> Any:
        return cls(*children)

    def __repr__(self) -> str:
        return f"Custom {next(self.made)}"


def test_workers_whose_batches_do_not_fit_are_told_so() -> None:
    message = r"workers yielded batches that do not fit together: worker 0 .*float32\[3\], worker 1 .*float32\[4\]"
    with pytest.raises(ValueError, match=message):
        run_workers(lambda worker: [np.ones((2, 3 + worker), "float32")], 2, policy="off")
    rows = {"structure": "evil\n\x1b[2J", "leaves": [["float32\x1b", [3]]]}
    assert agree._show(rows) == r"evil\n\x1b[2J of float32\x1b[3]", "what another worker says is escaped"


class Own(grain.IterDataset):
    """A user's own transformation: nobody knows what it does across files."""

    def __iter__(self) -> Any:
        return iter(self._parent)


X = np.arange(4)


def test_auto_says_what_it_chose_and_why() -> None:
    four, mixed = Files([[1]] * 4), {"a": Files([[1]] * 4), "b": Files([[2]] * 4)}
    for dataset, num_workers, words in [
        (four, 2, r"AUTO chose FILE: worker i of 2 reads the files i, i \+ 2, \.\.\. of 4 and"),
        (four, 4, r"AUTO chose FILE"),
        (four, 5, r"AUTO chose DATA, because there are 4 files for 5 workers: every one of"),
        (interleaved([[1]] * 4), 2, r"AUTO chose FILE: worker i of 2 reads the files i, i \+ 2, \.\.\. and"),
        (interleaved([[1]] * 2), 3, r"InterleaveIterDataset has no file, or no record, for the last of 3 workers"),
        (interleaved([[1]] * 2), 4, r"InterleaveIterDataset has no file, or no record, for the last of 4 workers"),
        (zipped_with_numbers([[1]] * 4), 2, r"ZipIterDataset combines several datasets, whose files would no"),
        (grain.IterDataset.mix(mixed, {"a": 0.5, "b": 0.5}), 2, r"MixedIterDataset combines several"),
        (gx.LimitIterDataset(four, 2), 2, r"LimitIterDataset takes the first records of all files together"),
        (four.map_with_index(lambda i, x: x), 2, r"MapWithIndexIterDataset numbers the records of all files"),
        (grain.MapDataset.range(9).batch(3), 2, r"because BatchMapDataset|RangeMapDataset reads no files"),
        (grain.MapDataset.range(9).to_iter_dataset(), 2, r"reads no files that can be shared out|not known"),
        (Own(four), 2, r"Own is not known to work file by file"),
        (four.batch(3, drop_remainder=True).map(list), 2, r"drop_remainder=True leaves records out once, and by file each"),
        (mr.data.tfrecord_dataset([__file__] * 2).batch(3, drop_remainder=True), 2, r"DATA, because drop_remainder=True leaves"),
        (mr.data.tfrecord_dataset([__file__] * 2).batch(3), 2, r"AUTO chose FILE"),
        ([X], 2, r"because list is no dataset of files"),
    ]:
        plan = make_plan(dataset, "auto", InputWorker(0, num_workers), num_workers)
        assert re.search(words, plan.how), plan.how
        assert plan.kind == ("FILE" if "FILE:" in plan.how else "DATA")
    dropping = [make_plan(four, policy, InputWorker(0, 2), 2, drop_remainder=True) for policy in ("auto", "file")]
    assert [plan.kind for plan in dropping] == ["DATA", "FILE"], "FILE is the user's word"
    assert "AUTO chose DATA, because drop_remainder=True would leave out by file what others have left" in dropping[0].how
    for policy in ("auto", "file", "data", "off"):
        plan = make_plan([X], policy, InputWorker(), 2)
        assert (plan.kind, plan.dataset[0] is X) == ("DATA", True), "one worker takes all"


def test_off_divides_each_workers_batches_among_its_own_replicas() -> None:
    """A worker with fewer batches gives none in the last steps, and nobody waits."""
    run = run_workers(lambda worker: [np.arange(5) + 10 * worker] * (3 - worker), 2, num_local=2, policy="off")
    both = [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert [batch.tolist() for batch in run.global_batches()] == [both, both, [0, 1, 2, 3, 4]]
    assert [step.sizes for step in run.steps[0]] == [(3, 2, 3, 2), (3, 2, 3, 2), (3, 2, 0, 0)]


def test_by_file_what_cannot_be_shared_out_is_refused_and_a_users_own_transformation_is_the_users_word() -> None:
    assert make_plan(Own(Files([[1]] * 4)), "file", InputWorker(0, 2), 2).kind == "FILE"
    for dataset, message in [
        (Files([[1]]), r"cannot share this dataset out among 2 workers: there are 1 files for 2 workers\. Use mr\.Auto"),
        (zipped_with_numbers([[1]] * 4), r"ZipIterDataset combines several datasets"),
        (grain.MapDataset.range(9).batch(3), r"reads no files that can be shared out"),
    ]:
        with pytest.raises(ValueError, match=message):
            make_plan(dataset, mr.AutoShardPolicy.FILE, InputWorker(0, 2), 2)


def test_one_line_of_the_log_says_how_a_dataset_is_shared_out(strategy2, caplog) -> None:
    plan = make_plan(Files([[1]] * 4), "auto", InputWorker(1, 2), 2)
    with caplog.at_level(logging.INFO, logger="mirrored"):
        distributed = DistributedDataset(strategy2._mesh, mr.InputOptions(), InputWorker(1, 2), plan)
        strategy2.distribute_dataset([X])
    [line] = [record.getMessage() for record in caplog.records if record.getMessage().startswith("dataset")]
    assert line == f"dataset {distributed.describe()}" and "AUTO chose FILE: worker i of 2 reads" in line
    with pytest.raises(
        TypeError, match="the number of steps is not known before the end: the workers read datasets of their own"
    ):
        len(distributed)


def test_a_step_with_batches_of_two_datasets_of_which_auto_shares_one_by_file_warns(strategy2) -> None:
    """On two workers other rows would meet: who has pairs zips before, and who has none says so."""

    def batch_of(dataset: Any, policy: str) -> Any:
        plan = make_plan(dataset, policy, InputWorker(0, 2), 2)
        return next(iter(DistributedDataset(strategy2._mesh, mr.InputOptions(prefetch=0), InputWorker(), plan).repeat()))

    files, rows = Files([[1.0, 2.0, 3.0, 4.0]] * 2).batch(2), [np.zeros(2)]
    with pytest.warns(UserWarning, match=r"batches of two distributed datasets.*zip the pipelines.*auto_shard_policy='file'"):
        strategy2.run(lambda x, y: x * y, args=(batch_of(files, "auto"), batch_of(rows, "auto")))
    one = batch_of(files, "auto")
    for batches in (
        (batch_of(files, "file"), batch_of(rows, "auto")),
        (batch_of(rows, "auto"), batch_of(rows, "data")),
        (one, one),
    ):
        strategy2.run(lambda x, y: x - y, args=batches)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_that_is_left_keeps_no_channel(prefetch: int, strategy2) -> None:
    """Its keys would stay in the coordination service until the program ends."""
    closed: list[int] = []
    worker, plan = InputWorker(close=lambda: closed.append(1)), make_plan([X] * 3, "auto", InputWorker(), 2)
    iterator = iter(DistributedDataset(strategy2._mesh, mr.InputOptions(prefetch=prefetch), worker, plan))
    next(iterator)
    assert not closed
    del iterator
    gc.collect()
    assert closed


def told_steps(dataset: Any, kind: str, **options: Any) -> tuple[list[Any], list[Any]]:
    """The steps of one of two workers that read the same, and the messages that it sent."""
    told: list[Any] = []

    def exchange(value: Any) -> list[Any]:
        told.append(value)
        return [value, value]

    layout = LocalReplicas(2, InputWorker(0, 2, exchange, is_noted=options.pop("is_noted", False)), **options)
    plan = SharingPlan(dataset, kind, "")
    return list(plan.steps(plan.open(), layout, {})), told


def test_batches_that_are_noted_are_told_at_the_first_and_the_end_only() -> None:
    first, second = [[*np.zeros((9, 4)), np.full(4, last)] for last in (1.0, 2.0)]
    steps, told = told_steps(first, "DATA")
    assert [step.place[2] for step in steps] == list(range(1, 11)) and len(told) == 11
    steps, told = told_steps(first, "DATA", is_noted=True)
    assert [value[:3] for value in told] == [[False, 1, 4], [True, 10, 0]]
    others, told_of_others = told_steps(second, "DATA", is_noted=True)
    assert told[-1] != told_of_others[-1]
    assert [a.place == b.place for a, b in zip(steps, others, strict=True)] == [True] * 9 + [False]


def test_workers_tell_of_several_batches_at_once() -> None:
    """The first is not kept waiting for others, and no message is needed for each."""
    dataset = [np.arange(i, i + 2) for i in range(20)]
    (one, _), (several, told) = told_steps(dataset, "OFF", lookahead=1), told_steps(dataset, "OFF", lookahead=4)
    assert [step.stacked.tolist() for step in one] == [step.stacked.tolist() for step in several] and len(one) > 15
    lengths = [len(message["steps"]) for message in told if isinstance(message, dict)]
    assert lengths[:4] == [1, 2, 4, 4] and len(lengths) <= len(one) / 4 + 4


def test_an_error_of_the_pipeline_comes_after_the_batches_before_it() -> None:
    def batches() -> Iterator[np.ndarray]:
        yield from [np.zeros(2)] * 5
        raise OSError("no such disk")

    layout = LocalReplicas(2, InputWorker(0, 2, lambda value: [value, value]), lookahead=4)
    steps = SharingPlan(None, "OFF", "").steps(open_source(batches()), layout, {})
    assert [next(steps).sizes for _ in range(5)] == [(2, 2)] * 5
    with pytest.raises(OSError, match="no such disk"):
        next(steps)


def test_workers_that_read_different_batches_under_data_are_told_so() -> None:
    def batches(*sizes: int, dtype: str = "float32") -> list[Any]:
        return [np.zeros((size, 2), dtype) for size in sizes]

    shuffled = [[np.random.default_rng(seed).permutation(1000)] for seed in (0, 1)]
    for by_worker, message in [
        ([batches(4, 4), batches(4)], r"the data of worker 1 has ended, and worker 0 has more"),
        ([batches(4), batches(4, 4)], r"the data of worker 0 has ended, and worker 1 has more"),
        ([batches(4), batches(5)], r"the next batch of worker 0 has 4 rows, and that of worker 1 5"),
        (shuffled, "the next batches of worker 0 and worker 1 hold different records"),
        ([batches(4), batches(4, dtype="int32")], r"the rows .* worker 0 are float32\[2\] and that of worker 1 int32\[2\]"),
    ]:
        for is_noted in (False, True):
            with pytest.raises(ValueError, match=message + r"\. Under AutoShardPolicy\.DATA every worker reads the same batches"):
                run_workers(lambda worker, of=by_worker: of[worker], 2, policy="data", is_noted=is_noted)
    with pytest.raises(ValueError, match="hold different records"):  # a function that does not do the same everywhere
        run_workers(lambda worker: mr.data.NumpyDataset(X).map(lambda row: row + worker).batch(2), 2, policy="data")


def test_another_record_anywhere_in_any_array_of_a_batch_is_seen() -> None:
    def batch() -> list[np.ndarray]:
        return [np.zeros((3, 100_000), np.uint8), np.zeros((3, 4), np.float32)[:, ::2], np.zeros((0, 2), np.int32), np.zeros(3)]

    for leaf, place in itertools.product((0, 1, 3), (0, 1, 2)):
        changed = batch()
        changed[leaf][place if leaf == 3 else (place, 1)] = 1
        assert _checksum(changed, 0) != _checksum(batch(), 0) == _checksum(batch(), 0) != _checksum(batch(), 1)
    assert _checksum([np.array(["ab", "cd"])], 0) != _checksum([np.array(["ab", "ce"])], 0)
