"""Every reduction, everywhere that values are reduced, compared with NumPy on all rows. A new one is a row of `OPS`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly
from strategies import all_reduce, ctx, number, strategy_of, values_of, variable

import mirrored as mr
from mirrored._options import NamedChoice, ReduceOp
from mirrored._replicas.reductions import REDUCTIONS, Reduction, psum

pytestmark = pytest.mark.usefixtures("in_numpy")

OPS = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}
SIZES = {1: [3], 2: [2, 1], 3: [2, 2, 0]}  # rows of each replica: even only with one, none on the last of three
ROWS = np.random.default_rng(0).normal(size=(4, 2, 3)).astype("float32") - 3  # negative: zeros in a pad would win


def test_the_table_has_every_reduction_and_every_aggregation_but_two() -> None:
    assert list(REDUCTIONS) == list(ReduceOp) == [ReduceOp.parse(name, "op") for name in OPS]
    assert {mode.name for mode in mr.VariableAggregation} - set(ReduceOp.__members__) == {"NONE", "ONLY_FIRST_REPLICA"}


@pytest.mark.parametrize("num_replicas", [*nightly(1, 2), 3])
@pytest.mark.parametrize("way", ["devices", "together, in a function", *nightly("one by one", "in a function")])
def test_each_reduction_is_that_of_all_rows(num_replicas: int, way: str) -> None:
    """Uneven batches, with and without axes, in a step, in merged code and outside; and even arrays over the replicas."""
    schedules = {"together, in a function": "together", "one by one": "one_by_one"}
    options = {"num_replicas": num_replicas, "schedule": schedules[way]} if way in schedules else {}
    strategy = strategy_of(1 if options else num_replicas, **options)
    rows = ROWS[: sum(SIZES[num_replicas])]
    axes = {"axis 0": 0, "axes 0 and 2": (0, -1)}

    def step(x):
        merged = lambda strategy, x: {op: strategy.reduce(op, x) for op in OPS}  # noqa: E731
        own = jnp.float32([1, -2]) * (number() + 1)
        result = {f"{op}, {name}": ctx().strategy.reduce(op, x, axis=axis) for op in OPS for name, axis in axes.items()}
        return result | {
            "even": {op: all_reduce(op, own, by_rows=False) for op in OPS},
            "merged": ctx().merge_call(merged, (own,)),
        }

    def run(batch):
        outside = {f"{op}, {name}": strategy.reduce(op, batch, axis=axis) for op in OPS for name, axis in axes.items()}
        nest = strategy.reduce("max", [batch, {"of": batch}], axis=0)  # several leaves in one program
        return outside, strategy.run(step, args=(batch,)), nest

    [batch] = strategy.distribute_dataset([rows])
    outside, inside, nest = (mr.function(run) if "function" in way else run)(batch)
    expected = {f"{op}, {name}": combine(rows, axis=axis) for op, combine in OPS.items() for name, axis in axes.items()}
    every = np.float32([1, -2]) * np.arange(1, num_replicas + 1)[:, None]
    for name, value in expected.items():
        np.testing.assert_allclose(outside[name], value, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(inside[name], value, rtol=1e-5, err_msg=name)
    for name, combine in OPS.items():
        np.testing.assert_allclose(inside["even"][name], combine(every, axis=0), rtol=1e-6)
        np.testing.assert_allclose(inside["merged"][name], combine(every, axis=0), rtol=1e-6)
    assert np.array_equal(nest[0], rows.max(0)) and np.array_equal(nest[1]["of"], rows.max(0))


@pytest.mark.parametrize("num_replicas", [*nightly(1, 2), 3])
def test_each_reduction_aggregates_variables(num_replicas: int) -> None:
    strategy = strategy_of(num_replicas)
    own = np.float32([1, -2]) * np.arange(1, num_replicas + 1)[:, None]
    mirrored = {op: variable(np.zeros(2), strategy, aggregation=op, name=op) for op in OPS}
    on_read = {op: variable(np.zeros(2), strategy, aggregation=op, synchronization="on_read") for op in OPS}

    def step():
        for op in OPS:
            mirrored[op].assign(jnp.float32([1, -2]) * (number() + 1))
            on_read[op].assign(mirrored[op] * 0 + jnp.float32([1, -2]) * (number() + 1))
        return ctx().merge_call(lambda strategy: {op: v.value for op, v in on_read.items()})

    merged = strategy.run(step)
    given = strategy.distribute_values_from_function(lambda ctx: own[int(ctx.replica_id_in_sync_group)])
    for op, combine in OPS.items():
        expected = combine(own, axis=0)
        for value in (mirrored[op].value, on_read[op].value, merged[op], strategy.reduce(op, on_read[op])):
            np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=op)
        np.testing.assert_allclose(mirrored[op].assign(given).value, expected, rtol=1e-6)
        np.testing.assert_allclose(on_read[op].assign([3, -4]).value, [3, -4])
        np.testing.assert_allclose(on_read[op].assign_add([1, 1]).value, [4, -3])
        assert op in {"sum", "mean"} or strategy.reduce(op, mirrored[op]).tolist() == expected.tolist()


def test_a_largest_value_is_restored_on_another_number_of_replicas(tmp_path, strategy2, strategy3) -> None:
    """Every copy gets it: the largest of them stays what was saved."""
    largest, smallest = (variable(np.int32(0), strategy2, aggregation=op, synchronization="on_read") for op in ("max", "min"))
    strategy2.run(lambda: (largest.assign(number() + 5), smallest.assign(-number())))
    mr.Checkpoint(tmp_path, state=[largest, smallest]).save(1)
    here = [variable(np.int32(9), strategy3, aggregation=op, synchronization="on_read") for op in ("max", "min")]
    mr.Checkpoint(tmp_path, state=here).restore_latest()
    assert [v.value.tolist() for v in here] == [6, -1]
    assert [[c.tolist() for c in strategy3.local_results(v)] for v in here] == [[6] * 3, [-1] * 3]


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")  # NumPy 2.2 of NaN in bfloat16
@pytest.mark.parametrize("dtype", ["bool", "int8", "bfloat16", *nightly("uint32", "float8_e4m3fn", "float32")])
def test_a_largest_value_keeps_its_bits_and_a_nan(strategy3, dtype: str) -> None:
    """Also -inf, -0.0 and subnormals; XLA's own comparison over devices loses a NaN of all replicas but one."""
    info = None if dtype == "bool" else jnp.iinfo(dtype) if dtype[0] in "iu" else jnp.finfo(dtype)
    ends = [False, True] if info is None else [info.min, 0, 1, info.max]
    table = np.array([np.roll(ends, k) for k in range(3)]).astype(jnp.dtype(dtype))
    if dtype in ("float8_e4m3fn", "bfloat16", "float32"):
        special = np.array([[np.nan, -np.inf, -1, -0.0], [1, -np.inf, np.nan, -0.0], [2, -np.inf, -2, -0.0]])
        table = np.concatenate([table, special.astype(table.dtype)], axis=1)
    x = strategy3.distribute_values_from_function(lambda ctx: table[int(ctx.replica_id_in_sync_group)])
    for op in ("max", "min"):
        expected = getattr(np, op)(table, axis=0)
        for result in (strategy3.reduce(op, x), strategy3.run(lambda x, op=op: all_reduce(op, x), args=(x,))):
            assert result.dtype == table.dtype
            np.testing.assert_array_equal(np.asarray(result, "float64"), expected.astype("float64"))
            is_number = expected == expected
            np.testing.assert_array_equal(*(np.signbit(np.asarray(v, "float64")[is_number]) for v in (result, expected)))
        whole = strategy3.reduce(op, x, axis=0)
        np.testing.assert_array_equal(np.asarray(whole, "float64"), getattr(np, op)(table).astype("float64"))


