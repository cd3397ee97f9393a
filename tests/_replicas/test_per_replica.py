"""PerReplica: it shows what every replica holds, and refuses to be taken for one array."""

import copy
import math
import operator
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._replicas.per_replica import stack_shapes

WAYS_OUT = r"strategy\.reduce\(.*strategy\.gather\(.*strategy\.local_results\("


@pytest.fixture
def even(strategy2, per_replica):
    return per_replica(strategy2, np.float32([1, 2]), np.float32([3, 4]))


@pytest.fixture
def uneven(strategy3, per_replica):
    return per_replica(strategy3, np.ones((2, 3), np.int32), np.ones((0, 3), np.int32), np.ones((1, 3), np.int32))


# -- what it shows


def test_shape_and_dtype_are_those_of_one_replica(even):
    assert (even.shape, even.shapes, even.ndim, even.dtype, even.num_replicas) == ((2,), ((2,), (2,)), 1, np.float32, 2)


def test_a_shape_that_differs_is_none_where_it_differs(uneven):
    assert (uneven.shape, uneven.ndim, uneven.num_replicas) == ((None, 3), 2, 3)
    assert uneven.shapes == ((2, 3), (0, 3), (1, 3))


def test_values_are_in_replica_order_each_on_its_own_device(strategy, per_replica):
    x = per_replica(strategy, *range(strategy.num_replicas_in_sync))
    assert [int(value) for value in x.values] == list(range(strategy.num_replicas_in_sync))
    assert [value.devices() for value in x.values] == [{device} for device in strategy.devices]


def test_values_of_different_shapes_have_no_padding(uneven):
    assert [value.shape for value in uneven.values] == [(2, 3), (0, 3), (1, 3)]
    assert all(np.all(np.asarray(value) == 1) for value in uneven.values)


def test_in_a_step_it_is_an_ordinary_array_of_its_own_shape(strategy2, even):
    seen = []
    strategy2.run(lambda x: seen.append((isinstance(x, jax.Array), x.shape)), args=(even,))
    assert set(seen) == {(True, (2,))}


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_repr_shows_every_replica_whatever_their_number(num_replicas, per_replica):
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    x = per_replica(strategy, *[np.int32([i, 10 * i]) for i in range(num_replicas)])
    rows = ",\n".join(f"  {i}: {np.int32([i, 10 * i])}" for i in range(num_replicas))
    assert repr(x) == str(x) == f"{x}" == f"PerReplica(shape=(2,), dtype=int32,\n{rows})"


def test_repr_of_different_shapes_shows_what_is_real(strategy2, per_replica):
    x = per_replica(strategy2, np.float32([]), np.float32([[7]])[0])
    assert repr(x) == "PerReplica(shape=(None,), dtype=float32,\n  0: [],\n  1: [7.])"


def test_repr_aligns_rows_and_abridges_long_ones(strategy2, per_replica):
    matrix = per_replica(strategy2, np.eye(2), np.eye(2))
    assert "  0: [[1. 0.]\n      [0. 1.]]" in repr(matrix)
    long = per_replica(strategy2, np.arange(1000), np.arange(1000))
    assert len(repr(long)) < 200 and "..." in repr(long)


def test_repr_works_where_there_are_no_values(even):
    assert "ShapeDtypeStruct" in repr(jax.eval_shape(lambda: even))
    traced = []
    jax.jit(lambda x: traced.append(repr(x)))(even)
    assert "PerReplica(" in traced[0] and "2,2" in traced[0]
    even._array.delete()
    assert repr(even) == "PerReplica(shape=(2,), dtype=float32, deleted)"


def test_what_is_printed_says_when_other_workers_have_more(strategy2, monkeypatch: pytest.MonkeyPatch) -> None:
    x = strategy2.distribute_values_from_function(lambda context: np.float32(context.replica_id_in_sync_group))
    own = {1: x._local_rows()[1]}
    monkeypatch.setattr(mr.PerReplica, "_local_rows", lambda self: own)
    assert repr(x) == "PerReplica(shape=(), dtype=float32, 1 of 2 replicas are of this worker:\n  1: 1.)"


