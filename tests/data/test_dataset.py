"""Input: global batches in, each replica's rows out; none lost, repeated or mispaired."""

import dataclasses
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import mirrored as mr
from mirrored.data import DistributedDataset, NumpyDataset
from mirrored.data._sharing import rows as _rows

few_examples = hypothesis.settings(deadline=None, max_examples=15, derandomize=True)


def numpy_dataset(arrays: Any) -> NumpyDataset:
    return mr.get_strategy().make_numpy_dataset(arrays)


def rows_of(distributed: DistributedDataset) -> list[Any]:
    """Each batch as one tree: the replicas' rows, joined in replica order."""
    return [jax.tree.map(joined, batch, is_leaf=is_per_replica) for batch in distributed]


def joined(value: mr.PerReplica) -> np.ndarray:
    return np.concatenate([np.asarray(row) for row in value.values])


def is_per_replica(value: Any) -> bool:
    return isinstance(value, mr.PerReplica)


# -- NumpyDataset


def test_batches_are_the_rows_in_order() -> None:
    for batch_size, drop_remainder, batches in [
        (2, False, [[0, 1], [2, 3], [4]]),
        (2, True, [[0, 1], [2, 3]]),
        (5, False, [[0, 1, 2, 3, 4]]),
        (5, True, [[0, 1, 2, 3, 4]]),
        (7, False, [[0, 1, 2, 3, 4]]),
        (7, True, []),
        (np.int64(3), False, [[0, 1, 2], [3, 4]]),
    ]:
        dataset = numpy_dataset(np.arange(5)).batch(batch_size, drop_remainder)
        for _ in range(2):
            assert [batch.tolist() for batch in dataset] == batches
        assert len(dataset) == len(batches)
    dataset = numpy_dataset(np.zeros((0, 3))).batch(4)
    assert (len(dataset), list(dataset)) == (0, [])


def test_a_nest_keeps_its_structure_and_its_pairs() -> None:
    dataset = numpy_dataset({"x": np.arange(6).reshape(3, 2), "y": (np.arange(3), [10, 11, 12])}).batch(2)
    first, last = dataset
    np.testing.assert_array_equal(first["x"], [[0, 1], [2, 3]])
    np.testing.assert_array_equal(last["y"][0], [2])
    np.testing.assert_array_equal(last["y"][1], [12])


def test_shuffled_rows_stay_together() -> None:
    rows = np.arange(50)
    for x, y in numpy_dataset((rows, rows * 10)).shuffle(seed=3).batch(7):
        np.testing.assert_array_equal(y, x * 10)


def passes(dataset: NumpyDataset, count: int) -> list[list[int]]:
    return [np.concatenate(list(dataset)).tolist() for _ in range(count)]


def test_each_pass_has_another_order_and_each_run_the_same() -> None:
    first = passes(numpy_dataset(np.arange(20)).shuffle(seed=1).batch(6), 3)
    assert passes(numpy_dataset(np.arange(20)).shuffle(seed=1).batch(6), 3) == first
    assert passes(numpy_dataset(np.arange(20)).batch(6).shuffle(seed=1), 3) == first
    assert len({tuple(order) for order in first}) == 3
    assert all(sorted(order) == list(range(20)) for order in first)
    assert passes(numpy_dataset(np.arange(20)).shuffle(seed=2).batch(6), 3) != first
    repeated = passes(numpy_dataset(np.arange(20)).shuffle(seed=1).repeat(2).batch(6), 2)
    assert repeated[0] == first[0] + first[1] and repeated[1][:20] == first[2], "epochs are the passes of a loop"
    shuffled = numpy_dataset(np.arange(20)).shuffle(seed=1)  # what is made from it counts its own passes
    for made in (shuffled.batch(6), shuffled.batch(10), shuffled.batch(6).repeat(1)):
        assert passes(made, 2) == first[:2]


def test_repeated_rows_do_not_mix_epochs() -> None:
    for seed in (None, 0):
        dataset = numpy_dataset(np.arange(5)).repeat(2).batch(3).repeat(2)
        dataset = dataset if seed is None else dataset.shuffle(seed=seed)
        batches = list(dataset)
        assert len(dataset) == len(batches) == 8
        for epoch in zip(batches[::2], batches[1::2], strict=True):
            assert sorted(np.concatenate(epoch).tolist()) == list(range(5))


