"""`take`, `repeat` and `map` of distributed datasets, what their elements are like, and their positions."""

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import pytest
from simulated_workers import run_workers

import mirrored as mr
from mirrored.data import NumpyDataset, PerReplicaSpec
from mirrored.data._sources.open import open_source

pytestmark = pytest.mark.usefixtures("grains_threads_end")


def numpy_dataset(arrays: Any) -> NumpyDataset:
    return mr.get_strategy().make_numpy_dataset(arrays)


def rows_of(value: mr.PerReplica) -> list[Any]:
    return [row for part in value.values for row in np.asarray(part).tolist()]


def limited(dataset: Any, limits: list[tuple[str, int | None]]) -> Any:
    for kind, count in limits:
        dataset = getattr(dataset, kind)(count)
    return dataset


def expected(one_pass: list[Any], limits: list[tuple[str, int | None]]) -> Iterator[Any]:
    """As tf.data: each of what the ones before it give."""
    if not limits:
        yield from one_pass
    elif limits[-1][0] == "take":
        yield from itertools.islice(expected(one_pass, limits[:-1]), limits[-1][1])
    else:
        for _ in itertools.count() if limits[-1][1] is None else range(limits[-1][1]):
            yield from expected(one_pass, limits[:-1])


LIMITS: list[list[tuple[str, int | None]]] = [
    [], [("take", 2)], [("take", 0)], [("take", 99)], [("repeat", 3)], [("take", 2), ("repeat", 3)], [("repeat", 2), ("take", 4)],
    [("repeat", None), ("take", 7)], [("take", 2), ("repeat", None), ("take", 5)], [("take", 3), ("repeat", 2)],
    [("repeat", 2), ("take", 5), ("repeat", 2)], [("take", 2), ("take", 1), ("repeat", 2), ("repeat", 2)],
    [("take", 1), ("repeat", 3), ("take", 2), ("repeat", None), ("take", 5), ("take", 4)],
]  # fmt: skip


@pytest.mark.parametrize("limits", [[("repeat", None)], [("repeat", 3)], [("take", 2), ("repeat", 3)]])
def test_what_is_read_ahead_changes_no_order_of_another_iterator(limits: list[Any], strategy2: mr.MirroredStrategy) -> None:
    """Of the same rows, such as those of a training that are measured meanwhile; workers would read ahead differently far."""

    def orders(prefetch: int, is_resumed: bool = False) -> list[Any]:
        rows = numpy_dataset(np.arange(20)).shuffle(seed=0).batch(10)
        dataset = strategy2.distribute_dataset(rows, mr.InputOptions(prefetch=prefetch))
        with iter(limited(dataset, limits)) as iterator:
            found = [rows_of(next(iterator)) for _ in range(3)]
            if is_resumed:
                iterator.set_state(iterator.get_state())
                found += [rows_of(next(iterator))]
            while prefetch and len(iterator._batches._channel._ready) < prefetch:
                time.sleep(0.001)
            other = [rows_of(x) for x in dataset]
            found += [rows_of(next(iterator)) for _ in range(6 - len(found))]
        return [found, other, [rows_of(x) for x in dataset]]

    near, has_end = orders(prefetch=0), limits[-1][1] is not None
    assert near == orders(prefetch=3) and (not has_end or near == orders(0, is_resumed=True) == orders(2, is_resumed=True))
    passes = [np.random.default_rng([0, k]).permutation(20).tolist() for k in range(5)]
    assert [a + b for a, b in zip(near[0][::2], near[0][1::2], strict=True)] == passes[:3]
    later = 3 if has_end else 1
    assert [[*first, *second] for first, second in near[1:]] == passes[later : later + 2]


