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
from pipelines import Reiterable, batches_of, resumed, rows_of
from simulated_workers import run_workers

import mirrored as mr
from mirrored.data import NumpyDataset, PerReplicaSpec
from mirrored.data._sources.open import open_source

pytestmark = pytest.mark.usefixtures("grains_threads_end")


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
        rows = NumpyDataset(np.arange(20)).shuffle(seed=0).batch(10)
        dataset = strategy2.distribute_dataset(rows, mr.InputOptions(prefetch=prefetch))
        with iter(limited(dataset, limits)) as iterator:
            found = batches_of(iterator, 3)
            if is_resumed:
                iterator.set_state(iterator.get_state())
                found += batches_of(iterator, 1)
            while prefetch and len(iterator._batches._ready) < prefetch:
                time.sleep(0.001)
            other = batches_of(dataset)
            found += batches_of(iterator, 6 - len(found))
        return [found, other, batches_of(dataset)]

    near, has_end = orders(prefetch=0), limits[-1][1] is not None
    assert near == orders(prefetch=3) and (not has_end or near == orders(0, is_resumed=True) == orders(2, is_resumed=True))
    passes = [np.random.default_rng([0, k]).permutation(20).tolist() for k in range(5)]
    assert [a + b for a, b in zip(near[0][::2], near[0][1::2], strict=True)] == passes[:3]
    later = 3 if has_end else 1
    assert [[*first, *second] for first, second in near[1:]] == passes[later : later + 2]


def test_steps_are_taken_and_repeated_and_any_position_is_gone_on_from(strategy2: mr.MirroredStrategy) -> None:
    one_pass = [[0, 1], [2, 3], [4]]
    dataset = strategy2.distribute_dataset(NumpyDataset(np.arange(5)).batch(2))
    for limits in LIMITS:
        wanted = list(expected(one_pass, limits))
        whole = limited(dataset, limits)
        assert batches_of(whole) == wanted == batches_of(whole) and len(whole) == len(wanted), limits
        with iter(whole) as iterator:
            states = [iterator.get_state(), *(iterator.get_state() for _ in iterator)]
        assert len(states) == len(wanted) + 1
        for at, state in enumerate(states):
            with iter(whole) as iterator:
                iterator.set_state(state)
                assert iterator.get_state() == state
                assert batches_of(iterator) == wanted[at:], (limits, at)
    with pytest.raises(TypeError, match="repeats without end"):
        len(dataset.take(2).repeat())
    assert len(dataset.take(0).repeat()) == len(list(dataset.take(0).repeat())) == 0


