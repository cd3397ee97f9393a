"""More replicas than devices: the numbers of as many devices, whatever the step does, and what cannot be is refused."""

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.interpreters import mlir
from parameters import nightly
from strategies import arrays_of, ctx, number, variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

DEVICES = [f"cpu:{i}" for i in range(8)]
SCHEDULES = ("together", "one_by_one")
X = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)


def several(num_replicas, num_devices, schedule="together"):
    return mr.MirroredStrategy(DEVICES[:num_devices], num_replicas=num_replicas, schedule=schedule)


def shown(strategy, tree):
    """Replace each array by numpy, a PerReplica by the list of its values."""

    def show(value):
        return arrays_of(value) if isinstance(value, mr.PerReplica) else np.asarray(value)

    return jax.tree.map(show, tree, is_leaf=lambda leaf: isinstance(leaf, mr.PerReplica))


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def results(strategy, step, num_rows):
    [x] = strategy.distribute_dataset(strategy.make_numpy_dataset(X[:num_rows]).batch(num_rows))
    return shown(strategy, strategy.run(step, args=(x,)))


def uneven(x):
    total = ctx().all_reduce("sum", (jnp.sum(x), x.shape[0]))
    return x * total[0], ctx().all_gather(x, 0), mr.get_strategy().reduce("mean", x, axis=0), total[1]


# -- what a step may do


def collectives(x):
    """Use every collective that JAX has, in the replicas' order."""
    total = jax.lax.psum(x, "replica")
    return {
        "sum": total,
        "of what is the same": jax.lax.psum(jnp.float32(3), "replica"),
        "extremes": (jax.lax.pmax(x, "replica"), jax.lax.pmin(x, "replica")),
        "gathered": (jax.lax.all_gather(x, "replica", axis=1), jax.lax.all_gather(x, "replica", axis=1, tiled=True)),
        "next": jax.lax.ppermute(x, "replica", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        "exchanged": jax.lax.all_to_all(jnp.arange(8.0).reshape(4, 2) + 10 * number(), "replica", 0, 1),
        "scattered": jax.lax.psum_scatter(jnp.arange(4.0) + x.sum(), "replica"),
        "with rows": jax.vmap(lambda row: jax.lax.pmean(row, ("batch", "replica")), axis_name="batch")(x)[0],
        "first": mr.get_strategy().reduce("mean", x, axis=0),
        "keys": jax.random.key_data(ctx().all_gather(ctx().rng(1)[None], 0)),
        "complex": jax.lax.psum(x * 1j, "replica"),
        "merged": ctx().merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(x,)),
    }


def loops(x):
    """Use collectives, and the replica's number, in loops and conditions, one inside the other."""

    def round_(carry, row):
        total, own = carry
        inner = jax.lax.fori_loop(0, 2, lambda i, t: t + ctx().all_reduce("sum", row * i + own), total)
        return (inner, own + number()), (own, inner, jax.lax.cond(number() == 1, lambda: row * 2.0, lambda: row))

    (total, own), rows = jax.lax.scan(round_, (0.0, 1.0 * number()), jnp.arange(3.0))
    more = jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + ctx().all_reduce("sum", 1.0), c[1] + number()), (0.0, 0))
    chosen = jax.lax.cond(total > 0, lambda: (ctx().all_reduce("sum", x), x * 2), lambda: (x, x))
    times = jax.lax.while_loop(lambda c: c < 3 + number(), lambda c: c + 1, 0)
    scanned, _ = jax.lax.scan(lambda c, x: (c + ctx().all_reduce("sum", x), None), jnp.zeros(4), x)
    jitted = jax.jit(lambda x: jax.checkpoint(lambda y: y * number() + ctx().all_reduce("sum", y))(x))(x)
    return total, own, rows, more, chosen, times, scanned, jitted


CASES = [(collectives, "together", 2), (loops, "one_by_one", 1), *nightly((collectives, "one_by_one", 1), (loops, "together", 2))]


@pytest.mark.parametrize(("step", "schedule", "num_devices"), CASES)
def test_collectives_and_loops_are_those_of_as_many_devices(step, schedule, num_devices):
    assert_same(results(several(4, num_devices, schedule), step, 8), results(mr.MirroredStrategy(DEVICES[:4]), step, 8))


def first_own_value_in_a_loop(x):
    total, _ = jax.lax.scan(lambda total, _: (total + ctx().all_reduce("sum", x[0, 0] * total), None), 1.0, length=3)
    return x * total


def other_generators(x):
    """Random numbers that would be others if many replicas made them together."""
    return jax.random.uniform(ctx().rng(jax.random.key(3, impl="rbg")), (2,))


