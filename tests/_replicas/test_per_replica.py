"""PerReplica: it shows what every replica holds, and refuses to be taken for one array."""

import copy
import functools
import math
import operator
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import strategy_of

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

WAYS_OUT = r"(?s)strategy\.run\(.*strategy\.reduce\(.*strategy\.gather\(.*strategy\.local_results\("


@pytest.fixture
def even(strategy2, per_replica):
    return per_replica(strategy2, np.float32([1, 2]), np.float32([3, 4]))


@pytest.fixture
def uneven(strategy3, per_replica):
    return per_replica(strategy3, np.ones((2, 3), np.int32), np.ones((0, 3), np.int32), np.ones((1, 3), np.int32))


# -- what it shows


def test_it_shows_shape_and_dtype_of_one_replica_and_values_without_padding(even, uneven, strategy2):
    assert (even.shape, even.shapes, even.ndim, even.dtype, even.num_replicas) == ((2,), ((2,), (2,)), 1, np.float32, 2)
    assert (uneven.shape, uneven.ndim, uneven.num_replicas) == ((None, 3), 2, 3), "None where the shapes differ"
    assert uneven.shapes == tuple(value.shape for value in uneven.values) == ((2, 3), (0, 3), (1, 3))
    assert all(np.all(np.asarray(value) == 1) for value in uneven.values)
    elsewhere = mr.MirroredStrategy(["cpu:2", "cpu:7", "cpu:0"])
    numbers = elsewhere.distribute_values_from_function(lambda ctx: ctx.replica_id_in_sync_group)
    assert [(int(value), value.devices()) for value in numbers.values] == [(i, {elsewhere.devices[i]}) for i in range(3)]
    seen = []
    strategy2.run(lambda x: seen.append((isinstance(x, jax.Array), x.shape)), args=(even,))
    assert set(seen) == {(True, (2,))}, "in a step it is an ordinary array"
    mr.function(lambda x: seen.append([value.shape for value in x.values]))(uneven)
    assert seen[-1] == [(2, 3), (0, 3), (1, 3)]


def test_repr_shows_every_replica(even, strategy2, strategy3, per_replica):
    x = per_replica(strategy3, *[np.int32([i, 10 * i]) for i in range(3)])
    assert repr(x) == str(x) == f"{x}" == "PerReplica(shape=(2,), dtype=int32,\n  0: [0 0],\n  1: [ 1 10],\n  2: [ 2 20])"
    x = per_replica(strategy2, np.float32([]), np.float32([[7]])[0])
    assert repr(x) == "PerReplica(shape=(None,), dtype=float32,\n  0: [],\n  1: [7.])"
    assert "  0: [[1. 0.]\n      [0. 1.]]" in repr(per_replica(strategy2, np.eye(2), np.eye(2)))
    long = per_replica(strategy2, np.arange(1000), np.arange(1000))
    assert len(repr(long)) < 200 and "..." in repr(long)
    assert "ShapeDtypeStruct" in repr(jax.eval_shape(lambda: even))
    traced = []
    jax.jit(lambda x: traced.append(repr(x)))(even)
    assert "PerReplica(" in traced[0] and "2,2" in traced[0]
    keys = strategy2.distribute_values_from_function(lambda ctx: jax.random.key(ctx.replica_id_in_sync_group))
    assert "[0 1]" in repr(keys)
    even._array.delete()
    assert repr(even) == "PerReplica(shape=(2,), dtype=float32, deleted)"


def test_what_is_printed_says_when_other_workers_have_more(strategy2, monkeypatch: pytest.MonkeyPatch) -> None:
    x = strategy2.distribute_values_from_function(lambda context: np.float32(context.replica_id_in_sync_group))
    own = {1: x.values[1]}
    monkeypatch.setattr(mr.PerReplica, "_local_rows", lambda self: own)
    assert repr(x) == "PerReplica(shape=(), dtype=float32, 1 of 2 replicas are of this worker:\n  1: 1.)"


# -- what it refuses

