"""Writing some rows: the same numbers as NumPy on any number of replicas, and the rules of `assign` for who may write what."""

import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

START = np.arange(12, dtype=np.float32).reshape(6, 2) + 1
ROWS, UPDATES = np.array([4, 1, 4]), np.array([[2, 3], [4, 5], [6, 7]], np.float32)
#: What NumPy does, with an index that is there twice.
NUMPY = {
    "scatter_add": np.add.at,
    "scatter_sub": np.subtract.at,
    "scatter_mul": np.multiply.at,
    "scatter_div": np.divide.at,
    "scatter_min": np.minimum.at,
    "scatter_max": np.maximum.at,
    "scatter_update": lambda array, rows, updates: array.__setitem__(rows, updates),
}


def expected(method, rows=ROWS, updates=UPDATES, start=START):
    array = start.copy()
    NUMPY[method](array, rows, updates)
    return array


def rows_of(method):
    """One row twice, except where it would not be said which update stays."""
    return (np.array([4, 1, -1]), UPDATES) if method == "scatter_update" else (ROWS, UPDATES)


def make(strategy, start=START, **options):
    with strategy.scope():
        return mr.Variable(start, name="table", **options)


def test_rows_are_written_as_by_numpy_anywhere(strategy3: mr.MirroredStrategy) -> None:
    few = ("scatter_add", "scatter_update")
    inside, traced, compiled, outside = ({method: make(strategy3) for method in of} for of in (NUMPY, few, few, few))
    given = {method: rows_of(method)[0] for method in few}

    def step(rows):
        for method, variable in inside.items():
            getattr(variable, method)(*rows_of(method))
        write(traced, rows)
        return inside["scatter_add"].read_value()

    def write(variables, rows):
        for method, variable in variables.items():
            assert getattr(variable, method)(rows[method], UPDATES) is variable

    read = strategy3.run(step, args=(given,))
    mr.function(lambda rows: write(compiled, rows))(given)
    write(outside, given)
    for variables in (inside, traced, compiled, outside):
        for method, variable in variables.items():
            np.testing.assert_allclose(variable.numpy(), expected(method, *rows_of(method)), rtol=1e-6, err_msg=method)
    np.testing.assert_array_equal(read, outside["scatter_add"].read_value())
    strategy3.assert_mirrored()


def test_rows_that_differ_by_replica_need_an_aggregation(strategy3: mr.MirroredStrategy) -> None:
    plain, total, mean, first, own = (
        make(strategy3, np.zeros((3, 2), np.float32), **options)
        for options in (
            {}, {"aggregation": "sum"}, {"aggregation": "mean"}, {"aggregation": "only_first_replica"},
            {"synchronization": "on_read", "aggregation": "sum"},
        )
    )  # fmt: skip
    number = strategy3.distribute_values_from_function(lambda ctx: np.array([ctx.replica_id_in_sync_group]))
    for method in ("scatter_add", "scatter_max"):
        with pytest.raises(mr.ReplicasDivergeError, match=r"'table' is mirrored, .* at .*test_scatter\.py:\d+ may differ"):
            strategy3.run(lambda n, method=method: getattr(plain, method)(n, 1.0), args=(number,))

    def step(n):
        for variable in (total, mean, first, own):
            variable.scatter_add(n, 10.0)
            variable.scatter_sub(n, jnp.ones((1, 2)) + n)
        first.scatter_max(n, 50.0)
        own.scatter_max(n, 0.0)
        gathered = mr.get_replica_context().all_gather(n, 0)
        plain.scatter_update(gathered, gathered[:, None] + 1.0)

    strategy3.run(step, args=(number,))
    each = np.float32([[9, 9], [8, 8], [7, 7]])
    np.testing.assert_allclose(total.numpy(), each)
    np.testing.assert_allclose(mean.numpy(), each / 3, rtol=1e-6)
    np.testing.assert_array_equal(first.numpy(), [[50, 50], [0, 0], [0, 0]])
    np.testing.assert_allclose(own.numpy(), each)
    np.testing.assert_array_equal(plain.numpy(), [[1, 1], [2, 2], [3, 3]])
    own.scatter_add([0], 1.0)
    own.scatter_update([2], 7.5)
    np.testing.assert_allclose(own.numpy()[-1], [7.5, 7.5])
    np.testing.assert_allclose(own.numpy()[0], [10.0, 10.0])
    strategy3.assert_mirrored()


def test_uneven_rows_are_counted_as_on_one_device(strategy3: mr.MirroredStrategy) -> None:
    seen = make(strategy3, np.zeros(5, np.int32), aggregation="sum")
    for batch in strategy3.distribute_dataset([np.array([1, 3, 3, 4, 1, 1, 0], np.int32), np.array([2], np.int32)]):
        strategy3.run(lambda classes: seen.scatter_add(classes, 1), args=(batch,))
    np.testing.assert_array_equal(seen.numpy(), [1, 3, 1, 2, 1])


def test_what_does_not_fit_is_refused_and_changes_nothing(strategy3: mr.MirroredStrategy) -> None:
    """Others are in test_bad_input.py."""
    plain, total, scalar = make(strategy3), make(strategy3, aggregation="sum"), make(strategy3, np.float32(1))
    everywhere = [
        (lambda: plain.scatter_add([6], 1.0), ValueError, r"indices go from 6 to 6; expected 0 to 5"),
        (lambda: plain.scatter_add([-7], 1.0), ValueError, r"indices go from -7 to -7"),
        (lambda: plain.scatter_add([0.5], 1.0), TypeError, r"dtype float64; expected integers"),
        (lambda: plain.scatter_add([True], 1.0), TypeError, r"dtype bool; expected integers"),
        (lambda: plain.scatter_add([0, 1], np.ones((3, 2))), ValueError, r"shape \(3, 2\) for .* \(2,\); expected \(2, 2\)"),
        (lambda: plain.scatter_add([0], jnp.ones((1, 2), complex)), TypeError, r"would lose information"),
        (lambda: scalar.scatter_add([0], 1.0), ValueError, r"'table': it is a scalar and has no rows"),
    ]
    gathers = r"aggregation SUM would also .* variable\.scatter_max\(ctx\.all_gather\("
    in_step = (lambda: total.scatter_max([0], 1.0), ValueError, gathers)
    for run, cases in ((lambda call: call(), everywhere), (strategy3.run, [*everywhere, in_step])):
        for call, kind, message in cases:
            with pytest.raises(kind, match=message):
                run(call)
    for variable in (plain, total):
        np.testing.assert_array_equal(variable.numpy(), START)
    total.scatter_max([0], 100.0)  # outside there is one value
    np.testing.assert_array_equal(total.numpy()[0], [100, 100])
    assert plain.scatter_add([], np.zeros((0, 2))) is plain
    strategy3.run(lambda rows: plain.scatter_update(rows, 0.0), args=(np.array([6, 100]),))
    np.testing.assert_array_equal(plain.numpy(), START, err_msg="an index outside that only the devices know writes nothing")
