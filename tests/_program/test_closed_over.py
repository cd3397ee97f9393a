"""Steps may close over arrays of strategies, compute with them whatever JAX can, and search in them; each exists once."""

import gc
import re
import threading
import tracemalloc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parameters import nightly
from strategies import variable

import mirrored as mr

HERE = re.escape(__file__)
pytestmark = pytest.mark.usefixtures("in_numpy")

#: Since jax 0.12 `searchsorted` is a primitive of which the jaxpr shows no more than the name.
SEARCHES = {
    "a search": lambda x, one: x * jnp.searchsorted(one, x),
    "a search in itself": lambda x, one: jnp.searchsorted(one, one) + x,
    "a search in an inner closure": lambda x, one: jax.jit(lambda: jnp.searchsorted(one, one))() + x,
    "the gradient of a search": lambda x, one: jax.grad(lambda y: (y * jnp.searchsorted(one, y)).sum())(x),
    "a search in a scan": lambda x, one: jax.lax.scan(lambda c, y: (c + jnp.searchsorted(one, y), y), x, one)[0],
}
USES = SEARCHES | {
    "a jitted function": lambda x, one: jax.nn.relu(one) * x,
    "a gradient": lambda x, one: jax.grad(lambda w: jnp.sum(jax.nn.silu(w * one) * x))(one) + x,
    "a jacobian": lambda x, one: jax.vmap(jax.jacfwd(lambda row: jnp.sin(row) * one))(x),
    "cond": lambda x, one: jax.lax.cond(x.sum() > 0, lambda: jax.nn.relu(one), lambda: x.sum(0)) + x,
    "a collective": lambda x, one: mr.get_replica_context().all_reduce("sum", jax.nn.relu(x.sum(0) * one)) + x,
    "merge_call": lambda x, one: (
        x
        + mr.get_replica_context().merge_call(
            lambda strategy, rows: strategy.reduce("sum", rows) + jax.nn.relu(one), args=(x.sum(0),)
        )
    ),
}
EVEN, UNEVEN, FEW = (2, 2, 2), (1, 3, 0), ("a jitted function", "a search", "a jacobian")
CASES = [
    ("of this", EVEN, tuple(SEARCHES)), ("of another", EVEN, FEW), ("of a variable", EVEN, FEW),
    *nightly(
        ("of this", EVEN, tuple(USES)), ("on one device", EVEN, FEW), ("of another", UNEVEN, ("a jitted function",)),
        ("of this", UNEVEN, ("a gradient", "a collective", "merge_call")),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "sizes", "names"), CASES, ids=str)
def test_a_step_computes_with_an_array_that_it_closes_over(strategy3, owner, sizes, names):
    values = np.array([-1.0, 3.0], np.float32)
    w = variable(values, strategy3)
    one = {
        "of this": lambda: strategy3.run(lambda v: v, args=(values,)),
        "of another": lambda: mr.MirroredStrategy(["cpu:4", "cpu:5"]).run(lambda v: v, args=(values,)),
        "on one device": lambda: jax.device_put(values, jax.devices()[2]),
        "of a variable": lambda: w.value,
    }[owner]()
    rows = [np.arange(2 * size, dtype=np.float32).reshape(size, 2) for size in sizes]
    x = strategy3.distribute_values_from_function(lambda c: rows[c.replica_id_in_sync_group])
    uses = lambda x, one: {name: USES[name](x, one) for name in names}  # noqa: E731
    closing = lambda x: uses(x, one)  # noqa: E731
    expected = strategy3.run(uses, args=(x, values))
    for found in (strategy3.run(closing, args=(x,)), mr.function(lambda x: strategy3.run(closing, args=(x,)))(x)):
        for name in names:
            for own, wanted in zip(found[name].values, expected[name].values, strict=True):
                np.testing.assert_allclose(own, wanted, rtol=1e-6, err_msg=name)


def test_a_closed_over_array_is_whole_and_the_same_on_every_replica(strategy3):
    """Also one that lies in pieces on the strategy's own devices, under an inner jit."""
    of_each = strategy3.distribute_values_from_function(lambda _: 0.0)._array.sharding
    one, pieces = strategy3.reduce("sum", np.float32(1)), jax.device_put(np.arange(3.0, dtype="float32"), of_each)
    v = variable(np.zeros(3, "float32"), strategy3)
    strategy3.run(lambda: v.assign(jax.jit(lambda: pieces * 2)() + jax.nn.relu(one)))
    strategy3.assert_mirrored()
    assert v.numpy().tolist() == [3.0, 5.0, 7.0]


# -- one copy on a device, for all programs