_BINARY = [
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
    "lt", "le", "gt", "ge", "eq", "ne",
]  # fmt: skip
_INPLACE = ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"]
_OTHERS = [2, 2.0, np.float32(2), np.ones(2), jnp.ones(2), None]
_USES = [
    float, int, complex, bool, len, iter, list, tuple, reversed, sum, max, sorted, abs, round, operator.neg, operator.pos,
    operator.invert, operator.index, operator.not_, math.floor, math.ceil, math.trunc, math.sqrt, hex, "{:.3f}".format,
    lambda x: divmod(x, 2), lambda x: divmod(2, x),
    # numpy
    np.asarray, np.array, np.sum, np.mean, np.max, np.exp, np.sqrt, np.isnan, np.size, np.argmax, np.float32,
    lambda x: np.concatenate([x, x]), lambda x: np.stack([x]), lambda x: np.dot(x, x), lambda x: np.where(x, 1, 0),
    lambda x: np.add(1, x), lambda x: np.add.reduce(x), lambda x: np.testing.assert_allclose(x, 1.0),
    # jax
    jnp.asarray, jnp.array, jnp.sum, jnp.mean, jnp.exp, jnp.argmax, lambda x: jnp.concatenate([x, x]),
    lambda x: jnp.stack([x]), lambda x: jnp.dot(x, x), lambda x: jnp.where(x, 1, 0), lambda x: jnp.add(1, x), jax.nn.relu,
    # syntax
    lambda x: x[0], lambda x: x[..., None], lambda x: operator.setitem(x, 0, 1.0), lambda x: 1.0 in x,
    lambda x: [1.0, x].index(3.0), lambda x: [*x], lambda x: "yes" if x else "no", lambda x: (lambda a, b: None)(*x),
]  # fmt: skip


def test_every_use_as_one_array_is_refused_with_the_ways_out(even):
    def refused(use, *arguments):
        with pytest.raises(mr.PerReplicaError, match=WAYS_OUT):
            use(*arguments)

    for name in [*_BINARY, *_INPLACE]:
        for other in _OTHERS:
            refused(getattr(operator, name), even, other)
            if name in _BINARY and other is not None:
                refused(getattr(operator, name), other, even)
    for use in _USES:
        refused(use, even)
    with pytest.raises(TypeError, match=r"PerReplica does not support `\+` \(shape \(2,\)\): it has one value"):
        even + 1
    for name in ("mean", "sum", "item", "numpy", "astype", "T", "reshape", "at"):
        assert not hasattr(even, name)
        with pytest.raises(AttributeError, match=rf"{WAYS_OUT}"):
            getattr(even, name)
    with pytest.raises(AttributeError, match=r"^PerReplica has no attribute 'vals'\.$"):
        even.vals


# -- as a pytree


def test_its_only_leaf_is_the_stacked_array_and_different_shapes_are_part_of_the_structure(even, uneven, strategy2, per_replica):
    for x in (even, uneven):
        [leaf], treedef = jax.tree.flatten(x)
        assert leaf.shape[0] == x.num_replicas
        again = jax.tree.unflatten(treedef, [leaf])
        assert isinstance(again, mr.PerReplica) and again.shapes == x.shapes
        copies = (copy.copy(x), copy.deepcopy(x), pickle.loads(pickle.dumps(x)))  # noqa: S301
        for same in (again, jax.jit(lambda y: y)(x), jax.block_until_ready(x), *copies):
            assert isinstance(same, mr.PerReplica) and repr(same) == repr(x)
    a, b = (per_replica(strategy2, np.ones(n), np.ones(3 - n)) for n in (1, 2))
    with pytest.raises(ValueError, match="different pytree metadata"):
        jax.tree.map(lambda x, y: x, a, b)
    again = jax.tree.map(lambda stack: stack, even)
    assert {even: "a", again: "b"}[even] == "a" and weakref.ref(even)() is even, "it is known by identity"


def test_values_are_right_wherever_tree_map_put_them(strategy2, even):
    doubled = jax.tree.map(lambda stack: 2 * stack, even)
    assert [value.tolist() for value in doubled.values] == [[2, 4], [6, 8]]
    on_one_device = jax.tree.map(lambda stack: jnp.asarray(np.asarray(stack)), even)
    everywhere = jax.tree.map(lambda stack: jax.device_put(stack, strategy2._mesh.mirrored), even)
    for moved in (on_one_device, jax.device_get(even), everywhere):
        assert [np.asarray(value).tolist() for value in moved.values] == [[1, 2], [3, 4]]
        assert repr(moved) == repr(even)
        assert strategy2.reduce("sum", moved).tolist() == [4, 6]
        assert strategy2.run(lambda x: 2 * x, args=(moved,)).values[1].tolist() == [6, 8]


def test_batches_that_were_stacked_outside_of_a_step_are_refused(strategy2):
    """With as many batches as replicas, shapes tell nothing."""
    batches = list(strategy2.distribute_dataset([np.arange(4.0), np.arange(4.0) + 10]))
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
    for use in (
        lambda: strategy2.reduce("mean", stacked, axis=0),
        lambda: strategy2.gather(stacked, axis=0),
        lambda: strategy2.run(lambda x: x.sum(), args=(stacked,)),
        lambda: mr.function(lambda x: strategy2.reduce("mean", x, axis=0))(stacked),
    ):
        with pytest.raises(mr.PerReplicaError, match=r"first axis is another than that of the replicas.*jnp.stack\(x\), args"):
            use()
    right = strategy2.run(lambda *rows: jnp.stack(rows), args=batches)
    assert strategy2.reduce("mean", right, axis=(0, 1)) == 6.5