def test_methods_make_new_datasets() -> None:
    rows = numpy_dataset(np.arange(4))
    rows.batch(2), rows.shuffle(seed=1), rows.repeat(3)
    assert (rows.batch_size, rows.shuffle_seed, rows.num_epochs) == (None, None, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows.batch_size = 2


def test_batches_are_no_windows_on_the_arrays() -> None:
    source = np.arange(4)
    for batch in numpy_dataset(source).batch(2):
        batch[:] = -1
    np.testing.assert_array_equal(source, np.arange(4))


WRONG_ROWS = [
    (None, TypeError, r"the dataset None holds no array; expected a nest of numpy arrays"),
    ({}, TypeError, r"the dataset {} holds no array"),
    (3, ValueError, r"the array is a scalar; expected an array whose first axis counts rows"),
    ((np.ones(2), np.float32(1)), ValueError, r"\[1\] is a scalar"),
    (np.array(["a", "b"]), TypeError, r"the array has dtype <U1, which no device can hold"),
    ({"x": ["a", "b"]}, TypeError, r"\['x'\] has dtype <U1"),
    (np.array([None, 1]), TypeError, r"has dtype object"),
    (np.zeros(2, "M8[s]"), TypeError, r"has dtype datetime64\[s\]"),
    (np.zeros(2, [("a", int)]), TypeError, r"has dtype \[\('a', '<i8'\)\]"),
    ((np.ones(2), np.ones(3)), ValueError, r"different numbers of rows \(\[0\]: 2, \[1\]: 3\)"),
    ({"x": np.ma.array([1, 2], mask=[0, 1])}, TypeError, r"\['x'\] is a masked array, .* Write array\.filled\(value\)"),
    ([np.ones(2), np.ones(3)], ValueError, r"numpy_input is a list whose elements have different shapes, .*: \(x, y\)"),
    ({"x": [[1, 2], [3]]}, ValueError, r"\['x'\] is a list whose elements have different shapes"),
]
WRONG_ARGUMENTS = [
    ("batch", (2.0,), TypeError, r"batch_size is 2\.0; expected an int"),
    ("batch", (True,), TypeError, r"batch_size is True; expected an int"),
    ("batch", ("2",), TypeError, r"batch_size is '2'"),
    ("batch", (None,), TypeError, r"batch_size is None"),
    ("batch", (0,), ValueError, r"batch_size is 0; expected at least 1"),
    ("batch", (2, "no"), TypeError, r"drop_remainder is 'no'; expected True or False"),
    ("batch", (2, 1), TypeError, r"drop_remainder is 1; expected True or False"),
    ("shuffle", {"seed": 1.5}, TypeError, r"seed is 1\.5; expected an int, so that a run can be repeated"),
    ("shuffle", {"seed": None}, TypeError, r"seed=None; expected a seed by its name, and no more: \.shuffle\(seed=0\)"),
    ("shuffle", (1000,), TypeError, r"buffer_size=1000, seed=None; expected .*: \.shuffle\(seed=0\)"),
    ("shuffle", (1000, 3), TypeError, r"positional arguments"),
    ("shuffle", {"seed": -1}, ValueError, r"seed is -1; expected at least 0"),
    ("repeat", (1.5,), TypeError, r"num_epochs is 1\.5; expected an int"),
    ("take", ("2",), TypeError, r"count is '2'; expected an int"),
    ("take", (-1,), ValueError, r"count is -1; expected at least 0"),
    ("map", (None,), TypeError, r"map got None; expected a function of a batch"),
    ("repeat", (0,), ValueError, r"num_epochs is 0; expected at least 1"),
]


def test_wrong_rows_and_wrong_arguments_of_a_dataset() -> None:
    for arrays, error, message in WRONG_ROWS:
        with pytest.raises(error, match=message):
            numpy_dataset(arrays)
    dataset = numpy_dataset(np.arange(4))
    for method, arguments, error, message in WRONG_ARGUMENTS:
        with pytest.raises(error, match=message):
            getattr(dataset, method)(**arguments) if isinstance(arguments, dict) else getattr(dataset, method)(*arguments)
    assert [batch.tolist() for batch in dataset.batch(4)] == [[0, 1, 2, 3]]
    for wrong, message in (
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"shuffle_seed": -1}, "seed is -1"),
    ):
        with pytest.raises(ValueError, match=message):  # made directly
            NumpyDataset(np.arange(4), **wrong)