def test_a_device_with_all_replicas_has_their_numbers():
    even = lambda x: (first_own_value_in_a_loop(x), other_generators(x))  # noqa: E731
    for step, num_rows in ((even, 6), (uneven, 2)):  # of which one replica has none
        expected = results(mr.MirroredStrategy(DEVICES[:3]), step, num_rows)
        for schedule in SCHEDULES:
            assert_same(results(several(3, 1, schedule), step, num_rows), expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_effects_happen_once_for_each_replica_and_only_where_its_own_way_leads(schedule):
    strategy, calls, seen = several(4, 2, schedule), [], []

    def step():
        jax.debug.callback(lambda i: seen.append(int(i)), number())
        jax.lax.cond(number() > 2, lambda: jax.debug.callback(lambda: seen.append(100)), lambda: None)
        host = io_callback(lambda: calls.append(1) or np.float32(7), jax.ShapeDtypeStruct((), np.float32))
        return host + number()

    values = [float(value) for value in strategy.run(step).values]
    jax.effects_barrier()
    assert values == [7, 8, 9, 10] and len(calls) == 4
    assert sorted(seen) == [0, 1, 2, 3, 100]


def test_a_sum_of_quotients_by_own_values_is_that_of_as_many_devices():
    step = lambda x: ctx().all_reduce("sum", 2 / (1 + x * x))  # noqa: E731
    assert_same(results(several(4, 1), step, 4), results(mr.MirroredStrategy(DEVICES[:4]), step, 4))


def test_values_and_variables_of_other_replicas_on_the_same_devices_are_refused():
    few, many = mr.MirroredStrategy(DEVICES[:2]), several(4, 2)
    v, x = variable(0.0, few), few.distribute_values_from_function(lambda context: 1.0)
    for step, args in ((lambda x: x, (x,)), (lambda: v.assign_add(1.0), ())):
        with pytest.raises(mr.StrategyMismatchError):
            many.run(step, args)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_references_work_between_collectives_and_are_refused_across_one(schedule):
    strategy = several(2, 1, schedule)

    def step(crosses):
        ref = jax.new_ref(jnp.zeros(2))
        ref[0] = 1.0 * number()
        ref[1] = ctx().all_reduce("sum", ref[0]) if crosses else 5.0
        return ref[...]

    @jax.jit
    def counted(x):
        """Add up in a reference, around a scan that counts."""
        ref = jax.new_ref(x)
        (count, x), _ = jax.lax.scan(lambda carry, _: ((carry[0] + 1.0, carry[1] * 2), None), (0.0, x), length=3)
        ref[...] += count
        return ref[...] + x

    assert_same(shown(strategy, strategy.run(step, args=(False,))), [np.float32([0, 5]), np.float32([1, 5])])
    assert_same(shown(strategy, strategy.run(lambda: counted(1.0 * number()))), [np.float32(3), np.float32(12)])
    with pytest.raises(mr.ContextError, match=r"jax\.Ref before and after a collective.* make a new one after it\."):
        strategy.run(step, args=(True,))


# -- what it is


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_jit_inside_closes_over_an_array_on_a_mesh(schedule):
    strategy = several(4, 2, schedule)
    closed_over = strategy.run(lambda: jnp.arange(3.0)), mr.MirroredStrategy(DEVICES[5:]).run(lambda: jnp.ones(3))
    mesh = jax.make_mesh((2,), ("a",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    divided = jax.device_put(np.arange(4, dtype=np.float32), jax.NamedSharding(mesh, jax.P("a")))
    step = jax.jit(lambda x: x + closed_over[0] + closed_over[1] + divided.sum())
    np.testing.assert_array_equal(strategy.run(step, args=(np.ones(3, np.float32),)), [8, 9, 10])


def test_it_says_what_it_is_and_not_more():
    strategy = several(8, 2)
    assert repr(strategy) == "mr.MirroredStrategy(8 replicas on 2 devices (cpu:0, cpu:1), together)"
    assert "8 replicas on 1 device (cpu:0), one by one" in several(8, 1, "one_by_one").explain()
    assert strategy.num_replicas_in_sync == 8 and len(strategy.devices) == 2
    assert repr(several(2, 2)) == repr(mr.MirroredStrategy(DEVICES[:2]))
    v = variable(1.0, strategy, name="v")
    own = variable(2.0, strategy, synchronization="on_read", aggregation="mean")
    assert len(v._array.addressable_shards) == 2
    assert len(strategy.local_results(v)) == len(strategy.local_results(own)) == 8
    assert [line.split(":")[0].strip() for line in repr(own).splitlines()[1:]] == [str(i) for i in range(8)]
    values = strategy.local_results(strategy.run(lambda: number() * 2))
    assert [int(value) for value in values] == [0, 2, 4, 6, 8, 10, 12, 14]


def test_what_needs_a_device_for_each_replica_is_refused():
    strategy = several(2, 1)
    message = r"Make as many virtual devices, .* range\(2\)\]\): the numbers are the"
    with mr.eager(), pytest.raises(mr.ContextError, match=message):
        strategy.run(number)
    groups = lambda: jax.lax.psum(number(), "replica", axis_index_groups=[[0], [1]])  # noqa: E731
    with pytest.raises(mr.ContextError, match=r"`psum` cannot run with several replicas on a device"):
        strategy.run(groups)


def test_what_jax_cannot_batch_runs_one_by_one_and_an_error_of_the_users_own_rule_is_the_users():
    unbatched = jex_core.Primitive("doubled")
    unbatched.def_abstract_eval(lambda x: x)
    mlir.register_lowering(unbatched, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    assert_same(results(several(4, 1), unbatched.bind, 8), [2 * rows for rows in np.split(X[:8], 4)])

    @jax.custom_batching.custom_vmap
    def doubled(x):
        return 2 * x

    @doubled.def_vmap
    def rule(size, batched, x):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        results(several(4, 1), doubled, 8)