def test_repr_shows_random_keys(strategy2):
    keys = strategy2.distribute_values_from_function(lambda ctx: jax.random.key(ctx.replica_id_in_sync_group))
    assert "key<fry>" in repr(keys) and "[0 1]" in repr(keys)


# -- what it refuses

_BINARY = [
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
    "lt", "le", "gt", "ge", "eq", "ne",
]  # fmt: skip
_INPLACE = ["iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor"]
_BUILTINS = [
    float, int, complex, bool, len, iter, list, tuple, reversed, sum, max, sorted, abs, round, operator.neg, operator.pos,
    operator.invert, operator.index, operator.not_, math.floor, math.ceil, math.trunc, math.sqrt, hex, "{:.3f}".format,
]  # fmt: skip
_NUMPY = [
    np.asarray, np.array, np.sum, np.mean, np.max, np.exp, np.sqrt, np.isnan, np.size, np.argmax, np.float32,
    lambda x: np.concatenate([x, x]), lambda x: np.stack([x]), lambda x: np.dot(x, x), lambda x: np.where(x, 1, 0),
    lambda x: np.add(1, x), lambda x: np.add.reduce(x), lambda x: np.testing.assert_allclose(x, 1.0),
]  # fmt: skip
_JNP = [
    jnp.asarray, jnp.array, jnp.sum, jnp.mean, jnp.exp, jnp.argmax, lambda x: jnp.concatenate([x, x]),
    lambda x: jnp.stack([x]), lambda x: jnp.dot(x, x), lambda x: jnp.where(x, 1, 0), lambda x: jnp.add(1, x), jax.nn.relu,
]  # fmt: skip


def _name(function):
    return getattr(function, "__name__", str(function))


@pytest.mark.parametrize("name", [*_BINARY, *_INPLACE])
@pytest.mark.parametrize("other", [2, 2.0, np.float32(2), np.ones(2), jnp.ones(2), None], ids=lambda o: type(o).__name__)
def test_every_operator_is_refused_with_the_ways_out(even, name, other):
    with pytest.raises(mr.PerReplicaError, match=WAYS_OUT):
        getattr(operator, name)(even, other)


@pytest.mark.parametrize("name", _BINARY)
@pytest.mark.parametrize("other", [2, 2.0, np.float32(2), np.ones(2), jnp.ones(2)], ids=lambda o: type(o).__name__)
def test_every_operator_is_refused_from_the_right_too(even, name, other):
    with pytest.raises(mr.PerReplicaError, match=WAYS_OUT):
        getattr(operator, name)(other, even)


@pytest.mark.parametrize("function", [*_BUILTINS, *_NUMPY, *_JNP, lambda x: divmod(x, 2), lambda x: divmod(2, x)], ids=_name)
def test_every_use_as_one_array_is_refused_with_the_ways_out(even, function):
    with pytest.raises(mr.PerReplicaError, match=WAYS_OUT):
        function(even)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x[0],
        lambda x: x[..., None],
        lambda x: operator.setitem(x, 0, 1.0),
        lambda x: 1.0 in x,
        lambda x: [1.0, x].index(3.0),
        lambda x: [row for row in x],  # noqa: C416
        lambda x: "yes" if x else "no",
        lambda x: (lambda a, b: None)(*x),
    ],
)
def test_every_piece_of_syntax_for_arrays_is_refused_with_the_ways_out(even, use):
    with pytest.raises(mr.PerReplicaError, match=WAYS_OUT):
        use(even)


def test_the_error_names_the_operation_and_the_shape(even):
    with pytest.raises(TypeError, match=r"PerReplica does not support `\+` \(shape \(2,\) on each replica\)"):
        even + 1