def test_a_state_of_other_limits_is_refused_and_changes_nothing(strategy2: mr.MirroredStrategy) -> None:
    dataset = strategy2.distribute_dataset([np.arange(2) + n for n in range(4)])
    with iter(dataset.take(3).repeat(2)) as iterator:
        next(iterator)
        state = iterator.get_state()
    assert state["places"] == [1, 0] and "places" not in iter(dataset).get_state()
    at, same = r"the state is at \[1, 0\] of take and repeat, and this dataset has ", "; call the same in both runs"
    for other, here in (
        (dataset, "neither"), (dataset.take(3), r"\.take\(3\)"), (dataset.take(0).repeat(2), r"\.take\(0\)\.repeat\(2\)"),
        (dataset.take(3).repeat(2).take(9), r"\.take\(3\)\.repeat\(2\)\.take\(9\)"),
    ):  # fmt: skip
        with iter(other) as iterator, pytest.raises(ValueError, match=at + here + same):
            iterator.set_state(state)
    for places in ("ab", [1], [True, 0], [-1, 0], None):
        with iter(dataset.take(3).repeat(2)) as iterator:
            with pytest.raises(ValueError, match=same):
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
    whole = [{"x": [1, 3, 7, 9], "n": [0, 2, 6, 8]}, {"x": [1, 3], "n": [0, 2]}] * 2
    assert batches_of(dataset) == resumed(dataset, 1, dataset) == whole and set(seen) == {np.ndarray}
    assert next(iter(dataset))["x"].shapes == ((2,), (1,), (1,))
    batches = NumpyDataset(np.arange(12.0)).batch(6)
    is_owned = [open_source(own, None, maps).is_owned for own, maps in ((batches, ()), (batches, (abs,)), (batches.map(abs), ()))]
    assert is_owned == [True, False, False], "what a function returns may be somebody else's"
    held = np.zeros(6)
    rows = strategy3.distribute_dataset(batches).map(lambda x: np.copyto(held, x) or held)
    assert batches_of(rows) == [list(range(6)), list(range(6, 12))], "a buffer that is filled again"
    by_replica = strategy3.distribute_datasets_from_function(lambda context: [np.arange(2)] * 4).map(lambda x: x + 5).take(1)
    assert batches_of(by_replica) == [[5, 6] * 3]
    with pytest.raises(ZeroDivisionError):
        list(strategy3.distribute_dataset([np.arange(2)]).map(lambda x: 1 // 0))
    mine = np.ones((4, 2))
    for source in ([mine], NumpyDataset(mine).batch(4)):  # a function may change what it gets
        halved = strategy3.distribute_dataset(source).map(lambda x: np.divide(x, 2, out=x))
        assert halved.element_spec.shape == (None, 2)
        assert batches_of(halved.repeat(2)) == [[[0.5, 0.5]] * 4] * 2 and (mine == 1).all()
    others = NumpyDataset(np.arange(12.0))
    for ended in (
        lambda fn: strategy3.distribute_dataset([np.arange(2)] * 3).map(fn),
        lambda fn: strategy3.distribute_dataset(others.map(fn).batch(4)),
        lambda fn: strategy3.distribute_dataset(others.batch(4).map(fn)),
    ):
        second = iter([1])
        with pytest.raises(RuntimeError, match=r"map was given raised StopIteration, .* the batches after it would be lost"):
            list(ended(lambda x, second=second: x + next(second)))


def test_what_elements_are_like_is_told_without_moving_anything(strategy3: mr.MirroredStrategy) -> None:
    batch = {"x": np.zeros((5, 3), np.float64), "y": (np.arange(5),)}
    spec = {"x": PerReplicaSpec((None, 3), np.dtype("float32")), "y": (PerReplicaSpec((None,), np.dtype("int32")),)}
    order = [one["y"][0].tolist() for one in NumpyDataset(batch).shuffle(seed=0).batch(2)]
    shuffled = NumpyDataset(batch).shuffle(seed=0).batch(2)
    assert shuffled.element_spec == strategy3.distribute_dataset(shuffled).element_spec
    assert [one["y"][0].tolist() for one in shuffled] == order, "no pass was begun"
    pipeline = grain.MapDataset.source(range(5)).map(lambda n: {"x": np.zeros(3), "y": (n,)}).batch(2)
    for dataset in (shuffled, [batch], pipeline, pipeline.to_iter_dataset()):
        distributed = strategy3.distribute_dataset(dataset)
        assert distributed.element_spec == distributed.take(1).repeat().element_spec == iter(distributed).element_spec == spec
        first = next(iter(distributed))
        assert jax.tree.structure(first, is_leaf=lambda x: isinstance(x, mr.PerReplica)) == jax.tree.structure(spec)
    mapped = strategy3.distribute_dataset([batch]).map(lambda batch: batch["x"].astype("float16")[:, :, None])
    assert mapped.element_spec == PerReplicaSpec((None, 3, 1), np.dtype("float16"))
    once = Reiterable(lambda: iter([np.zeros((4, 2))]))
    distributed = strategy3.distribute_dataset(once)
    with pytest.raises(TypeError, match=r"elements of Reiterable .* known when an iterator has given one: .*next\(iterator\)"):
        _ = distributed.element_spec
    assert once.num_passes == 0
    list(distributed)
    assert distributed.element_spec == PerReplicaSpec((None, 2), np.dtype("float32")) and once.num_passes == 1
    for empty in ([], pipeline[:0]):
        with pytest.raises(ValueError, match="is empty"):
            _ = strategy3.distribute_dataset(empty).element_spec


def test_rows_in_memory_are_taken_mapped_and_repeated_as_in_tf_data() -> None:
    rows = NumpyDataset(np.arange(7))

    def batches(dataset: NumpyDataset, most: int = 99) -> list[Any]:
        return [batch.tolist() for batch in itertools.islice(dataset, most)]

    assert batches(rows.take(3).batch(2)) == [[0, 1], [2]] == batches(rows.take(5).take(3).batch(2).take(9))
    assert batches(rows.batch(3).take(2)) == [[0, 1, 2], [3, 4, 5]]
    assert batches(rows.batch(3).take(2).repeat(2)) == [[0, 1, 2], [3, 4, 5]] * 2
    assert batches(rows.batch(3).repeat(2).take(4)) == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]
    assert batches(rows.batch(3).take(2).repeat().take(3)) == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert batches(rows.batch(5).repeat(), 5) == [[0, 1, 2, 3, 4], [5, 6]] * 2 + [[0, 1, 2, 3, 4]]
    assert batches(rows.batch(5, drop_remainder=True).repeat(), 3) == [[0, 1, 2, 3, 4]] * 3
    assert batches(rows.batch(7, drop_remainder=True)) == batches(rows.batch(np.int64(9))) == [list(range(7))]
    assert batches(rows.batch(9, drop_remainder=True).repeat()) == batches(rows.batch(2).take(0).repeat()) == []
    assert batches(rows.map(lambda row: row * 10).batch(3).map(lambda x: x + len(x))) == [[3, 13, 23], [33, 43, 53], [61]]
    pairs = NumpyDataset((np.arange(4), np.arange(8.0).reshape(4, 2))).map(lambda x, y: {"z": y + x, "x": x}).batch(3)
    assert [batch["z"].shape for batch in pairs] == [(3, 2), (1, 2)] and len(pairs) == 2
    for dataset in (rows.batch(3).take(2).repeat(2), rows.batch(3).repeat(2).take(4), rows.batch(3).take(2).repeat().take(3),
                    rows.take(0).batch(2), rows.batch(3).take(0).repeat(3), rows.batch(5, drop_remainder=True),
                    rows.batch(9, drop_remainder=True), rows.batch(9), NumpyDataset(np.zeros((0, 3))).batch(4)):  # fmt: skip
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

    def read(limits: Any, **more: Any) -> tuple[list[list[int]], Any]:
        run = run_workers(dataset, 2, 2, policy, limits=limits, **more)
        return [batch.tolist() for batch in run.global_batches()], list(zip(*run.steps, strict=True))

    one_pass, _ = read([])
    assert len(one_pass) > 2
    for limits in ([("repeat", 2)], [("take", 2), ("repeat", 3)], [("repeat", None), ("take", 7)]):
        wanted, steps = read(limits)
        assert wanted == list(expected(one_pass, limits))
        for at, step in enumerate(steps, 1):
            assert step[0].extra["places"] == step[1].extra["places"]
            assert read(limits, positions=[(one.position, one.extra) for one in step])[0] == wanted[at:], (limits, at)