def test_steps_are_taken_and_repeated_and_any_position_is_gone_on_from(strategy: mr.MirroredStrategy) -> None:
    one_pass = [[0, 1], [2, 3], [4]]
    dataset = strategy.distribute_dataset(numpy_dataset(np.arange(5)).batch(2))
    for limits in LIMITS if strategy.num_replicas_in_sync == 2 else LIMITS[:6]:
        wanted = list(expected(one_pass, limits))
        whole = limited(dataset, limits)
        assert [rows_of(x) for x in whole] == wanted == [rows_of(x) for x in whole], limits
        assert len(whole) == len(wanted), limits
        with iter(whole) as iterator:
            states = [iterator.get_state(), *(iterator.get_state() for _ in iterator)]
        assert len(states) == len(wanted) + 1
        for at, state in enumerate(states):
            with iter(whole) as iterator:
                iterator.set_state(state)
                assert iterator.get_state() == state
                assert [rows_of(x) for x in iterator] == wanted[at:], (limits, at)


def test_each_round_has_its_own_order_and_a_resumed_one_the_same(strategy2: mr.MirroredStrategy) -> None:
    def make() -> mr.data.DistributedDataset:
        return strategy2.distribute_dataset(numpy_dataset(np.arange(9)).shuffle(seed=0).batch(4)).take(2).repeat()

    whole = [rows_of(x) for x in itertools.islice(make(), 8)]
    assert len({tuple(rows) for rows in whole}) == 8
    for at in range(8):
        first = iter(make())
        begun = [rows_of(x) for x in itertools.islice(first, at)]
        state = first.get_state()
        first.close()
        with iter(make()) as second:
            second.set_state(state)
            assert begun + [rows_of(x) for x in itertools.islice(second, 8 - at)] == whole


def test_a_state_of_other_limits_is_refused_and_changes_nothing(strategy2: mr.MirroredStrategy) -> None:
    dataset = strategy2.distribute_dataset([np.arange(2) + n for n in range(4)])
    with iter(dataset.take(3).repeat(2)) as iterator:
        next(iterator)
        state = iterator.get_state()
    assert state["places"] == [1, 0] and "places" not in iter(dataset).get_state()
    for other in (dataset, dataset.take(3), dataset.take(3).repeat(2).take(9)):
        with (
            iter(other) as iterator,
            pytest.raises(ValueError, match=r"the state is at \[1, 0\] of take and repeat, and this datas"),
        ):
            iterator.set_state(state)
    with (
        iter(dataset.take(0).repeat(2)) as iterator,
        pytest.raises(ValueError, match=r"has \.take\(0\)\.repeat\(2\); call the same"),
    ):
        iterator.set_state(state)
    for places in ("ab", [1], [True, 0], [-1, 0], None):
        with iter(dataset.take(3).repeat(2)) as iterator:
            with pytest.raises(ValueError, match="call the same in both runs"):
                iterator.set_state({**state, "places": places})
            assert rows_of(next(iterator)) == [0, 1]
    with iter(dataset.take(4).repeat()) as iterator:  # an end that has moved away
        iterator.set_state(state)
        assert rows_of(next(iterator)) == [1, 2]