@pytest.mark.parametrize("name", ["mean", "sum", "item", "numpy", "astype", "T", "reshape", "at"])
def test_a_method_of_arrays_is_missing_with_the_ways_out(even, name):
    assert not hasattr(even, name)
    with pytest.raises(AttributeError, match=rf"no attribute {name!r}\. A PerReplica holds .*{WAYS_OUT}"):
        getattr(even, name)


def test_another_missing_attribute_says_just_that(even):
    with pytest.raises(AttributeError, match=r"^PerReplica has no attribute 'vals'\.$"):
        even.vals


def test_the_ways_out_work(strategy2, even):
    assert strategy2.reduce("sum", even).tolist() == [4, 6]
    assert strategy2.reduce("mean", even, axis=0).tolist() == 2.5
    assert strategy2.gather(even, axis=0).tolist() == [1, 2, 3, 4]
    assert [value.tolist() for value in strategy2.local_results(even)] == [[1, 2], [3, 4]]
    assert strategy2.reduce("sum", strategy2.run(lambda x: x.sum() + 1, args=(even,))).tolist() == 12


# -- as a pytree


def test_its_only_leaf_is_the_stacked_array(even, uneven):
    for x in (even, uneven):
        [leaf], treedef = jax.tree.flatten(x)
        assert leaf.shape[0] == x.num_replicas
        again = jax.tree.unflatten(treedef, [leaf])
        assert isinstance(again, mr.PerReplica) and again.shapes == x.shapes and repr(again) == repr(x)


def test_different_shapes_are_part_of_the_structure(strategy2, per_replica):
    a = per_replica(strategy2, np.ones(1), np.ones(2))
    b = per_replica(strategy2, np.ones(2), np.ones(1))
    with pytest.raises(ValueError, match="different pytree metadata"):
        jax.tree.map(lambda x, y: x, a, b)


def test_tree_map_works_on_all_replicas_at_once(strategy2, even):
    doubled = jax.tree.map(lambda stack: 2 * stack, even)
    assert [value.tolist() for value in doubled.values] == [[2, 4], [6, 8]]
    assert strategy2.reduce("sum", doubled).tolist() == [8, 12]


def test_values_are_right_wherever_tree_map_put_them(strategy2, even):
    on_one_device = jax.tree.map(lambda stack: jnp.asarray(np.asarray(stack)), even)
    on_the_host = jax.device_get(even)
    everywhere = jax.tree.map(lambda stack: jax.device_put(stack, strategy2._mesh.mirrored), even)
    for moved in (on_one_device, on_the_host, everywhere):
        assert [np.asarray(value).tolist() for value in moved.values] == [[1, 2], [3, 4]]
        assert repr(moved) == repr(even)
        assert strategy2.reduce("sum", moved).tolist() == [4, 6]
        assert strategy2.run(lambda x: 2 * x, args=(moved,)).values[1].tolist() == [6, 8]


def test_it_passes_through_jit_and_block_until_ready(even, uneven):
    for x in (even, uneven):
        assert repr(jax.jit(lambda y: y)(x)) == repr(jax.block_until_ready(x))


def test_values_inside_a_compiled_function_are_trimmed_too(uneven):
    shapes = []
    mr.function(lambda x: shapes.append([value.shape for value in x.values]))(uneven)
    assert shapes[0] == [(2, 3), (0, 3), (1, 3)]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])  # noqa: S301
def test_it_can_be_copied_and_pickled(uneven, duplicate):
    again = duplicate(uneven)
    assert isinstance(again, mr.PerReplica) and repr(again) == repr(uneven)


def test_it_is_known_by_identity(even):
    again = jax.tree.map(lambda stack: stack, even)
    assert {even: "a", again: "b"}[even] == "a"
    assert weakref.ref(even)() is even


def test_stack_shapes_pads_to_the_largest_and_remembers_only_what_differs():
    assert stack_shapes([(2, 3), (2, 3)]) == ((2, 3), None)
    assert stack_shapes([(2, 3), (4, 0), (0, 1)]) == ((4, 3), ((2, 3), (4, 0), (0, 1)))
    assert stack_shapes([(), ()]) == ((), None)
