"""Input: global batches in, each replica's rows out; none lost, repeated or mispaired."""

import dataclasses
import itertools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.sparse import BCOO
from pipelines import STRATEGIES, OneBuffer, Reiterable, Tensor, batches_of, resumed, rows_of

import mirrored as mr
from mirrored.data import NumpyDataset

pytestmark = pytest.mark.usefixtures("in_numpy")

few_examples = hypothesis.settings(deadline=None, max_examples=15, derandomize=True)
X = np.arange(4, dtype="int32")


def test_a_nest_keeps_its_structure_and_its_pairs(strategy2: mr.MirroredStrategy) -> None:
    dataset = strategy2.make_numpy_dataset({"x": np.arange(6).reshape(3, 2), "y": (np.arange(3), [10, 11, 12])})
    batches = [jax.tree.map(np.ndarray.tolist, batch) for batch in dataset.batch(2)]
    assert batches == [{"x": [[0, 1], [2, 3]], "y": ([0, 1], [10, 11])}, {"x": [[4, 5]], "y": ([2], [12])}]
    for batch in dataset.shuffle(seed=3).batch(2):
        np.testing.assert_array_equal(batch["y"][1], batch["x"][:, 0] // 2 + 10)
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.batch_size = 2
    assert (dataset.batch_size, dataset.shuffle_seed, dataset.num_epochs) == (None, None, 1), "methods make new datasets"


def test_each_pass_has_another_order_and_each_run_the_same() -> None:
    def passes(dataset: NumpyDataset, count: int) -> list[list[int]]:
        return [np.concatenate(list(iter(dataset))).tolist() for _ in range(count)]

    rows = NumpyDataset(np.arange(20))
    first = passes(rows.shuffle(seed=1).batch(6), 3)
    assert passes(rows.shuffle(seed=1).batch(6), 3) == passes(rows.batch(6).shuffle(seed=1), 3) == first
    assert len({tuple(order) for order in first}) == 3 and all(sorted(order) == list(range(20)) for order in first)
    assert passes(rows.shuffle(seed=2).batch(6), 3) != first
    repeated = passes(rows.shuffle(seed=1).repeat(2).batch(6), 2)
    assert repeated[0] == first[0] + first[1] and repeated[1][:20] == first[2], "epochs are the passes of a loop, unmixed"


@few_examples
@pytest.mark.filterwarnings("ignore:no step was made")
@hypothesis.given(
    count=st.sampled_from([1, 3]),
    num_rows=st.lists(st.integers(0, 9), max_size=4),
    prefetch=st.integers(0, 3),
    drop_remainder=st.booleans(),
)
def test_the_rows_of_the_replicas_in_order_are_the_batch(count, num_rows, prefetch, drop_remainder) -> None:
    numbers = itertools.count()
    batches = [np.array([next(numbers) for _ in range(size)], "int32") for size in num_rows]
    distributed = STRATEGIES[count].distribute_dataset(
        [(batch, {"y": np.stack([batch, batch], axis=1)}) for batch in batches],
        mr.InputOptions(prefetch=prefetch, drop_remainder=drop_remainder),
    )
    kept = [batch[: len(batch) // count * count] if drop_remainder else batch for batch in batches]
    assert len(distributed) == sum(len(batch) > 0 for batch in kept)
    for _ in range(2):
        for batch, (x, by_key) in zip([batch for batch in kept if len(batch)], distributed, strict=True):
            sizes = [len(part) for part in np.array_split(batch, count)]
            assert [len(value) for value in x.values] == sizes and x.shapes == tuple((size,) for size in sizes)
            assert by_key["y"].shapes == tuple((size, 2) for size in sizes) and x._array.shape == (count, max(sizes))
            assert rows_of((x, by_key["y"])) == (batch.tolist(), np.stack([batch, batch], axis=1).tolist())
            assert [next(iter(value.devices())) for value in x.values] == list(STRATEGIES[count].devices)
            assert (x._shapes is None) == (len(set(sizes)) == 1)
            padded = np.asarray(x._array)
            assert not any(row[size:].any() for row, size in zip(padded, sizes, strict=True)), "padding is zeros"


def test_a_pass_tells_how_many_rows_it_dropped(strategy3: mr.MirroredStrategy, caplog) -> None:
    caplog.set_level("INFO", logger="mirrored")
    assert batches_of(strategy3.distribute_dataset([np.arange(7)] * 2, mr.InputOptions(drop_remainder=True))) == [[*range(6)]] * 2
    assert caplog.text.count("dropping 1 of the 7 rows of a step") == 1


class Sliced:
    """As people write it, and as Keras has it: behind the last batch are others without rows, and no IndexError."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> np.ndarray:
        assert index < 5, "nobody would stop to ask"
        return np.arange(10)[4 * index : 4 * (index + 1)]


@dataclasses.dataclass
class Holder:
    image: Any


@dataclasses.dataclass
class Fields:
    image: Any
    label: Any


jax.tree_util.register_dataclass(Fields, ["image", "label"], [])


class Backwards(list[Any]):
    """Batches with a length and numbers, and an order of its own."""

    __iter__ = list.__reversed__


def test_anything_that_can_be_iterated_again(strategy2: mr.MirroredStrategy) -> None:
    for source, length in [
        ([X, X], 2), (([X], [X]), 2), (({"x": X}, {"x": X}), 2), ([{"x": X, "y": (X, [X])}], 1), ([Fields(X, X)], 1),
        ([jnp.arange(4)], 1), ([{"x": X, "nothing": None}], 1), ([Tensor(X)], 1), (Reiterable(lambda: iter([X, X])), None),
        ({"a": X}.values(), 1),
    ]:  # fmt: skip
        distributed = strategy2.distribute_dataset(source)
        is_tensor = lambda leaf: isinstance(leaf, Tensor)  # noqa: E731
        expected = [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch, is_leaf=is_tensor) for batch in source]
        assert batches_of(distributed) == expected == batches_of(distributed)
        if length is None:
            with pytest.raises(TypeError, match="the length of Reiterable is not known before it ends"):
                len(distributed)
        else:
            assert len(distributed) == length
    [batch] = strategy2.distribute_dataset([np.zeros((0, 3)), np.ones((3, 3)), np.zeros((0, 3))])
    assert rows_of(batch) == np.ones((3, 3)).tolist(), "batches without rows are skipped"
    assert batches_of(strategy2.distribute_dataset(Backwards([X, X + 1]))) == [(X + 1).tolist(), X.tolist()]


def test_batches_by_number_end_at_their_length_and_have_a_position(strategy2: mr.MirroredStrategy) -> None:
    distributed = strategy2.distribute_dataset(Sliced())
    assert distributed.element_spec.shape == (None,)
    one_pass = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches_of(distributed.repeat(2)) == one_pass * 2 and resumed(distributed, 1, distributed) == one_pass
    assert [rows_of(both) for both in zip(distributed, distributed, strict=True)] == [(rows, rows) for rows in one_pass]


def test_what_can_be_gone_through_only_once_is_said(strategy2: mr.MirroredStrategy) -> None:
    """An iterator that hides in an object, such as an open file, is found at the second pass."""
    for passes in (lambda ds: [len(list(ds)) for _ in range(2)], lambda ds: [len(list(ds.repeat(3))), 0]):
        hidden = iter([X, X])
        with pytest.warns(UserWarning, match="Reiterable gave no batch in this pass, and gave some in an earlier one") as said:
            assert passes(strategy2.distribute_dataset(Reiterable(lambda hidden=hidden: hidden))) == [2, 0]
        assert [warning.filename for warning in said] == [__file__]


def test_no_batch_is_taken_inside_a_function_that_is_traced(strategy2: mr.MirroredStrategy) -> None:
    """As in a `tf.function`: it would be traced with one batch, and use that in each call."""
    iterator = iter(strategy2.distribute_dataset([X, X + 4, X + 8]))
    sums = mr.function(lambda batches: [strategy2.reduce("sum", x, axis=0) for x in batches])

    def body(total: Any, _: Any) -> Any:
        return total + strategy2.reduce("sum", next(iterator), axis=0), None

    for traced in (
        jax.jit(lambda: next(iterator)), mr.function(lambda: [strategy2.reduce("sum", x, axis=0) for x in iterator]),
        lambda: strategy2.run(lambda: next(iterator)), mr.function(lambda: mr.scan(body, 0, jnp.arange(2))),
    ):  # fmt: skip
        with pytest.raises(mr.ContextError, match=r"read once, and be the same batch in each call\. Take it outside"):
            traced()
    assert [int(total) for total in sums([next(iterator), next(iterator)])] == [6, 22], "none was lost"
    assert [int(total) for total in sums(list(iterator))] == [38]
    with mr.eager():
        assert batches_of(strategy2.distribute_dataset([X])) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("num_rows", [8, 65_537])  # a large array lies where the CPU's device can use it in place
@pytest.mark.by_xla
def test_a_source_may_use_one_buffer_for_all_batches(num_rows: int, strategy2: mr.MirroredStrategy) -> None:
    for prefetch in (0, 2):
        distributed = strategy2.distribute_dataset(OneBuffer(5, num_rows, "float32"), mr.InputOptions(prefetch=prefetch))
        assert batches_of(distributed) == np.arange(5 * num_rows).reshape(5, num_rows).tolist()
    source = np.zeros(num_rows, "float32")
    [batch] = strategy2.distribute_dataset([source])
    source[:] = 1
    assert not any(rows_of(batch)), "a batch on the devices is not the array on the host"


def test_dtypes_become_those_of_jax(strategy2: mr.MirroredStrategy) -> None:
    for given, held in [
        ("float64", "float32"), ("int64", "int32"), ("uint8", "uint8"), ("bool", "bool"), ("float16", "float16"),
        (ml_dtypes.bfloat16,) * 2, (">i2", "int16"), (">f8", "float32"), ("complex64", "complex64"),
    ]:  # fmt: skip
        rows = NumpyDataset(np.ones(4, given)).batch(4)
        assert next(iter(rows)).dtype == given
        for source in ([np.ones(4, given)], rows):
            [batch] = strategy2.distribute_dataset(source)
            assert batch.dtype == held and rows_of(batch) == [1] * 4


WRONG_BATCHES = [
    ({"x": X, "y": np.float32(1)}, ValueError, r"yielded a scalar at \['y'\]"),
    (None, TypeError, r"the dataset yielded None, which holds no array"),
    ((X, X[:2]), ValueError, r"yielded arrays with different numbers of rows \(\[0\]: 4, \[1\]: 2\)"),
    (["a", "b"], TypeError, r"yielded str of dtype <U1 at \[0\], which no device can hold\. Encode it as numbers"),
    (b"record", TypeError, r"yielded bytes of dtype \|S6, which .* Parse records of files in batches: dataset\.batch\(n\)"),
    (Holder(X), TypeError, r"Holder of dtype object, .*\n.* write @jax\.tree_util\.register_dataclass above the class"),
    ({"x": np.zeros(2, np.longdouble)}, TypeError, r"dtype float\d+ at \['x'\], which no device can hold"),
    (
        {"x": BCOO((np.ones(6, np.float32), np.zeros((6, 2), np.int32)), shape=(6, 6))},
        TypeError,
        r"a BCOO at \['x'\], of which the stored values .*x\.todense\(\)",
    ),
    ((X, np.ma.array(X, mask=X > 1)), TypeError, r"at \[1\] a masked array, and no device holds masks\. Write array\.filled"),
    (np.array([0, 2**31]), ValueError, r"int64 values from 0 to 2147483648, and JAX holds them as int32, .*jax_enable_x64"),
    ({"id": np.array([0, 2**32], "uint64")}, ValueError, r"at \['id'\] uint64 values from 0 to 4294967296"),
]


def test_what_is_no_global_batch(strategy2: mr.MirroredStrategy) -> None:
    for batch, error, message in WRONG_BATCHES:
        iterator = iter(strategy2.distribute_dataset([X, batch]))
        assert rows_of(next(iterator)) == X.tolist()
        with pytest.raises(error, match=message):
            next(iterator)
        with pytest.raises(RuntimeError, match="the input failed before, with "):
            next(iterator)


def test_a_distributed_dataset_describes_itself(strategy2: mr.MirroredStrategy) -> None:
    with pytest.raises(TypeError):
        strategy2.distribute_dataset(X)
    assert "dataset" not in strategy2.explain(), "nothing of what was refused"
    distributed = strategy2.distribute_dataset([X], mr.InputOptions(drop_remainder=True, prefetch=1))
    assert repr(distributed) == "DistributedDataset(list on 2 replicas)"
    line = (
        "list: each global batch is cut into 2 contiguous parts, in replica order; rows are dropped so that all replicas get "
        "the same number; 1 batches ahead"
    )
    assert distributed.describe() == line
    assert f"dataset {line}" in strategy2.explain()
    rows = strategy2.make_numpy_dataset({"x": np.zeros((60_000, 28), "float32"), "y": np.zeros(60_000, "int32")})
    assert repr(rows) == "NumpyDataset(60000 rows of {'x': 'float32[28]', 'y': 'int32[]'})"
    more = "batches of 64, shuffled with the seed 3, 2 passes"
    assert repr(rows.shuffle(seed=3).batch(64).repeat(2)) == f"{repr(rows)[:-1]}, {more})"