ROWS, COLUMNS = 1021, 1031  # of arrays that no other test has
KINDS = {
    "numpy": lambda: np.ones((ROWS, COLUMNS), np.float32),
    "jax": lambda: jnp.ones((ROWS, COLUMNS)),
    "of a step": lambda: mr.MirroredStrategy(["cpu:0", "cpu:1"]).run(lambda: jnp.ones((ROWS, COLUMNS))),
    "nnx": lambda: nnx.Linear(ROWS, COLUMNS, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)),
    "equinox": lambda: eqx.nn.Linear(COLUMNS, ROWS, key=jax.random.key(0)),
}


def matrix(frozen):
    return jnp.asarray(frozen.weight if isinstance(frozen, eqx.Module) else getattr(frozen, "kernel", frozen))


def num_copies():
    """Count the places in memory where the devices have such an array."""
    gc.collect()
    alive = [array for array in jax.live_arrays() if array.shape == (ROWS, COLUMNS)]
    return len({shard.data.unsafe_buffer_pointer() for array in alive for shard in array.addressable_shards})


def batch(strategy, num_rows):
    return next(iter(strategy.distribute_dataset([np.ones(num_rows, np.float32)])))


def sum_of(x):
    return mr.get_replica_context().all_reduce("sum", x.sum())


def run_all(strategy, frozen):
    """Run steps and a function that name an array, with several shapes, and return what two compute of six rows."""
    first = lambda x: sum_of(x) * matrix(frozen)[0, :9].sum()  # noqa: E731
    second = lambda x: sum_of(x * matrix(frozen).T[0, 0])  # noqa: E731
    both = mr.function(lambda x: strategy.run(first, args=(x,)) + strategy.run(second, args=(x,)) + matrix(frozen)[1, 1])
    for num_rows in (7, 6):
        found = [float(run(batch(strategy, num_rows))) for run in (lambda x: strategy.run(first, args=(x,)), both)]
    again = mr.MirroredStrategy(strategy.devices, num_replicas=strategy.num_replicas_in_sync)
    again.run(first, args=(batch(again, 6),))
    assert num_copies() == (1 if isinstance(frozen, np.ndarray) else len(strategy.devices))
    return found


@pytest.mark.parametrize(("kind", "num_devices", "num_replicas"), [
    ("numpy", 1, 3), ("jax", 3, 3), ("nnx", 2, 2), *nightly(("equinox", 2, 2), ("of a step", 2, 2)),
])  # fmt: skip
def test_what_steps_name_exists_once_on_a_device_and_ends_with_its_owner(kind, num_devices, num_replicas):
    """The owner's own array is one of them; all devices of a CPU use one copy of numpy's memory."""
    frozen = KINDS[kind]()
    gone = weakref.ref(frozen)
    found = run_all(mr.MirroredStrategy([f"cpu:{i}" for i in range(num_devices)], num_replicas=num_replicas), frozen)
    assert found == [54.0, 61.0] or kind == "equinox"  # whose weights are random
    del frozen
    assert num_copies() == 0 and gone() is None


@pytest.mark.by_xla
def test_another_program_copies_no_numpy_array(strategy2):
    table, x, longer = np.ones((ROWS, COLUMNS), np.float32), batch(strategy2, 4), batch(strategy2, 7)
    step = lambda x: sum_of(x) * jnp.asarray(table)[0, 0]  # noqa: E731
    strategy2.run(step, args=(x,))
    tracemalloc.start()
    try:
        assert float(strategy2.run(step, args=(longer,))) == 7
        assert tracemalloc.get_traced_memory()[1] < table.nbytes, "not even for a moment"
    finally:
        tracemalloc.stop()


def test_a_numpy_array_that_changes_in_place_is_copied_for_new_programs_only(strategy2):
    table, x, longer = np.ones((ROWS, COLUMNS), np.float32), batch(strategy2, 4), batch(strategy2, 8)
    step = lambda x: sum_of(x) * jnp.asarray(table)[0, 0]  # noqa: E731
    assert float(strategy2.run(step, args=(x,))) == 4
    table[:] = 2
    assert [float(strategy2.run(step, args=(rows,))) for rows in (x, longer, x)] == [4, 16, 4]
    assert num_copies() == 2