@pytest.mark.parametrize("num_replicas", [*nightly(1, 2), 3])
def test_the_gradient_goes_to_the_values_that_are_the_largest(num_replicas: int) -> None:
    """As that of `jnp.max` of all rows, from the losses of all replicas; ties share it. Uneven batches, devices and virtual."""
    rows = np.float32([[1, 5], [4, 5], [4, -7], [2, 5]])[: sum(SIZES[num_replicas])]
    w = np.float32([2, -1])

    def loss(w, x, reduce=lambda y: mr.get_strategy().reduce("max", y, axis=0)):
        return jnp.sum(reduce(x * w) ** 2)

    expected, by_rows = jax.grad(lambda w, x: loss(w, x, lambda y: jnp.max(y, axis=0)), argnums=(0, 1))(w, rows)
    for strategy in (strategy_of(num_replicas), strategy_of(1, num_replicas=num_replicas)):
        [batch] = strategy.distribute_dataset([rows])
        step = lambda x: jax.grad(loss, argnums=(0, 1))(w, x)  # noqa: E731
        by_w, by_x = strategy.run(step, args=(batch,))
        np.testing.assert_allclose(
            np.mean(by_w.values if isinstance(by_w, mr.PerReplica) else [by_w], axis=0), expected, rtol=1e-6
        )
        np.testing.assert_allclose(strategy.gather(by_x, axis=0) / num_replicas, by_rows, rtol=1e-6)