def test_a_function_gets_batches_on_the_host_before_they_are_divided(strategy3: mr.MirroredStrategy) -> None:
    seen: list[Any] = []

    def double(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
        seen.append(type(x))
        return {"x": x[y > 0] * 2}

    pairs = [(np.arange(5), np.array([1, 1, 0, 1, 1])), (np.arange(2), np.ones(2))]
    dataset = strategy3.distribute_dataset(pairs).map(double).map(lambda batch: {"x": batch["x"] + 1, "n": batch["x"]}).repeat(2)
    batches = list(dataset)
    assert [rows_of(batch["x"]) for batch in batches] == [[1, 3, 7, 9], [1, 3]] * 2 and set(seen) == {np.ndarray}
    assert rows_of(batches[0]["n"]) == [0, 2, 6, 8] and batches[0]["x"].shapes == ((2,), (1,), (1,))
    with iter(dataset) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(dataset) as iterator:
        iterator.set_state(state)
        assert [rows_of(batch["x"]) for batch in iterator] == [[1, 3], [1, 3, 7, 9], [1, 3]]
    batches = numpy_dataset(np.arange(12.0)).batch(6)
    is_owned = [open_source(own, None, maps).is_owned for own, maps in ((batches, ()), (batches, (abs,)), (batches.map(abs), ()))]
    assert is_owned == [True, False, False], "what a function returns may be somebody else's"
    held = np.zeros(6)
    rows = strategy3.distribute_dataset(numpy_dataset(np.arange(12.0)).batch(6)).map(lambda x: np.copyto(held, x) or held)
    assert [rows_of(x) for x in rows] == [list(range(6)), list(range(6, 12))], "a buffer that is filled again"
    by_replica = strategy3.distribute_datasets_from_function(lambda context: [np.arange(2)] * 4).map(lambda x: x + 5).take(1)
    assert [rows_of(x) for x in by_replica] == [[5, 6] * 3]
    with pytest.raises(ZeroDivisionError):
        list(strategy3.distribute_dataset([np.arange(2)]).map(lambda x: 1 // 0))
    mine = np.ones((4, 2))
    for source in ([mine], strategy3.make_numpy_dataset(mine).batch(4)):  # a function may change what it gets
        halved = strategy3.distribute_dataset(source).map(lambda x: np.divide(x, 2, out=x))
        assert halved.element_spec.shape == (None, 2)
        assert [rows_of(x) for x in halved.repeat(2)] == [[[0.5, 0.5]] * 4] * 2 and (mine == 1).all()
    others = strategy3.make_numpy_dataset(np.arange(12.0))
    for ended in (
        lambda fn: strategy3.distribute_dataset([np.arange(2)] * 3).map(fn),
        lambda fn: strategy3.distribute_dataset(others.map(fn).batch(4)),
        lambda fn: strategy3.distribute_dataset(others.batch(4).map(fn)),
    ):
        second = iter([1])
        with pytest.raises(RuntimeError, match=r"map was given raised StopIteration, .* the batches after it would be lost"):
            list(ended(lambda x, second=second: x + next(second)))
    for wrong in (lambda: dataset.map(3), lambda: dataset.take("1"), lambda: dataset.repeat(True), lambda: dataset.take(None)):
        with pytest.raises(TypeError, match="got"):
            wrong()
    for wrong in (lambda: dataset.take(-1), lambda: dataset.repeat(0)):
        with pytest.raises(ValueError, match="expected at least"):
            wrong()


class Once:
    """Batches that can only be iterated, with a count of how often they were."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.count = batches, 0

    def __iter__(self) -> Iterator[Any]:
        self.count += 1
        return iter(self.batches)


def test_what_elements_are_like_is_told_without_moving_anything(strategy: mr.MirroredStrategy) -> None:
    batch = {"x": np.zeros((5, 3), np.float64), "y": (np.arange(5),)}
    spec = {"x": PerReplicaSpec((None, 3), np.dtype("float32")), "y": (PerReplicaSpec((None,), np.dtype("int32")),)}
    shuffled = numpy_dataset(batch).shuffle(seed=0).batch(2)
    order = [one["y"][0].tolist() for one in numpy_dataset(batch).shuffle(seed=0).batch(2)]
    pipeline = grain.MapDataset.source(range(5)).map(lambda n: {"x": np.zeros(3), "y": (n,)}).batch(2)
    for dataset in (shuffled, [batch], pipeline, pipeline.to_iter_dataset()):
        distributed = strategy.distribute_dataset(dataset)
        assert distributed.element_spec == distributed.take(1).repeat().element_spec == iter(distributed).element_spec == spec
        first = next(iter(distributed))
        assert jax.tree.structure(first, is_leaf=lambda x: isinstance(x, mr.PerReplica)) == jax.tree.structure(spec)
    assert shuffled.element_spec == spec
    assert [one["y"][0].tolist() for one in shuffled][: len(order)] != [] and order == [
        one["y"][0].tolist() for one in numpy_dataset(batch).shuffle(seed=0).batch(2)
    ]
    fresh = numpy_dataset(batch).shuffle(seed=0).batch(2)
    assert fresh.element_spec == strategy.distribute_dataset(fresh).element_spec
    assert [one["y"][0].tolist() for one in fresh] == order, "no pass was begun"
    mapped = strategy.distribute_dataset([batch]).map(lambda batch: batch["x"].astype("float16")[:, :, None])
    assert mapped.element_spec == PerReplicaSpec((None, 3, 1), np.dtype("float16"))
    once = Once([np.zeros((4, 2))])
    distributed = strategy.distribute_dataset(once)
    with pytest.raises(TypeError, match=r"elements of Once .* known when an iterator has given one: .*next\(iterator\)"):
        _ = distributed.element_spec
    assert once.count == 0
    list(distributed)
    assert distributed.element_spec == PerReplicaSpec((None, 2), np.dtype("float32")) and once.count == 1
    for empty in ([], pipeline[:0]):
        with pytest.raises(ValueError, match="is empty"):
            _ = strategy.distribute_dataset(empty).element_spec


def test_lengths_and_no_ends(strategy2: mr.MirroredStrategy) -> None:
    dataset = strategy2.distribute_dataset([np.arange(2)] * 3)
    with pytest.raises(TypeError, match="repeats without end"):
        len(dataset.repeat())
    assert len(dataset.repeat().take(8)) == 8 and len(dataset.take(0).repeat()) == 0
    for empty in ([], [np.zeros(0)]):
        distributed = strategy2.distribute_dataset(empty)
        assert list(distributed.repeat()) == list(distributed.take(0).repeat()) == [], "it ends, as in tf.data"
    without_prefetch = strategy2.distribute_dataset([np.arange(2)] * 2, mr.InputOptions(prefetch=0)).repeat(2)
    assert len(list(without_prefetch)) == 4
    with pytest.raises(TypeError, match="length of Once is not known"):
        len(strategy2.distribute_dataset(Once([])).repeat(2))


# -- arrays in memory


def test_rows_in_memory_are_taken_mapped_and_repeated_as_in_tf_data() -> None:
    rows = numpy_dataset(np.arange(7))

    def batches(dataset: NumpyDataset, most: int = 99) -> list[Any]:
        return [batch.tolist() for batch in itertools.islice(dataset, most)]

    assert batches(rows.take(3).batch(2)) == [[0, 1], [2]] == batches(rows.take(5).take(3).batch(2).take(9))
    assert batches(rows.batch(3).take(2)) == [[0, 1, 2], [3, 4, 5]]
    assert batches(rows.batch(3).take(2).repeat(2)) == [[0, 1, 2], [3, 4, 5]] * 2
    assert batches(rows.batch(3).repeat(2).take(4)) == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]
    assert batches(rows.batch(3).take(2).repeat().take(3)) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert batches(rows.batch(5).repeat(), 5) == [[0, 1, 2, 3, 4], [5, 6]] * 2 + [[0, 1, 2, 3, 4]]
    assert batches(rows.batch(5, drop_remainder=True).repeat(), 3) == [[0, 1, 2, 3, 4]] * 3
    assert batches(rows.batch(9, drop_remainder=True).repeat()) == batches(rows.batch(2).take(0).repeat()) == []
    assert batches(rows.map(lambda row: row * 10).batch(3).map(lambda x: x + len(x))) == [[3, 13, 23], [33, 43, 53], [61]]
    pairs = numpy_dataset((np.arange(4), np.arange(8.0).reshape(4, 2))).map(lambda x, y: {"z": y + x, "x": x}).batch(3)
    assert [batch["z"].shape for batch in pairs] == [(3, 2), (1, 2)] and len(pairs) == 2
    for dataset in (rows.batch(3).take(2).repeat(2), rows.batch(3).repeat(2).take(4), rows.batch(3).take(2).repeat().take(3),
                    rows.take(0).batch(2), rows.batch(3).take(0).repeat(3)):  # fmt: skip
        assert len(dataset) == len(batches(dataset))
    shuffled = rows.shuffle(seed=1).batch(3)
    endless = batches(rows.shuffle(seed=1).batch(3).repeat(), 9)
    assert endless == [batch for _ in range(3) for batch in batches(shuffled)], "epochs have the orders that passes have"
    with pytest.raises(TypeError, match="repeats without end"):
        len(rows.batch(2).repeat())
    for fn in (lambda row: np.ones(row), lambda row: row if row else {"a": row}):
        with pytest.raises(ValueError, match=r"structures or shapes, and cannot be stacked\. Return arrays of one shape"):
            list(rows.map(fn).batch(3))
    for wrong in (lambda: rows.shuffle(seed=0).take(2), lambda: rows.map(abs).take(1), lambda: rows.repeat().take(1),
                  lambda: rows.batch(2).repeat(2).take(3).repeat()):  # fmt: skip
        with pytest.raises(ValueError, match="was called after"):
            wrong()


def test_positions_in_endless_and_cut_rows(strategy2: mr.MirroredStrategy) -> None:
    for make in (
        lambda rows: rows.batch(3).repeat(), lambda rows: rows.batch(3).take(2).repeat(),
        lambda rows: rows.batch(2).repeat(4).take(6), lambda rows: rows.map(lambda row: row + 1).batch(2).repeat(),
    ):  # fmt: skip
        whole = [
            rows_of(x)
            for x in itertools.islice(strategy2.distribute_dataset(make(numpy_dataset(np.arange(7)).shuffle(seed=2))), 7)
        ]
        for at in range(0, 7, 2):
            with iter(strategy2.distribute_dataset(make(numpy_dataset(np.arange(7)).shuffle(seed=2)))) as iterator:
                begun = [rows_of(x) for x in itertools.islice(iterator, at)]
                state = iterator.get_state()
            with iter(strategy2.distribute_dataset(make(numpy_dataset(np.arange(7)).shuffle(seed=2)))) as iterator:
                iterator.set_state(state)
                assert begun + [rows_of(x) for x in itertools.islice(iterator, 7 - at)] == whole
    ahead = strategy2.distribute_dataset(numpy_dataset(np.arange(5)).batch(4).repeat(3), mr.InputOptions(drop_remainder=True))
    assert len(ahead) == len(list(ahead)) == 3


# -- several workers


@pytest.mark.parametrize("policy", ["data", "file", "off"])
def test_workers_take_and_repeat_the_same_steps_and_go_on_from_any(policy: str, tmp_path: Path) -> None:
    """Also where one of them has fewer records, so that only all together know where a pass ends."""
    for number, count in enumerate((5, 2, 4)):
        records = [mr.data.make_example({"x": number * 10 + n}) for n in range(count)]
        mr.data.write_tfrecords(tmp_path / f"{number}.tfrecord", records)
    spec = {"x": mr.data.FixedLenFeature((), np.int32)}

    def dataset(worker: int) -> Any:
        batches = mr.data.tfrecord_dataset(str(tmp_path / "*.tfrecord")).batch(4)
        return batches.map(lambda records: mr.data.parse_example(records, spec)["x"])

    def read(limits: Any, **more: Any) -> list[list[int]]:
        run = run_workers(dataset, 2, 2, policy, limits=limits, **more)
        runs.append(run)
        return [batch.tolist() for batch in run.global_batches()]

    runs: list[Any] = []
    one_pass = read([])
    assert len(one_pass) > 2
    for limits in ([("repeat", 2)], [("take", 2), ("repeat", 3)], [("repeat", None), ("take", 7)]):
        wanted = list(expected(one_pass, limits))
        assert read(limits) == wanted
        by_step = list(zip(*runs[-1].steps, strict=True))
        for at, step in enumerate(by_step, 1):
            assert step[0].extra["places"] == step[1].extra["places"]
            positions = [(one.position, one.extra) for one in step]
            assert read(limits, positions=positions) == wanted[at:], (limits, at)


def test_the_first_worker_to_fail_in_a_function_ends_all(strategy2: mr.MirroredStrategy) -> None:
    """A function that does not do the same everywhere is found, as other batches that differ."""
    with pytest.raises(ValueError, match="hold different records"):
        run_workers(lambda worker: numpy_dataset(np.arange(4)).map(lambda row: row + worker).batch(2), 2, policy="data")


def test_ctrl_c_inside_an_iterator_of_rows_in_memory_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    rows = NumpyDataset(np.arange(7)).batch(2).repeat(2)
    whole = [batch.tolist() for batch in rows]
    for method in ("_order", "_rows_per_batch"):
        iterator, found = iter(rows), []
        for _ in whole:
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(NumpyDataset, method, interrupted)
                iterator._order = None
                next(iterator)
            found.append(next(iterator).tolist())
        assert found == whole and list(iterator) == []