def test_rows_are_no_batches() -> None:
    rows = numpy_dataset(np.arange(4))
    for use in (len, lambda dataset: next(iter(dataset)), mr.get_strategy().distribute_dataset):
        with pytest.raises(ValueError, match=r"the dataset has rows, not batches\. .*\.batch\(global_batch_size\)"):
            use(rows)
    with pytest.raises(ValueError, match="the dataset is batched already, by 2; call batch once"):
        rows.batch(2).batch(2)


# -- the split rule


def test_split_sizes() -> None:
    for num_rows, num_replicas in itertools.product(range(0, 60), range(1, 21)):
        sizes = _rows.split_sizes(num_rows, num_replicas)
        assert len(sizes) == num_replicas and sum(sizes) == num_rows and max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True)


@few_examples
@hypothesis.given(
    num_rows=st.integers(0, 30),
    num_replicas=st.integers(1, 8),
    shape=st.lists(st.integers(0, 3), max_size=2),
    extra=st.integers(0, 2),
)
def test_stacked_rows_are_the_batch_cut_in_order(num_rows: int, num_replicas: int, shape: list[int], extra: int) -> None:
    batch = {"x": np.random.default_rng(0).integers(1, 99, (num_rows, *shape))}
    sizes = _rows.split_sizes(num_rows, num_replicas)
    longest = max(sizes) + extra
    stacked = _rows.stack_rows(_rows.split_rows(batch, sizes), longest)["x"]
    assert stacked.shape == (num_replicas, longest, *shape)
    np.testing.assert_array_equal(np.concatenate([row[:size] for row, size in zip(stacked, sizes, strict=True)]), batch["x"])
    assert not any(row[size:].any() for row, size in zip(stacked, sizes, strict=True))
    if len(set(sizes)) == 1 and not extra:
        np.testing.assert_array_equal(_rows.reshape_rows(batch, 0, num_replicas, longest)["x"], stacked)


SIZES = {count: mr.MirroredStrategy([f"cpu:{i}" for i in range(count)]) for count in (1, 3, 8)}