def test_the_gradient_outside_of_a_step_and_of_integers_beside(strategy2) -> None:
    def loss(scale):
        x = strategy2.run(lambda: (jnp.float32([1, 3]) * scale * (number() + 1), number()))
        nest = strategy2.reduce("max", x)
        return jnp.sum(nest[0]) + nest[1]

    assert float(mr.function(jax.grad(loss))(jnp.float32(2.0))) == 8.0


def test_what_has_no_largest_is_refused(strategy2) -> None:
    complex_values = strategy2.distribute_values_from_function(lambda ctx: np.complex64(1j))
    keys = strategy2.run(lambda: ctx().rng(0))
    empty = strategy2.distribute_values_from_function(lambda ctx: np.zeros((0, 2), "float32"))
    for reduce in (strategy2.reduce, lambda op, x: strategy2.run(lambda x: all_reduce(op, x), args=(x,))):
        with pytest.raises(TypeError, match=r"dtype complex64 have no largest and no smallest.*abs\(x\)"):
            reduce("max", complex_values)
        with pytest.raises(TypeError, match=r"dtype key<fry_by_rows> have no largest and no smallest"):
            reduce("min", keys)
    with pytest.raises(ValueError, match=r"no largest and no smallest value of no rows.*-jnp\.inf"):
        strategy2.reduce("max", empty, axis=0)
    with pytest.raises(ValueError, match="value of no rows"):
        strategy2.run(lambda x: strategy2.reduce("min", x, axis=0), args=(empty,))
    assert strategy2.reduce("max", empty).shape == (0, 2)
    assert float(strategy2.reduce("sum", empty, axis=(0, 1))) == 0
    with pytest.raises(ValueError, match=r"'v' has dtype complex64 and aggregation MAX, but such values cannot be compared"):
        variable(1j, strategy2, aggregation="max", name="v")
    with pytest.raises(ValueError, match="aggregation MIN, but such values cannot be compared"):
        variable(jax.random.key(0), strategy2, aggregation="min")


def test_what_reads_rows_that_nobody_wrote_is_refused(strategy2) -> None:
    """Where one replica adds -3 to a row and the others nothing, the largest would be 0."""
    v = variable(np.zeros(3), strategy2, aggregation="max", name="v")
    with pytest.raises(ValueError, match=r"scatter_add to variable 'v' inside a step: its aggregation MAX would also"):
        strategy2.run(lambda: v.scatter_add([0], [-3.0]))
    assert v.scatter_add([0], [-3.0]).numpy().tolist() == [-3, 0, 0]


def test_a_user_function_in_place_of_sums_leaves_the_largest_alone() -> None:
    ops = mr.ReductionToOneDevice(accumulation_fn=lambda values: values[0] * 100)
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    x = strategy.run(lambda: jnp.float32(number() + 1))
    assert [float(strategy.reduce(op, x)) for op in OPS] == [100, 50, 2, 1]
    assert [float(strategy.run(lambda op=op: all_reduce(op, jnp.float32(number() + 1)))) for op in OPS] == [100, 50, 2, 1]
    assert [float(strategy.reduce(op, jnp.float32(2))) for op in ("max", "min")] == [2, 2]