@pytest.mark.by_xla
def test_a_deleted_array_fails_only_what_names_it_and_changes_no_variable(strategy2):
    w, frozen, other = variable(1.0, strategy2), jnp.ones((ROWS, COLUMNS)), jnp.ones((ROWS, COLUMNS))
    steps = [lambda x, a=a: (w.assign_add(1.0), sum_of(x) * a[0, 0])[1] for a in (frozen, other)]
    x, longer = batch(strategy2, 4), batch(strategy2, 8)
    assert [float(strategy2.run(step, args=(x,))) for step in steps] == [4, 4]
    frozen.delete()
    for rows in (x, longer):
        with pytest.raises(RuntimeError, match="deleted"):
            strategy2.run(steps[0], args=(rows,))
    assert [float(strategy2.run(steps[1], args=(rows,))) for rows in (x, longer)] == [4, 8] and float(w.value) == 5


# -- searches, whatever is around them


@pytest.fixture
def x(strategy3):
    return strategy3.distribute_values_from_function(lambda c: np.arange(4, dtype="float32") + c.replica_id_in_sync_group)


@pytest.mark.by_xla
def test_in_64_bits(strategy3, x):
    def step(a):
        with jax.enable_x64(True):
            q = a.astype("float64") / 3
            return jnp.searchsorted(q, q), q * 3

    places, back = strategy3.run(step, args=(x,))
    assert [own.tolist() for own in strategy3.local_results(places)] == [[0, 1, 2, 3]] * 3 and back.dtype == "float64"


def test_beside_a_reference(strategy3, x):
    w = variable(np.arange(4, dtype="float32"), strategy3, name="w")

    def step(a):
        def work(ref):
            ref[...] = ref[...] + jnp.searchsorted(w.value, ref[...])
            return ref[...]

        refs = [jax.new_ref(a) for _ in range(3)]
        in_a_scan = jax.lax.scan(lambda c, _: (work(refs[1]), None), a, None, length=1)[0]
        return jax.jit(lambda: work(refs[0]))(), in_a_scan, jax.lax.cond(True, lambda: work(refs[2]), lambda: a)

    expected = [v + np.searchsorted(np.arange(4.0), v) for v in (np.arange(4.0) + r for r in range(3))]
    for result in strategy3.run(step, args=(x,)):
        np.testing.assert_array_equal(np.stack(result.values), expected)


def test_the_same_step_sees_another_array_and_the_old_one_is_freed(strategy2):
    holder = {"table": jnp.ones((ROWS, COLUMNS))}
    step = lambda x: sum_of(x) * holder["table"][0, 0]  # noqa: E731
    for value in (1.0, 2.0, 3.0):
        holder["table"] = jnp.full((ROWS, COLUMNS), value)
        assert float(strategy2.run(step, args=(batch(strategy2, 4),))) == 4 * value
        assert num_copies() == 2


def test_threads_share_it(strategy2):
    frozen, x, found = np.ones((ROWS, COLUMNS), np.float32), batch(strategy2, 4), []

    def train(factor):
        step = lambda x: sum_of(x) * jnp.asarray(frozen)[factor, factor] * factor  # noqa: E731
        found.append((float(strategy2.run(step, args=(x,))), step))

    threads = [threading.Thread(target=train, args=(factor,)) for factor in range(3)]
    train(3)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(total for total, _ in found) == [0, 4, 8, 12] and num_copies() == 1


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_an_array_on_a_mesh_with_explicit_axes_is_an_argument(num_replicas):
    """XLA ended the process where a jit inside got one of a mesh with another number of devices."""
    strategy, ones = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]), np.ones(4, np.float32)

    def array(kind):
        mesh = jax.make_mesh((2,), ("a",), (kind,), devices=jax.devices()[:2])
        return jax.device_put(np.arange(4, dtype=np.float32), jax.NamedSharding(mesh, jax.P()))

    for use in (jnp.multiply, lambda x, y: jnp.where(x > 0, x * y, 0), lambda x, y: jax.jit(lambda: x * y)()):
        explicit, auto = array(jax.sharding.AxisType.Explicit), array(jax.sharding.AxisType.Auto)
        step = lambda x, use=use, explicit=explicit: use(x, explicit)  # noqa: E731
        for run in (strategy.run, mr.function(lambda step, args: strategy.run(step, args=args))):
            with pytest.raises(ValueError, match=rf"Explicit axes .* {HERE}:\d+.* Pass it .*run\(step, args="):
                run(step, args=(ones,))
        with pytest.raises(ValueError, match=rf"Explicit axes .* {HERE}:\d+"):  # whose loop begins with an operation of no line
            mr.fori_loop(0, 2, lambda i, x, use=use, explicit=explicit: use(x, explicit), ones)
        np.testing.assert_array_equal(strategy.run(use, args=(ones, explicit)), np.arange(4))
        np.testing.assert_array_equal(strategy.run(lambda x, use=use, auto=auto: use(x, auto), args=(ones,)), np.arange(4))