@few_examples
@hypothesis.given(
    count=st.sampled_from(sorted(SIZES)),
    num_rows=st.lists(st.integers(0, 9), max_size=4),
    prefetch=st.integers(0, 3),
    drop_remainder=st.booleans(),
)
def test_the_rows_of_the_replicas_in_order_are_the_batch(
    count: int, num_rows: list[int], prefetch: int, drop_remainder: bool
) -> None:
    numbers = itertools.count()
    batches = [np.array([next(numbers) for _ in range(size)], "int32") for size in num_rows]
    distributed = SIZES[count].distribute_dataset(
        [(batch, {"y": np.stack([batch, batch], axis=1)}) for batch in batches],
        mr.InputOptions(prefetch=prefetch, drop_remainder=drop_remainder),
    )
    kept = [batch[: len(batch) // count * count] if drop_remainder else batch for batch in batches]
    for _ in range(2):
        for batch, (x, by_key) in zip([batch for batch in kept if len(batch)], distributed, strict=True):
            sizes = _rows.split_sizes(len(batch), count)
            assert [len(value) for value in x.values] == sizes
            assert x.shapes == tuple((size,) for size in sizes)
            assert by_key["y"].shapes == tuple((size, 2) for size in sizes)
            assert x._array.shape == (count, max(sizes))
            np.testing.assert_array_equal(joined(x), batch)
            np.testing.assert_array_equal(joined(by_key["y"]), np.stack([batch, batch], axis=1))


def test_each_replicas_rows_are_on_its_device(strategy3: mr.MirroredStrategy) -> None:
    [batch] = strategy3.distribute_dataset([np.arange(6, dtype="float32").reshape(6, 1)])
    assert batch.shape == (2, 1)
    assert [next(iter(value.devices())) for value in batch.values] == list(strategy3.devices)
    total = strategy3.run(lambda x: mr.get_replica_context().all_reduce("sum", x.sum()), args=(batch,))
    assert float(total) == sum(range(6))


# -- uneven batches


@pytest.mark.parametrize("source", ["numpy", "list"])
def test_every_row_of_an_uneven_batch_arrives(source: str, strategy3: mr.MirroredStrategy) -> None:
    rows = {"x": np.arange(1, 14, dtype="float32"), "y": np.arange(26, dtype="int32").reshape(13, 2)}
    numpy = strategy3.make_numpy_dataset(rows).batch(6)
    distributed = strategy3.distribute_dataset(numpy if source == "numpy" else list(numpy))
    assert len(distributed) == 3
    for batch, expected in zip(distributed, numpy, strict=True):
        sizes = _rows.split_sizes(len(expected["x"]), 3)
        assert [len(value) for value in batch["x"].values] == [len(value) for value in batch["y"].values] == sizes
        assert (batch["x"]._shapes is None) == (len(set(sizes)) == 1)
        padding = sum(max(sizes) - size for size in sizes)
        assert np.count_nonzero(np.asarray(batch["x"]._array) == 0) == padding, "padding is zeros"
        assert float(strategy3.reduce("mean", batch["x"], axis=0)) == pytest.approx(expected["x"].mean())
        np.testing.assert_array_equal(strategy3.gather(batch["y"], axis=0), expected["y"])


def test_batches_without_rows_are_skipped(strategy2: mr.MirroredStrategy) -> None:
    empty = np.zeros((0, 3), "float32")
    full = np.ones((3, 3), "float32")
    [batch] = strategy2.distribute_dataset([empty, full, empty])
    np.testing.assert_array_equal(joined(batch), full)


def test_drop_remainder_leaves_out_the_last_rows_of_a_batch(strategy3: mr.MirroredStrategy, caplog) -> None:
    caplog.set_level("INFO", logger="mirrored")
    for num_rows, batch_size, kept in [(13, 6, [6, 6]), (14, 7, [6, 6]), (16, 6, [6, 6, 3]), (5, 2, []), (6, 6, [6])]:
        caplog.clear()
        source = strategy3.make_numpy_dataset(np.arange(num_rows)).batch(batch_size)
        distributed = strategy3.distribute_dataset(source, mr.InputOptions(drop_remainder=True))
        for _ in range(2):
            rows = rows_of(distributed)
            expected = [batch[: len(batch) // 3 * 3] for batch in source]
            assert [len(row) for row in rows] == kept
            for row, batch in zip(rows, [batch for batch in expected if len(batch)], strict=True):
                np.testing.assert_array_equal(row, batch)
        assert len(distributed) == len(kept)
        assert caplog.text.count("dropping") == (0 if sum(kept) == num_rows else 1)


# -- sources


class Batches:
    """A class whose `__iter__` starts anew."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.num_taken = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.num_taken += 1
            yield batch


class Tensor:
    """As numpy sees a tensor of another library."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.array if dtype is None else self.array.astype(dtype)


class Loader:
    """As torch's DataLoader: sized, re-iterable, yields lists of tensors."""

    def __init__(self, num_rows: int, batch_size: int) -> None:
        self.num_rows, self.batch_size = num_rows, batch_size

    def __len__(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[list[Tensor]]:
        for start in range(0, self.num_rows, self.batch_size):
            rows = np.arange(start, min(start + self.batch_size, self.num_rows))
            yield [Tensor(rows), Tensor(rows * 10)]


class Indexed:
    """The old protocol of sequences: no `__iter__`."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> np.ndarray:
        if index >= 2:
            raise IndexError
        return np.full(2, index)


class Sliced:
    """As people write it, and as Keras has it: behind the last batch are others without rows, and no IndexError."""

    rows = np.arange(10)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> np.ndarray:
        assert index < 5, "nobody would stop to ask"
        return self.rows[4 * index : 4 * (index + 1)]


@dataclasses.dataclass
class Fields:
    image: Any
    label: Any


jax.tree_util.register_dataclass(Fields, ["image", "label"], [])

X = np.arange(4, dtype="int32")


def test_anything_that_can_be_iterated_again(strategy2: mr.MirroredStrategy) -> None:
    for source, length in [
        ([X, X], 2),
        (([X], [X]), 2),
        (({"x": X}, {"x": X}), 2),
        ([{"x": X, "y": (X, [X])}], 1),
        ([Fields(X, X)], 1),
        ([jnp.arange(4)], 1),
        ([{"x": X, "nothing": None}], 1),
        ([Tensor(X)], 1),
        (Batches([X, X]), None),
        (Loader(8, 4), 2),
        (Indexed(), 2),
        ({"a": X}.values(), 1),
        ([], 0),
    ]:
        distributed = strategy2.distribute_dataset(source)
        first, again = rows_of(distributed), rows_of(distributed)
        expected = [jax.tree.map(np.asarray, batch, is_leaf=lambda leaf: isinstance(leaf, Tensor)) for batch in source]
        assert jax.tree.structure(first) == jax.tree.structure(expected)
        for rows in (first, again):
            for row, batch in zip(jax.tree.leaves(rows), jax.tree.leaves(expected), strict=True):
                np.testing.assert_array_equal(row, batch)
        if length is None:
            with pytest.raises(TypeError, match="the length of Batches is not known before it ends"):
                len(distributed)
        else:
            assert len(distributed) == length


def test_batches_by_number_end_at_their_length_and_have_a_position(strategy2: mr.MirroredStrategy) -> None:
    distributed = strategy2.distribute_dataset(Sliced())
    assert distributed.element_spec.shape == (None,)
    assert [joined(x).tolist() for x in distributed.repeat(2)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 2
    with iter(distributed) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(distributed) as resumed:
        resumed.set_state(state)
        assert [joined(x).tolist() for x in resumed] == [[4, 5, 6, 7], [8, 9]]


def test_what_can_be_gone_through_only_once_is_said(strategy2: mr.MirroredStrategy, caplog: pytest.LogCaptureFixture) -> None:
    """An iterator that hides in an object, such as an open file, is found at the second pass."""

    class Once:
        def __init__(self) -> None:
            self.batches = iter([X, X])

        def __iter__(self) -> Iterator[np.ndarray]:
            return self.batches

    for passes, num_warned in ((lambda ds: [len(list(ds)) for _ in range(2)], 1), (lambda ds: [len(list(ds.repeat(3))), 0], 1)):
        caplog.clear()
        assert passes(strategy2.distribute_dataset(Once())) == [2, 0]
        assert caplog.text.count("Once gave no batch in this pass, and gave some in an earlier one") == num_warned
    caplog.clear()
    distributed = strategy2.distribute_dataset([X, X])
    with iter(distributed) as iterator:
        states = [iterator.get_state() for _ in iterator]
        iterator.set_state(states[-1])  # the end, of which nothing is to be said
        assert list(iterator) == [] == list(distributed.take(0)) == list(strategy2.distribute_dataset([]).repeat(2))
    assert not caplog.text


def test_no_batch_is_taken_inside_a_function_that_is_traced(strategy2: mr.MirroredStrategy) -> None:
    """As in a `tf.function`: it would be traced with one batch, and use that in each call."""
    iterator = iter(strategy2.distribute_dataset([X, X + 4, X + 8]))
    sums = mr.function(lambda batches: [strategy2.reduce("sum", x, axis=0) for x in batches])

    def body(total: Any, _: Any) -> Any:
        return total + strategy2.reduce("sum", next(iterator), axis=0), None

    for traced in (
        mr.function(lambda: strategy2.reduce("sum", next(iterator), axis=0)), jax.jit(lambda: next(iterator)),
        mr.function(lambda: [strategy2.reduce("sum", x, axis=0) for x in iterator]),
        lambda: strategy2.run(lambda: next(iterator)), mr.function(lambda: mr.scan(body, 0, jnp.arange(2))),
    ):  # fmt: skip
        with pytest.raises(mr.ContextError, match=r"read once, and be the same batch in each call\. Take it outside"):
            traced()
    assert [int(total) for total in sums([next(iterator), next(iterator)])] == [6, 22], "none was lost"
    assert [int(total) for total in sums(list(iterator))] == [38]
    with mr.eager():
        assert [joined(x).tolist() for x in strategy2.distribute_dataset([X])] == [[0, 1, 2, 3]]


def test_two_passes_at_the_same_time(strategy2: mr.MirroredStrategy) -> None:
    distributed = strategy2.distribute_dataset([X, X + 4, X + 8])
    pairs = [(joined(a).tolist(), joined(b).tolist()) for a, b in zip(distributed, distributed, strict=True)]
    assert pairs == [((X + k).tolist(), (X + k).tolist()) for k in (0, 4, 8)]


@pytest.mark.parametrize("num_rows", [8, 4096])  # a large array lies where the CPU's device can use it in place
def test_a_source_may_use_one_buffer_for_all_batches(num_rows: int, strategy2: mr.MirroredStrategy) -> None:
    class OneBuffer:
        def __iter__(self) -> Iterator[np.ndarray]:
            buffer = np.empty(num_rows, "float32")
            for number in range(5):
                buffer[:] = number
                yield buffer

    for prefetch in (0, 2):
        distributed = strategy2.distribute_dataset(OneBuffer(), mr.InputOptions(prefetch=prefetch))
        assert [np.unique(row).tolist() for row in rows_of(distributed)] == [[0], [1], [2], [3], [4]]
    for make in (lambda source: [source], lambda source: numpy_dataset(source).batch(num_rows)):
        source = np.zeros(num_rows, "float32")
        [batch] = strategy2.distribute_dataset(make(source))
        source[:] = 1
        assert not joined(batch).any(), "a batch on the devices is not the array on the host"


def test_dtypes_become_those_of_jax(strategy2: mr.MirroredStrategy) -> None:
    for given, held in [
        ("float64", "float32"), ("int64", "int32"), ("uint8", "uint8"), ("bool", "bool"), ("float16", "float16"),
        (ml_dtypes.bfloat16,) * 2, (">i2", "int16"), (">f8", "float32"), ("complex64", "complex64"),
    ]:  # fmt: skip
        rows = strategy2.make_numpy_dataset(np.ones(4, given)).batch(4)
        assert next(iter(rows)).dtype == given
        for source in ([np.ones(4, given)], rows):
            [batch] = strategy2.distribute_dataset(source)
            assert batch.dtype == held
            np.testing.assert_array_equal(joined(batch), np.ones(4))


# -- ahead of the step


def test_nothing_is_taken_before_the_first_batch_is_asked_for(strategy2: mr.MirroredStrategy) -> None:
    source = Batches([X])
    iter(strategy2.distribute_dataset(source))
    assert source.num_taken == 0


def test_batches_that_were_used_are_not_kept(strategy2: mr.MirroredStrategy) -> None:
    iterator = iter(strategy2.distribute_dataset([X] * 6))
    used = weakref.ref(next(iterator))
    next(iterator)
    gc.collect()
    assert used() is None


# -- errors of a source


WRONG_BATCHES = [
    (3, ValueError, r"the dataset yielded a scalar; expected global batches, .* \.batch\(global_batch_size\)"),
    ([1, 2], ValueError, r"yielded a scalar at \[0\]"),
    ({"x": X, "y": np.float32(1)}, ValueError, r"yielded a scalar at \['y'\]"),
    (None, TypeError, r"the dataset yielded None, which holds no array"),
    ({}, TypeError, r"the dataset yielded {}, which holds no array"),
    ((X, X[:2]), ValueError, r"the arrays of one batch have different numbers of rows \(\[0\]: 4, \[1\]: 2\)"),
    (["a", "b"], TypeError, r"yielded str of dtype <U1 at \[0\], which no device can hold\. Encode it as numbers"),
    (np.array(["a", "b"]), TypeError, r"yielded ndarray of dtype <U1, which"),
    (b"record", TypeError, r"yielded bytes of dtype \|S6, which .* Parse records of files in batches: dataset\.batch\(n\)"),
    ([b"a", b"bc"], TypeError, r"mr\.data\.parse_example\(records, spec\)"),
    (np.array([None, 1]), TypeError, r"yielded ndarray of dtype object"),
    ({"when": np.zeros(2, "M8[s]")}, TypeError, r"dtype datetime64\[s\] at \['when'\]"),
    (np.zeros(2, [("a", int)]), TypeError, r"which no device can hold"),
    ({"x": np.zeros(2, np.longdouble)}, TypeError, r"dtype float\d+ at \['x'\], which no device can hold"),
    ((X, np.ma.array(X, mask=X > 1)), TypeError, r"a masked array at \[1\], and no device holds masks\. Write array\.filled"),
    ((X, object()), TypeError, r"yielded object of dtype object at \[1\]"),
    (np.array([0, 2**31]), ValueError, r"int64 values from 0 to 2147483648, and JAX holds them as int32, .*jax_enable_x64"),
    ({"id": np.array([0, 2**32], "uint64")}, ValueError, r"at \['id'\] uint64 values from 0 to 4294967296"),
]


def test_what_is_no_global_batch(strategy2: mr.MirroredStrategy) -> None:
    [distributed] = strategy2.distribute_dataset([{"x": X}])
    already = (distributed, TypeError, r"the dataset yielded a PerReplica at \['x'\], which is distributed already")
    for batch, error, message in [*WRONG_BATCHES, already]:
        iterator = iter(strategy2.distribute_dataset([X, batch]))
        np.testing.assert_array_equal(joined(next(iterator)), X)
        with pytest.raises(error, match=message):
            next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)


def test_what_is_no_dataset(strategy2: mr.MirroredStrategy) -> None:
    for dataset, message in [
        (iter([X]), r"got <list_iterator .*, an iterator that can be used only once; a second epoch would be empty"),
        ((x for x in [X]), r"<generator object .* Pass an object whose __iter__ starts anew"),
        (zip([X], [X], strict=True), r"got <zip object"),
        (3, r"got 3 of type int; expected an iterable of global batches, for example"),
        (None, r"got None of type NoneType"),
        (numpy_dataset, r"got <function"),
        ("train.tfrecord", r"got 'train\.tfrecord' of type str; expected an iterable of global batches, for example"),
        (b"train", r"got b'train'"),
        (X, r"got ndarray, one set of arrays; .*make_numpy_dataset\(arrays\)\.batch\(global_batch_size\)"),
        (jnp.arange(4), r"one set of arrays"),
        ((X, X), r"got tuple, one set of arrays"),
        ((X, {"label": X}), r"got tuple, one set of arrays"),
        ((), r"got tuple, one set of arrays"),
        ({"x": X}, r"got dict, one set of arrays"),
        ({}, r"got dict, one set of arrays"),
        (mr.get_strategy().distribute_dataset([X]), r"the dataset is distributed already; iterate over it"),
    ]:
        with pytest.raises(TypeError, match=message):
            strategy2.distribute_dataset(dataset)
    assert "dataset" not in strategy2.explain()


# -- what it says of itself


def test_a_distributed_dataset_describes_itself(strategy2: mr.MirroredStrategy) -> None:
    distributed = strategy2.distribute_dataset([X], mr.InputOptions(drop_remainder=True, prefetch=1))
    assert repr(distributed) == "DistributedDataset(list on 2 replicas)"
    line = (
        "list: each global batch is cut into 2 contiguous parts, in replica order; rows are dropped so that all replicas get "
        "the same number; 1 batches ahead"
    )
    assert distributed.describe() == line
    assert f"dataset {line}" in strategy2.explain()


def test_wrong_options() -> None:
    for name, value, error, message in [
        ("prefetch", -1, ValueError, r"prefetch is -1; expected 0 or more batches"),
        ("prefetch", 1.5, TypeError, r"prefetch is 1\.5; expected an int, the number of batches ahead"),
        ("prefetch", True, TypeError, r"prefetch is True"),
        ("prefetch", None, TypeError, r"prefetch is None"),
        ("drop_remainder", 1, TypeError, r"drop_remainder is 1; expected True or False"),
        ("drop_remainder", "no", TypeError, r"drop_remainder is 'no'"),
        ("auto_shard_policy", "files", ValueError, r"is 'files'; expected one of 'auto', 'file', 'data', 'off'"),
        ("auto_shard_policy", 1, TypeError, r"auto_shard_policy is 1; expected one of 'auto'"),
    ]:
        with pytest.raises(error, match=message):
            mr.InputOptions(**{name: value})


def test_options_are_frozen_and_named() -> None:
    assert mr.InputOptions() == mr.InputOptions(drop_remainder=False, prefetch=2, auto_shard_policy="auto")
    assert mr.InputOptions(auto_shard_policy="File").auto_shard_policy is mr.AutoShardPolicy.FILE
    with pytest.raises(TypeError, match="positional"):
        mr.InputOptions(True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        mr.InputOptions().prefetch = 3
    for wrong in (2, {"prefetch": 2}, "auto"):
        with pytest.raises(TypeError, match=r"expected mr\.InputOptions\(\.\.\.\)"):
            mr.get_strategy().distribute_dataset([X], wrong)