def test_a_largest_gradient_is_no_gradient(strategy2) -> None:
    """The proof knows that all replicas have it; the advice, that it is no sum of gradients."""
    w = variable(np.float32([1, 2]), strategy2)

    def norms(x):
        grads = jax.grad(lambda w: mr.losses.compute_average_loss(jnp.square(x * w).sum(1)))(w.value)
        largest = all_reduce("max", jnp.abs(grads))
        w.assign(w - 0 * largest)
        again = jax.lax.pmax(jnp.abs(grads), "replica")
        return all_reduce("sum", [largest, again]), all_reduce("mean", [largest, again]), largest

    [batch] = strategy2.distribute_dataset([np.ones((4, 2), "float32")])
    *_, largest = strategy2.run(norms, args=(batch,))  # without a warning
    assert largest.tolist() == [1, 2]
    for aggregate in ("max", mr.ReduceOp.MIN):
        with pytest.raises(ValueError, match=r"aggregate is .*; expected one of 'sum', 'mean' or a member of mr\.ReduceOp"):
            mr.Optimizer(optax.sgd(0.1), [w], aggregate=aggregate)


def test_only_a_mean_has_weights(strategy2) -> None:
    with pytest.raises(ValueError, match=r"all_reduce\('max', by_rows=True\): only a mean has weights"):
        strategy2.run(lambda: all_reduce("max", 1.0, by_rows=True))
    assert values_of(strategy2.run(lambda: all_reduce("max", 1.0) + number())) == [1, 2]


def made_up(kind: type[NamedChoice], name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """A member that an enum has until the test ends: in a program it is a line of `_options`."""
    member = object.__new__(kind)
    member._name_ = member._value_ = name
    monkeypatch.setitem(kind._member_map_, name, member)
    monkeypatch.setattr(kind, "_member_names_", [*kind._member_names_, name])
    return member


#: A product: the logarithms of the values, and how many are negative, add up.
PRODUCT = Reduction(
    begin=lambda array, count: [jnp.log(abs(array)), (array < 0).astype(array.dtype)],
    padding=lambda dtype: 0,
    combine=jnp.sum,
    across=psum,
    finish=lambda totals, count, dtype: (jnp.exp(totals[0]) * (1 - 2 * (totals[1] % 2))).astype(dtype),
    repeated=lambda result, count: result**count,
    adds=True,
    marks=None,
)


@pytest.mark.parametrize("way", ["together, in a function", *nightly("devices")])
def test_one_entry_adds_a_reduction(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, in merged code, outside, of variables; with odd batches, and a replica without rows; with its gradient."""
    monkeypatch.setitem(REDUCTIONS, made_up(ReduceOp, "PRODUCT", monkeypatch), PRODUCT)
    made_up(mr.VariableAggregation, "PRODUCT", monkeypatch)
    strategy = strategy_of(3) if way == "devices" else strategy_of(1, num_replicas=3, schedule="together")
    rows, own = ROWS.astype("float64"), np.float32([[1, -2], [2, -4], [3, -6]])
    mirrored, on_read = (
        variable(np.zeros(2), strategy, aggregation="product", synchronization=when) for when in ("on_write", "on_read")
    )

    def step(x):
        replica = jnp.float32([1, -2]) * (number() + 1)
        mirrored.assign(replica)
        on_read.assign(replica)
        merged = ctx().merge_call(lambda strategy, y: strategy.reduce("product", y), (replica,))
        of_rows = [ctx().strategy.reduce("product", x, axis=axis) for axis in (0, (0, -1))]
        scaled = lambda scale: jnp.sum(ctx().strategy.reduce("product", x * scale, axis=0))  # noqa: E731
        return merged, all_reduce("product", replica), *of_rows, jax.grad(scaled)(jnp.float32(1))

    def run(batch):
        return strategy.run(step, args=(batch,)), [strategy.reduce("product", batch, axis=axis) for axis in (0, (0, -1))]

    [batch] = strategy.distribute_dataset([ROWS])
    (merged, all_of, by_row, by_both, slope), outside = (run if way == "devices" else mr.function(run))(batch)
    for value in (merged, all_of, mirrored.value, on_read.value):
        np.testing.assert_allclose(value, own.prod(0), rtol=1e-5)
    for value, axis in ((by_row, 0), (by_both, (0, 2)), (outside[0], 0), (outside[1], (0, 2))):
        np.testing.assert_allclose(value, rows.prod(axis), rtol=1e-4)
    np.testing.assert_allclose(np.mean(values_of(slope)), 4 * rows.prod(0).sum(), rtol=1e-4)
    np.testing.assert_allclose(strategy.reduce("product", jnp.float32(2)), 8)