#: What gives a PerReplica's array another number of axes, with as many entries as there are replicas.
MAPPED = {
    "vmap": lambda run, many: jax.vmap(run)(many),
    "lax.map": lambda run, many: jax.lax.map(run, many),
    "lax.scan": lambda run, many: jax.lax.scan(lambda c, k: (c, run(k)), 0, many)[1],
    "jacfwd": lambda run, many: jax.jacfwd(lambda ks: run(ks.sum()))(many),
}


@pytest.mark.parametrize(("how", "count"), [("vmap", 1), *((how, 3) for how in MAPPED)])
def test_a_per_replica_is_never_read_along_another_axis(how, count):
    """`jax.vmap(run)` of R values gave replica r the r-th of them."""
    strategy, many = strategy_of(count), jnp.arange(1.0, 1 + count)
    [batch] = strategy.distribute_dataset([np.arange(1.0 + 2 * count, dtype="float32")])
    step = lambda x, k: x.sum() * k  # noqa: E731
    run = lambda k: strategy.run(step, args=(batch, k))  # noqa: E731
    mapped = MAPPED[how](run, many)
    again = jax.tree.map(lambda stack: stack + 0, mapped)
    for use in (
        lambda: mapped.values,
        lambda: mapped.shape,
        lambda: again.num_replicas,
        lambda: strategy.reduce("sum", again),
        lambda: strategy.gather(mapped, axis=0),
        lambda: strategy.local_results(mapped),
        lambda: strategy.run(lambda x: x, args=(mapped,)),
        lambda: jax.jit(lambda: strategy.reduce("sum", MAPPED[how](run, many)))(),
        lambda: mr.function(lambda: MAPPED[how](run, many))(),
    ):
        with pytest.raises(mr.PerReplicaError, match=r"a PerReplica whose .*jax\.vmap\(lambda k: step\(x, k\)\)\(many\)"):
            use()
    assert repr(mapped).startswith("PerReplica(Array(") and "PerReplica(" in mapped._repr_html_()


def test_tree_map_goes_over_values_of_any_ranks(strategy3):
    """`tree.map(lambda rows, weights: ...)` ended with JAX's "different pytree metadata"."""
    rows, weights = np.arange(12, dtype="float32").reshape(6, 2), np.arange(6, dtype="float32")
    [(x, w)] = strategy3.distribute_dataset([(rows, weights)])
    weighted = jax.tree.map(lambda x, w: x * w[..., None], x, w)
    np.testing.assert_array_equal(strategy3.gather(weighted, axis=0), rows * weights[:, None])
    for other in (jax.tree.map(jnp.mean, x), jax.tree.map(lambda _: 5.5, x)):
        np.testing.assert_array_equal(strategy3.gather(jax.tree.map(lambda x, m: x - m, x, other), axis=0), rows - 5.5)


def test_the_lines_of_the_message_give_each_replicas_value(strategy3):
    """The mapped function may also read `values`."""
    [batch] = strategy3.distribute_dataset([np.arange(7, dtype="float32")])
    step, many = lambda x, k: x.sum() * k, jnp.array([1.0, 10, 100])
    run = lambda k: strategy3.run(step, args=(batch, k))  # noqa: E731
    sums, scales = np.array([0 + 1 + 2, 3 + 4, 5 + 6], "float32"), np.asarray(many)
    in_step = strategy3.run(lambda x, many: jax.vmap(lambda k: step(x, k))(many), args=(batch, many))
    in_scan = mr.scan(lambda c, k: (c, run(k)), 0, many)[1]
    for result in (in_step, in_scan):
        np.testing.assert_array_equal(np.stack(result.values), sums[:, None] * scales)
    for mapped in (jax.vmap, lambda f: functools.partial(jax.lax.map, f)):
        np.testing.assert_array_equal(mapped(lambda k: strategy3.reduce("sum", run(k)))(many), 21 * scales)
        np.testing.assert_array_equal(mapped(lambda k: jnp.stack(run(k).values))(many), scales[:, None] * sums)
    _, rows = mr.scan(lambda c, x: (c, strategy3.run(lambda x: x * 2, args=(x,))), 0, in_step)
    np.testing.assert_array_equal(np.stack(rows.values), 2 * sums[:, None] * scales)
