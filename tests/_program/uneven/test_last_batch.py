"""A new step is traced for the last batch of its dataset at once, where replicas have different numbers of rows in it."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import variable

import mirrored as mr
from mirrored import testing

pytestmark = pytest.mark.usefixtures("in_numpy")

X = np.arange(20, dtype=np.float32).reshape(10, 2)


def batches(strategy, size=4, **options):
    return strategy.distribute_dataset(strategy.make_numpy_dataset(X).batch(size), mr.InputOptions(**options))


def rows_joined(x):
    """It takes equal rows only."""
    return mr.get_replica_context().all_reduce("sum", x)


def counted(function):
    """Count how often a step is traced."""

    def step(x):
        step.num_traces += 1
        return function(x)

    step.num_traces = 0
    return step


def mean_of(x):
    return mr.get_replica_context().all_reduce("mean", x.mean())


NOTE = r"Nothing has run yet: this is about the last batch of the dataset, of \d+ rows.*dataset\.take\(steps\)"


def note_of(error):
    return " ".join(error.value.__notes__)


def test_a_step_is_refused_for_the_last_batch_before_it_runs_for_the_first(strategy3):
    count = variable(0, strategy3)

    def step(x):
        count.assign_add(1)
        return rows_joined(x)

    first = next(iter(batches(strategy3, 6)))
    for _ in range(2):  # it stays refused
        with pytest.raises(mr.UnevenReplicasError, match="do not reach the same collectives") as error:
            strategy3.run(step, args=(first,))
        assert len(error.value.__notes__) == 1 and int(count) == 0
    error.match(NOTE)


def test_nothing_is_traced_twice_and_the_last_batch_compiles_when_it_comes(strategy3):
    step = counted(mean_of)
    dataset = batches(strategy3, 6)
    for _ in range(2):
        for batch, rows in zip(dataset, (X[:6], X[6:]), strict=True):
            assert float(strategy3.run(step, args=(batch,))) == rows.mean()
            assert step.num_traces == 1 + 2  # of the even batch, and of both kinds of replicas


@pytest.mark.by_xla
def test_several_programs_of_one_function_and_functions_of_several_steps(strategy3):
    step = counted(mean_of)

    @mr.function
    def whole(x, flag):
        return strategy3.run(step, args=(x,)) + flag

    for flag in (True, False):
        for batch, rows in zip(batches(strategy3, 6), (X[:6], X[6:]), strict=True):
            assert float(whole(batch, flag)) == rows.mean() + flag
    first = next(iter(strategy3.distribute_dataset(strategy3.make_numpy_dataset(np.concatenate([X, X[:3]])).batch(9))))
    with testing.count_programs() as programs:  # that of its last batch, also of four rows, is there
        assert float(whole(first, True)) == X[:9].mean() + 1
        assert float(whole(next(reversed(list(batches(strategy3, 6)))), True)) == X[6:].mean() + 1
    assert programs.count == 1
    with pytest.raises(mr.UnevenReplicasError) as error:
        mr.function(lambda x: strategy3.run(rows_joined, args=(x,)))(next(iter(batches(strategy3, 6))))
    assert "Nothing has run yet" in note_of(error)


NO_ODD_BATCH = {
    "rows are dropped": lambda s: batches(s, 6, drop_remainder=True),
    "the dataset drops them": lambda s: s.distribute_dataset(s.make_numpy_dataset(X).batch(6, drop_remainder=True)),
    "the loop ends before": lambda s: batches(s, 6).take(1),
    "a map makes others": lambda s: batches(s, 6).map(lambda x: np.concatenate([x, x, x])),
    "a map pads": lambda s: batches(s, 6).map(padded),
    "a list": lambda s: s.distribute_dataset([X[:6], X[:3]]),
    "nobody knows": lambda s: s.distribute_dataset(Again([X[:6], X[:3]])),
}


def padded(x):
    return np.resize(x, (6, *x.shape[1:]))


class Again:
    def __init__(self, parts):
        self.parts = parts

    def __iter__(self):
        return iter(self.parts)


@pytest.mark.parametrize("name", NO_ODD_BATCH)
def test_where_no_odd_batch_comes_nothing_is_traced_for_it(name, strategy3):
    for batch in NO_ODD_BATCH[name](strategy3):
        strategy3.run(rows_joined, args=(batch,))


ODD_BATCH = {
    "endless": lambda s: batches(s, 6).repeat(),
    "shuffled": lambda s: s.distribute_dataset(s.make_numpy_dataset(X).shuffle(seed=1).batch(6).repeat(2)),
    "a list": lambda s: s.distribute_dataset([X[:6], X[:4]]),
    "in a tuple": lambda s: s.distribute_dataset(s.make_numpy_dataset((X, X[:, 0])).batch(6)),
}


@pytest.mark.parametrize("name", ODD_BATCH)
def test_datasets_that_know_of_an_odd_batch_say_so(name, strategy3):
    """Which do, is in tests/data/test_sizes.py."""
    batch = next(iter(ODD_BATCH[name](strategy3)))
    with pytest.raises(mr.UnevenReplicasError) as error:
        strategy3.run(lambda tree: rows_joined(jax.tree.leaves(tree)[0]), args=(batch,))
    assert "of 4 rows" in note_of(error)


def test_values_with_rows_that_are_of_no_dataset_are_left_alone(strategy3):
    """Nobody knows how many rows they will have then."""
    batch = next(iter(batches(strategy3, 6)))
    other = strategy3.run(lambda x: x + 1, args=(batch,))
    assert strategy3.run(lambda x, y: rows_joined(x + y), args=(batch, other)).shape == (2, 2)
    scale = strategy3.distribute_values_from_function(lambda ctx: np.float32(ctx.replica_id_in_sync_group))
    with pytest.raises(mr.UnevenReplicasError):
        strategy3.run(lambda x, scale, w: rows_joined(x * scale @ w), args=(batch, scale, np.eye(2, dtype=np.float32)))


def test_a_replica_without_rows_is_named_first_with_the_line_to_write(strategy3):
    dataset = strategy3.distribute_dataset(strategy3.make_numpy_dataset(X[:8]).batch(6))
    message = r"-1, at .*test_last_batch\.py:\d+, and .*\. Write x\.reshape\(x\.shape\[0\], math\.prod\(x\.shape\[1:\]\)\)"
    with pytest.raises(ValueError, match=message) as error:
        strategy3.run(lambda x: jnp.sum(x.reshape(x.shape[0], -1)), args=(next(iter(dataset)),))
    first, second, *_ = error.value.__notes__
    assert first.startswith("Replica 2 has no rows of this batch: `x` has shape (0, 2) there.")
    assert "drop_remainder=True" in first
    assert second.startswith("Nothing has run yet: this is about the last batch of the dataset, of 2 rows")
    with pytest.raises(ValueError) as error:
        one = next(iter(strategy3.distribute_dataset([-X[1:2]])))
        strategy3.run(lambda x: jnp.max(x), args=(one,))
    note = error.value.__notes__[0]
    assert note.startswith("The replicas 1, 2 have no rows of this batch") and "write jnp.max(x, initial=-jnp.inf)" in note
    largest = strategy3.run(lambda x: jax.lax.pmax(jnp.max(x, initial=-jnp.inf), "replica"), args=(one,))
    assert float(largest) == -2.0, "which `initial=0` would make 0"


def test_a_step_that_knows_its_rows_only_keeps_no_dataset_alive(strategy3):
    dataset = batches(strategy3, 6)
    batch = next(iter(dataset))
    strategy3.run(mean_of, args=(batch,))
    gone = weakref.ref(dataset)
    del dataset
    gc.collect()
    assert gone() is None
