"""Variables: who may write what, what a read gives, and that nothing a user holds ever changes behind his back.

What they refuse is in test_bad_input.py.
"""

import copy
import math
import operator
import pickle
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import TWO, strategy_of, variable

import mirrored as mr
from mirrored._replicas.host_memory import empty_rows
from mirrored._variables.spec import without_counters

# An mr.function in a test that runs for many strategies is compiled for each.
pytestmark = [pytest.mark.usefixtures("in_numpy"), pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")]

# Every synchronization, aggregation, method and value, in steps and outside: parity/test_tf_numbers.py.


def adding(v, delta=1.0):
    """Make a step that adds to a variable."""

    def bump():
        v.assign_add(jnp.full(v.shape, delta))

    return bump


def test_a_sum_that_is_assigned_is_read_to_the_bit():
    """The parts are in tests/_replicas/test_cross_replica.py."""
    floats = np.float32([math.inf, -math.inf, math.nan, 0.0, 2e-38, 3.4e38, 0.1, 1e-40, -1e-45])
    for value in (floats, np.int32([2**31 - 1, 7, -7]), np.uint8([255, 7])):
        v = variable(np.zeros_like(value), strategy_of(3), synchronization="on_read", aggregation="sum")
        assert np.asarray(v.assign(value).value).tobytes() == value.tobytes(), "bytes: numpy may take subnormals for zero"


#: What can be taken out of a variable.
TAKE = {
    "value": lambda v: v.value,
    "numpy view": lambda v: np.asarray(v.value),
    "shard": lambda v: v.value.addressable_shards[-1].data,
    "[...]": lambda v: v[...],
    "[:]": lambda v: v[:],
    "+": lambda v: +v,
    "reshape": lambda v: v.reshape(v.shape),
    "astype": lambda v: v.astype(v.dtype),
    "iteration": lambda v: next(iter(v)),
    "jnp.asarray": lambda v: jnp.asarray(v),
    "np.asarray": lambda v: np.asarray(v),
    "leaf": lambda v: jax.tree.leaves({"v": v})[0],
    "device_put": lambda v: jax.device_put(v.value, jax.devices()[0]),
    "local_results": lambda v: TWO.local_results(v)[1],
    "reduce": lambda v: TWO.reduce("mean", v),
    "gather": lambda v: TWO.gather(v, axis=0),
    "block_until_ready": lambda v: v.block_until_ready(),
    "result of run": lambda v: TWO.run(lambda: v.value),
    "result of mr.function": lambda v: mr.function(lambda: v.value)(),
}


@pytest.mark.by_xla
def test_what_was_taken_out_of_a_variable_stays_valid_and_unchanged():
    """A variable, what can be taken out of it at three moments, and copies of that made at once; then many steps."""
    v = variable(np.arange(3, dtype=np.float32).reshape(1, 3))

    def bump():
        v.assign_add(jnp.ones((1, 3)))
        return v.value

    held = []
    for _ in range(3):
        for name, take in [*TAKE.items(), ("result of the step that wrote it", lambda _: TWO.run(bump))]:
            held.append((name, array := take(v), np.array(array)))
            array = None  # only the list holds it
    for _ in range(5):
        TWO.run(bump)
    assert [name for name, array, before in held if not np.array_equal(np.array(array), before)] == []


@pytest.mark.by_xla
def test_arrays_that_went_in_stay_valid_and_unchanged():
    x = jax.device_put(jnp.ones(4), TWO.run(lambda: jnp.zeros(4)).sharding)
    ways = {
        "initial value": lambda v: None,
        "assign": lambda v: v.assign(x).value,
        "assign in a step": lambda v: TWO.run(lambda x: v.assign(x).value, args=(x,)),
        "assign in a function": lambda v: mr.function(lambda x: v.assign(x).value)(x),
        "closure": lambda v: TWO.run(lambda: v.assign(x).value),
    }
    for name, give in ways.items():
        v = variable(x if name == "initial value" else np.zeros(4, np.float32))
        returned = give(v)
        bump = adding(v)
        for _ in range(3):
            TWO.run(bump)
        mr.function(bump)()
        assert v.numpy().tolist() == [5.0] * 4, name
        assert np.array(x).tolist() == [1.0] * 4, name
        assert returned is None or np.array(returned).tolist() == [1.0] * 4, name


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.by_xla
def test_a_numpy_array_may_be_changed_after_it_was_given(num_replicas):
    strategy = strategy_of(num_replicas)
    [mine] = empty_rows(1, (1 << 20,), np.float32)  # aligned: `jax.device_put` takes it as it is, without a copy
    mine[:] = 1
    v = variable(mine, strategy)
    on_read = variable(mine, strategy, synchronization="on_read", aggregation="mean")
    mine[:] = 2
    assert (v.numpy().max(), on_read.numpy().max()) == (1, 1)
    v.assign(mine)
    on_read.assign(mine)
    mine[:] = 3
    assert (v.numpy().max(), on_read.numpy().max()) == (2, 2)
    strategy.run(lambda: v.assign(v + 1))
    assert (v.numpy().max(), mine.max()) == (3, 3)


@pytest.mark.by_xla
def test_two_variables_never_share_what_a_step_overwrites():
    a, b = variable(np.zeros(4, np.float32)), variable(np.ones(4, np.float32))
    bump_a, bump_b = adding(a, 100.0), adding(b)

    def give():
        a.assign(b)

    one = jnp.ones(4)
    shares = [
        lambda: a.assign(b),
        lambda: TWO.run(give),
        mr.function(give),
        lambda: (a.assign(one), b.assign(one)),
        lambda: (a.assign(b.value), b.assign(a.value)),
    ]
    for share in shares:
        TWO.run(bump_b)
        share()
        before = float(b[0])
        assert float(a[0]) == before
        TWO.run(bump_a)
        TWO.run(bump_a)
        assert (float(a[0]), float(b[0])) == (before + 200, before)


def test_a_random_key_is_state(strategy2):
    key = variable(jax.random.key(0), strategy2, name="dropout")
    own = variable(jax.random.key(1), strategy2, synchronization="on_read", aggregation="only_first_replica")

    def step():
        first, second = jax.random.split(key.value)
        key.assign(first)
        own.assign(mr.get_replica_context().rng(own.value, by_rows=False))
        return jax.random.key_data(second), jax.random.key_data(own.value)

    expected, plain = [], jax.random.key(0)
    for _ in range(3):
        plain, second = jax.random.split(plain)
        expected.append(jax.random.key_data(second).tolist())
    got = [strategy2.run(step) for _ in range(2)] + [mr.function(lambda: strategy2.run(step))()]
    assert [common.tolist() for common, _ in got] == expected
    assert all(a.tolist() != b.tolist() for _, different in got for a, b in [different.values])
    assert own.assign(jax.random.key(3)).value == jax.random.key(3) and "key<fry>" in repr(key)
    strategy2.assert_mirrored()
    with pytest.raises(TypeError, match=r"A key to keep is ctx\.rng\(key, by_rows=False\)"):
        strategy2.run(lambda: own.assign(mr.get_replica_context().rng(own.value)))
    number = variable(0.0)
    for wrong in (3, 1.5, np.uint32(1), jax.random.key(0, impl="rbg")):
        with pytest.raises(TypeError, match="random keys"):
            key.assign(wrong)
    with pytest.raises(TypeError, match="random keys"):
        number.assign(jax.random.key(0))


CONVERSIONS = [
    ("int32", 3, 3), ("int32", True, 1), ("int32", 2.0, 2), ("int32", jnp.asarray(3), 3), ("uint8", jnp.asarray(3), 3),
    ("uint8", np.int64(3), 3), ("int8", np.uint8(3), 3), ("bool", True, True), ("bool", 1, True), ("float32", 3, 3.0),
    ("float32", np.float64(1.5), 1.5), ("float32", jnp.bfloat16(2.5), 2.5), ("bfloat16", np.float32(2.5), 2.5),
    ("float16", 1.5, 1.5), ("complex64", 1.5, 1.5), ("complex64", 1j, 1j), ("complex64", jnp.float32(2), 2.0),
]  # fmt: skip
LOSSES = [
    ("int32", 0.5), ("int32", math.nan), ("int32", np.float32(2)), ("int32", jnp.asarray(1.5)), ("int32", np.int64(2**40)),
    ("int8", 300), ("int8", np.int32(300)), ("uint8", -1), ("uint8", jnp.int32(1)), ("bool", 2), ("bool", 0.5),
    ("bool", jnp.int32(1)), ("float32", 1j), ("float32", np.complex64(1)),
]  # fmt: skip


def test_a_value_is_converted_to_a_kind_that_holds_it_and_refused_where_it_would_lose_information():
    for dtype, value, expected in CONVERSIONS:
        v = variable(np.zeros((), jnp.dtype(dtype)))
        assert v.assign(value).numpy() == expected and v.dtype == jnp.dtype(dtype), (dtype, value)
    for dtype, value in LOSSES:
        v = variable(np.ones((), jnp.dtype(dtype)), name="w")
        with pytest.raises(TypeError, match=r"'w'.*(would lose information.*astype|cannot hold)"):
            v.assign(value)
        assert v.numpy() == 1, (dtype, value)


def test_an_initial_value_is_computed_once_and_is_the_same_everywhere(strategy3):
    calls = []

    def initial():
        calls.append(None)
        return np.random.default_rng(len(calls)).normal(size=3)

    values = [copy.tolist() for copy in strategy3.local_results(variable(initial, strategy3))]
    assert (len(calls), len(values)) == (1, 3) and values[0] == values[1] == values[2]


def test_the_dtype_is_the_values_own_unless_given():
    for value, dtype, expected in [
        (1, None, "int32"), (1.0, None, "float32"), (True, None, "bool"), (1j, None, "complex64"), ([1, 2.5], None, "float32"),
        (np.float64(1), None, "float32"), (np.arange(3), None, "int32"), (jnp.ones(2, jnp.bfloat16), None, "bfloat16"),
        (1, "float16", "float16"), (np.ones(2), jnp.bfloat16, "bfloat16"), (jnp.ones(2), "int8", "int8"),
        (lambda: np.int8(3), None, "int8"),
    ]:  # fmt: skip
        assert variable(value, dtype=dtype).dtype == jnp.dtype(expected), (value, dtype)


def test_names_and_hints():
    named, first, second = variable(0.0, name="w"), variable(0.0), variable(0, synchronization="on_read")
    assert named.name == "w" and first.name != second.name
    assert [v.trainable for v in (named, second, variable(0.0, trainable=False))] == [True, False, False]
    modes = mr.VariableSynchronization
    assert (named.synchronization, second.synchronization) == (modes.ON_WRITE, modes.ON_READ)
    assert variable(0.0, aggregation="Mean").aggregation is mr.VariableAggregation.MEAN
    with pytest.raises(ValueError, match="such values cannot be added"):
        variable(jax.random.key(0), aggregation="sum")


def test_arrays_of_another_strategy_are_moved():
    there = variable(3.0, mr.MirroredStrategy(["cpu:6", "cpu:7"]))
    here = variable(there)
    assert float(here.assign_add(there.value)) == 6.0 and here.devices() == set(TWO.devices)


W = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
X = np.ones((4, 2), np.float32)


def both_ways(name):
    of_two = getattr(operator, name)
    return lambda w: jnp.stack([of_two(w, 2), of_two(2, w), of_two(w, W), of_two(W, w)])


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne")
UNARY = {"neg": operator.neg, "abs": abs, "divmod": lambda w: jnp.stack([*divmod(w, 2), *divmod(2, w)])}
READS = UNARY | {
    **{name: both_ways(name) for name in BINARY},
    "x @ w": lambda w: X @ w,
    "jnp x @ w": lambda w: jnp.asarray(X) @ w,
    "w @ x": lambda w: w.T @ X.T,
    "np.float32 * w": lambda w: np.float32(2) * w,
    "jnp.matmul": lambda w: jnp.matmul(X, w),
    "jnp.where": lambda w: jnp.where(w > 2, w, 0),
    "jnp.concatenate": lambda w: jnp.concatenate([w, w]),
    "jit": lambda w: jax.jit(lambda w: w * 2)(w),
    "grad": lambda w: jax.grad(lambda w: jnp.sum(w**2))(w),
    "vmap": lambda w: jax.vmap(jnp.sum)(w),
    "tree.map": lambda w: jax.tree.map(lambda x: x + 1, {"a": [w]})["a"][0],
    "w[:, 1:]": lambda w: w[:, 1:],
    "w.mean()": lambda w: w.mean(),
    "w.at": lambda w: w.at[0].set(0),
    "stack of rows": lambda w: jnp.stack(list(w)),
}


def test_a_variable_reads_like_its_value():
    w = variable(W)

    def reads(w):
        return {name: read(w) for name, read in READS.items()}

    expected = jax.jit(reads)(W)
    outside = {name: READS[name](w) for name in ("sub", "x @ w", "np.float32 * w", "grad", "w[:, 1:]")}
    for got in (TWO.run(lambda: reads(w)), outside):
        for name, array in got.items():
            assert isinstance(array, jax.Array), name
            np.testing.assert_allclose(array, expected[name], rtol=1e-6, err_msg=name)
    np.testing.assert_array_equal(w * variable(2.0) + w, W * 3)


IN_PLACE = {
    "isub": r"`-=` on variable 'w' .* Write variable\.assign_sub\(x\); or y = variable - x",
    "iadd": r"`\+=` .* Write variable\.assign_add\(x\)",
    "imul": r"`\*=` .* Write variable\.assign\(variable \* x\)",
    "imatmul": r"`@=` .* Write variable\.assign\(variable @ x\)",
}


def test_an_operator_in_place_is_refused_with_the_line_and_changes_nothing(strategy2):
    w = variable(np.ones(2, np.float32), strategy2, name="w")
    for name, line in IN_PLACE.items():
        for call in (lambda function: function(), strategy2.run):
            with pytest.raises(TypeError, match=line):
                call(lambda name=name: getattr(operator, name)(w, 2.0))
    assert w.numpy().tolist() == [1, 1]


def test_an_item_is_not_assigned_and_the_line_that_is_named_works(strategy):
    w = variable(np.zeros(3, np.float32), strategy, name="w")

    def changed():
        w[0] += 1.0

    for wrong in (lambda: operator.setitem(w, 0, 1.0), lambda: operator.setitem(w, (slice(1), 0), 1.0), changed):
        for call in (lambda function: function(), strategy.run):
            with pytest.raises(TypeError, match=r"on variable 'w' .*variable\.assign\(variable\.value\.at\[i\]\.set\(x\)\)"):
                call(wrong)
    assert w.numpy().tolist() == [0, 0, 0]
    for call in (lambda function: function(), strategy.run):
        call(lambda: w.assign(w.value.at[0].add(1.0)))
        call(lambda: w.assign(w.value.at[1:].set(2.0)))
    assert w.numpy().tolist() == [2, 2, 2]


def test_host_conversions():
    w, s, i, b = variable(W), variable(2.5), variable(3), variable(True)
    assert (float(s), int(i), complex(s), bool(b), [0, 1, 2, 3][i], round(float(s) - 0.1)) == (2.5, 3, 2.5 + 0j, True, 3, 2)
    assert (f"{s:.2f}", f"{i}"[:11], len(w), list(range(i))) == ("2.50", "mr.Variable", 2, [0, 1, 2])
    assert np.array_equal(np.asarray(w), W)
    assert np.asarray(w, dtype=np.float64).dtype == np.float64
    assert np.sqrt(s) == np.sqrt(np.float32(2.5))
    assert np.array_equal(np.matmul(X, w), X @ W)
    assert (w.shape, w.ndim, w.size, w.nbytes, w.devices()) == ((2, 3), 2, 6, 24, set(TWO.devices))
    assert w.tolist() == W.tolist()
    with pytest.raises(TypeError, match=r"is a scalar and has no len\(\)"):
        len(s)


def test_equality_compares_values_and_hashes_are_of_the_variables(strategy3):
    a, b, w = variable(1.0, strategy3), variable(1.0, strategy3), variable([1.0, 2.0], strategy3)
    assert (a == b, a == 1.0, a != b, a == 2.0) == (True, True, False, False)
    assert (w == np.array([1.0, 3.0])).tolist() == [True, False] and (w != w).tolist() == [False, False]
    assert (a == None, a == "text", a != None) == (False, False, True)  # noqa: E711
    assert {a: "a", b: "b", w: "w"}[a] == "a" and len({a, b, w, a}) == 3
    assert w == w and weakref.WeakKeyDictionary({w: 1})[w] == 1
    static = jax.jit(lambda x, v: x + v.shape[0], static_argnums=1)
    assert [int(strategy3.run(lambda: static(1, w) + static(2, w))), static(3, w)] == [7, 5]
    assert strategy3.run(lambda: mr.cond(a == 1.0, lambda: 5, lambda: 6)) == 5


def test_a_number_that_is_assigned_gives_no_weak_type(strategy2):
    v = variable(jnp.asarray(1.0), strategy2)
    for call in (strategy2.run, lambda assign: assign()):
        call(lambda: [v.assign(jnp.asarray(2.0) * 3)][1:])
        assert not v.value.weak_type


def test_what_a_variable_is_not(strategy2, per_replica):
    v, x = variable(0.0, strategy2, name="w"), per_replica(strategy2, 1.0, 2.0)
    for operation in (lambda: v + x, lambda: x + v, lambda: x @ v):
        with pytest.raises(mr.PerReplicaError, match=r"strategy\.reduce"):
            operation()
    for name in ("foo", "delete", "is_deleted", "_private", "__wrapped__"):
        with pytest.raises(AttributeError, match=r"mr\.Variable has no attribute"):
            getattr(v, name)
    for name in ("value", "shape", "foo"):
        with pytest.raises(AttributeError):
            setattr(v, name, 1.0)
    for duplicate in (copy.copy, copy.deepcopy, lambda v: copy.deepcopy({"v": [v]}), pickle.dumps):
        with pytest.raises(TypeError, match=r"'w' cannot be copied or pickled.*mr\.Variable\(variable\.value\)"):
            duplicate(v)


def test_repr_shows_each_copy(strategy3, per_replica):
    v = variable(np.zeros(2, np.float32), strategy3, name="m", synchronization="on_read", aggregation="sum")
    strategy3.run(lambda x: v.assign(x), args=(per_replica(strategy3, *np.eye(3, 2, dtype=np.float32)),))
    assert repr(v) == (
        "mr.Variable(name='m', shape=(2,), dtype=float32, synchronization=ON_READ, aggregation=SUM,\n"
        "  0: [1. 0.],\n  1: [0. 1.],\n  2: [0. 0.])"
    )
    seen = []
    strategy3.run(lambda: seen.append(repr(v)))
    assert seen[0].endswith("aggregation=SUM, traced)")


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("w_1", "w_1"),  # a name that the user has given
        ("block_2.kernel", "block_2.kernel"),
        ("variable_17", "variable"),
        ("variable_3['w_1']", "variable['w_1']"),
        ("sequential_1/dense_12/kernel", "sequential/dense/kernel"),
    ],
)
def test_workers_give_one_name_except_for_what_counts_in_it(name: str, shared: str) -> None:
    assert without_counters(name) == shared
