"""Collectives written inside one replica: all_reduce, all_gather, merge_call; in loops, conditions and nested jit.

What they refuse is in test_bad_input.py.
"""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import all_reduce, ctx, values_of, variable

import mirrored as mr
from mirrored._program.program import collectives_of
from mirrored._replicas import collectives as _collectives

pytestmark = pytest.mark.usefixtures("in_numpy")


def number():
    """This replica's number plus one, a float that differs by replica."""
    return ctx().replica_id_in_sync_group + 1.0


def all_gather(value, axis=0):
    return ctx().all_gather(value, axis)


def merge_call(*arguments, **named):
    return ctx().merge_call(*arguments, **named)


def collectives(strategy, step):
    """Run a step; return the names of the collectives in its program, in order."""
    before = [id(program) for program in strategy._steps.programs]
    strategy.run(step)
    [program] = [program for program in strategy._steps.programs if id(program) not in before]
    return [collective.name for collective in collectives_of(program)]


# -- nests and dtypes

Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    a: object
    b: object


def mixed_tree():
    """Everything that may be reduced, in every kind of nest."""
    n = number()
    return {
        "float": n,
        "int": (n.astype(jnp.int32), [n.astype(jnp.int8)]),
        "half": Point(n.astype(jnp.float16), n.astype(jnp.bfloat16)),
        "matrix": Pair(jnp.full((2, 3), n), jnp.zeros((0, 4))),
        "complex": n * 1j,
        "bool": n > 1,
        "numpy": np.float32([1, 2]),
        "python": [1, 2.0, True],
        "none": None,
        "nothing": (),
    }


def test_a_mixed_tree_is_reduced_leaf_by_leaf_and_keeps_its_structure_and_dtypes(strategy3):
    total, mean = strategy3.run(lambda: [all_reduce(op, mixed_tree()) for op in ("sum", "mean")])
    assert total["float"] == 6 and total["float"].dtype == np.float32
    assert total["int"][0].tolist() == 6 and [x.dtype for x in (total["int"][0], total["int"][1][0])] == [np.int32] * 2
    assert isinstance(total["half"], Point) and [x.dtype for x in total["half"]] == [jnp.float16, jnp.bfloat16]
    assert isinstance(total["matrix"], Pair) and total["matrix"].a.tolist() == [[6] * 3] * 2 and total["matrix"].b.shape == (0, 4)
    assert total["bool"] == 2 and total["bool"].dtype == np.int32
    assert total["complex"] == 6j and total["numpy"].tolist() == [3, 6]
    assert [x.tolist() for x in total["python"]] == [3, 6, 3] and total["none"] is None and total["nothing"] == ()
    assert mean["int"][0] == 2.0 and mean["int"][0].dtype == np.float32 and mean["int"][1][0].dtype == np.float32
    assert mean["half"].x.dtype == jnp.float16 and mean["bool"] == np.float32(2 / 3) and mean["python"][2] == 1.0


@pytest.mark.by_xla
def test_complex_constants_are_added_up(strategy3):
    """XLA on CPU ends the process when it is asked to do it in one complex all-reduce."""
    totals = strategy3.run(lambda: [all_reduce(op, jnp.full(20_000, 1 - 2j)) for op in ("sum", "mean")])
    for total, factor in zip(totals, (3, 1), strict=True):
        assert total.dtype == jnp.complex64 and np.all(total == factor * (1 - 2j))


def test_gathers_along_any_axis_and_the_gradient_of_the_first(strategy3):
    """The other numbers, and gradients, are in parity/test_tf_numbers.py."""
    axis = _collectives.ReplicaAxis(3)
    first_of = lambda y: _collectives.aggregate(mr.VariableAggregation.ONLY_FIRST_REPLICA, y, axis)  # noqa: E731

    def step():
        pair = jnp.stack([number(), 10 * number()])[None]
        gradient = jax.grad(lambda y: number() * first_of(y * number()))(2.0)
        return [all_gather(pair, axis) for axis in (0, 1, -1, -2)], gradient

    gathered, gradient = strategy3.run(step)
    rows = np.float32([[i, 10 * i] for i in (1, 2, 3)])
    for result, expected in zip(gathered, [rows, rows.reshape(1, -1), rows.reshape(1, -1), rows], strict=True):
        np.testing.assert_array_equal(result, expected)
    assert values_of(gradient) == [1 + 2 + 3, 0, 0]


def test_all_gather_takes_nests_of_any_dtype_and_random_keys(strategy3):
    dtypes = ["bool", "int8", "bfloat16", "complex64", "float16"]

    def step():
        x = jnp.atleast_1d(number() - 1)
        tree = {"a": [x.astype(dtype) for dtype in dtypes], "b": [np.ones((1, 2), dtype) for dtype in dtypes], "none": None}
        return all_gather(tree), all_gather(ctx().rng(0)[None])

    got, keys = strategy3.run(step)
    for dtype, a, b in zip(dtypes, got["a"], got["b"], strict=True):
        assert a.dtype == dtype and b.shape == (3, 2) and got["none"] is None
        np.testing.assert_array_equal(np.asarray(a), np.arange(3).astype(dtype))
    drawn = jax.jit(jax.vmap(lambda key: jax.random.bits(key, (2,))))(keys)
    np.testing.assert_array_equal(drawn.ravel(), jax.random.bits(jax.random.key(0), (6,)))


# -- packing: few collectives


def test_a_tree_travels_in_one_collective_for_each_dtype_that_is_added(strategy2):
    """XLA has no all-reduce of several dtypes; complex numbers are pairs of float32, and a MEAN adds up real ones in float32,
    integers in their own."""
    count = 5 * _collectives.MAX_ARRAYS_PER_PACK + 1
    many = lambda: all_reduce("sum", [jnp.full((2, 2), i) * number() for i in range(count)])  # noqa: E731
    dtypes_of_sums = ["float32", "int32", "float16", "bfloat16"]
    for step, num_buffers in (
        (lambda: all_reduce("sum", mixed_tree()), len(dtypes_of_sums)),
        (lambda: all_reduce("mean", mixed_tree()), 3),  # two packs in float32, one of integers
        (lambda: all_reduce("sum", {"a": None, "b": []}), 0),
        (many, 6),
    ):
        assert collectives(strategy2, step) == ["psum"] * num_buffers
    assert [float(result[0, 0]) for result in strategy2.run(many)] == [3.0 * i for i in range(count)]


def test_small_arrays_of_one_dtype_are_packed_and_large_ones_travel_as_they_are(strategy3):
    large = np.arange(_collectives.PACK_BELOW_BYTES // 4, dtype=np.float32)
    tree = [np.ones((2, 3), np.float32), large, np.arange(4), np.float32(5), np.ones(5, np.int32)]

    def operands(**options):
        axis = _collectives.ReplicaAxis(3, **options)
        step = lambda: _collectives.all_reduce(mr.ReduceOp.SUM, tree, axis)  # noqa: E731
        equations = jax.make_jaxpr(step, axis_env=[("replica", 3)])().eqns
        return [(e.invars[0].aval.shape, str(e.invars[0].aval.dtype)) for e in equations if e.primitive.name == "psum"]

    assert operands() == [((7,), "float32"), (large.shape, "float32"), ((9,), "int32")]
    whole = [((2, 3), "float32"), (large.shape, "float32"), ((4,), "int32"), ((), "float32"), ((5,), "int32")]
    assert operands(bytes_per_pack=1) == whole, "each group ends when it has so many bytes"
    assert operands(bytes_per_pack=16) == [*whole[:2], whole[2], *whole[3:]]
    assert operands(bytes_per_pack=17)[2:] == [((9,), "int32"), ((), "float32")]
    packed = strategy3.run(lambda: all_reduce("sum", jax.tree.map(lambda x: x * ctx().replica_id_in_sync_group, tree)))
    for result, leaf in zip(packed, tree, strict=True):
        np.testing.assert_array_equal(np.asarray(result), 3 * leaf)


# -- in loops, conditions and nested jit


def merged_sum():
    return merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(number(),))


def in_switch_in_scan():
    branches = [lambda: all_reduce("sum", number()), lambda: all_gather(number()[None]).sum()]
    return jax.lax.scan(lambda total, i: (total + jax.lax.switch(i % 2, branches), None), 0.0, jnp.arange(3))[0]


PLACES = {
    "scan": lambda: jax.lax.scan(lambda total, _: (total + all_reduce("sum", number()), None), 0.0, None, length=3)[0],
    "fori_loop": lambda: jax.lax.fori_loop(0, 3, lambda _, total: total + all_reduce("sum", number()), 0.0),
    "while_loop": lambda: jax.lax.while_loop(lambda s: s < 18, lambda s: s + all_reduce("sum", number()), 0.0),
    "nested jit": lambda: 3 * jax.jit(jax.jit(lambda x: all_reduce("sum", x)))(number()),
    "cond": lambda: jax.lax.cond(all_reduce("sum", number()) > 0, lambda: 3 * all_reduce("sum", number()), lambda: 0.0),
    "switch in scan": in_switch_in_scan,
    "checkpoint": lambda: 3 * jax.checkpoint(lambda x: all_reduce("sum", x))(number()),
    "vmap": lambda: jax.vmap(lambda x: all_reduce("sum", x * number()))(jnp.ones(3)).sum(),
    "reduce in scan": lambda: jax.lax.scan(lambda c, _: (c + mr.get_strategy().reduce("sum", number()), None), 0.0, None, 3)[0],
    "merge_call in scan": lambda: jax.lax.scan(lambda c, _: (c + merged_sum(), None), 0.0, None, 3)[0],
}  # fmt: skip


def test_collectives_work_in_every_kind_of_control_flow(strategy3):
    steps = PLACES | {"merge_call": lambda: 3 * merged_sum()}
    assert strategy3.run(lambda: {name: step() for name, step in steps.items()}) == dict.fromkeys(steps, 18)
    few = {name: steps[name] for name in ("scan", "cond", "merge_call")}
    with mr.eager():
        assert strategy3.run(lambda: {name: step() for name, step in few.items()}) == dict.fromkeys(few, 18)


# -- merge_call


def test_merge_call_hands_each_replica_its_own_part_and_may_use_variables_and_run_a_step(strategy3):
    w, mean = variable(1.0, strategy3), variable(0.0, strategy3, aggregation="mean")
    seen = variable(0.0, strategy3, synchronization="on_read", aggregation="sum")

    def inner(x):
        mean.assign_add(x)
        return all_reduce("sum", x) + ctx().replica_id_in_sync_group

    def merge(strategy, variable, tree):
        variable.assign(variable + strategy.reduce("sum", tree["x"]))
        seen.assign(9.0)
        ran = strategy.run(inner, args=(tree["x"],))
        return {"own": tree["x"], "nested": [ran, {"flag": tree["flag"]}], "same": [7, None, variable.assign_add(1.0)]}

    def step():
        result = merge_call(merge, args=(w,), kwargs={"tree": {"x": number(), "flag": number() > 1}})
        assert result["same"] == [7, None, w]
        return result["own"], *result["nested"], w.value, seen.value

    own, ran, nested, value, parts = strategy3.run(step)
    assert [values_of(x) for x in (own, ran, nested["flag"], parts)] == [[1, 2, 3], [6, 7, 8], [0, 1, 1], [3, 3, 3]]
    assert value == w.numpy() == 8 and seen.numpy() == 9 and mean.numpy() == 2
    strategy3.assert_mirrored()


def test_what_goes_wrong_in_merge_call_reaches_the_user(strategy2, per_replica):
    def merge(strategy):
        raise KeyError("in merge")

    def with_outer_context():
        outer = ctx()
        return outer.merge_call(lambda strategy: outer.all_reduce("sum", 1.0))

    uneven = per_replica(strategy2, np.ones(1), np.ones(2))
    w = variable(0.0, strategy2, name="w")
    diverge = lambda: [merge_call(lambda strategy, x: w.assign(x), args=(number(),))]  # noqa: E731
    for step, error, message in (
        (diverge, mr.ReplicasDivergeError, r"assign to variable 'w' was given a PerReplica.*strategy\.reduce\('mean'"),
        (lambda: merge_call(merge), KeyError, "in merge"),
        (with_outer_context, mr.ContextError, r"all_reduce of the replica context of .* outside the step"),
        (lambda: merge_call(lambda strategy: uneven), mr.UnevenReplicasError, r"\(\(1,\), \(2,\)\) cannot be handed to the"),
    ):
        with pytest.raises(error, match=message):
            strategy2.run(step)
    assert w.numpy() == 0


# -- a context out of its place


def test_a_context_is_of_no_use_outside_its_step(strategy2, strategy3):
    uses = {
        "all_reduce": lambda ctx: ctx.all_reduce("sum", 1.0),
        "all_gather": lambda ctx: ctx.all_gather(np.ones(1), axis=0),
        "merge_call": lambda ctx: ctx.merge_call(lambda strategy: 1),
        "replica_id_in_sync_group": lambda ctx: ctx.replica_id_in_sync_group,
        "rng": lambda ctx: ctx.rng(0),
    }
    kept = []
    strategy2.run(lambda: [kept.append(ctx()), [use(kept[-1]) for use in uses.values()]][0])
    default = ctx()
    for name, use in uses.items():
        verb = "replica_id_in_sync_group" if name == "rng" else name
        of_two = rf"{verb} of the replica context of mr\.MirroredStrategy\(2 replicas .* outside the step .*mr\.get_replica_cont"
        use(default)
        for wrong in (lambda use=use: use(kept[0]), lambda use=use: strategy3.run(lambda: use(kept[0]))):
            with pytest.raises(mr.ContextError, match=of_two):
                wrong()
        with (
            strategy2.scope(),
            pytest.raises(mr.ContextError, match=r"of the replica context of mr\.DefaultStrategy\(1 replica "),
        ):
            use(default)


def test_the_default_context_is_one_replica_that_reaches_itself():
    default = ctx()
    assert default.strategy is mr.get_strategy() and default.num_replicas_in_sync == 1 and default.replica_id_in_sync_group == 0
    assert default.all_reduce("sum", [2, 3.0])[1] == default.all_reduce("mean", 3.0) == 3.0
    assert default.all_gather(np.arange(3), axis=0).tolist() == [0, 1, 2]
    assert default.merge_call(lambda strategy, x: strategy.reduce("sum", x), args=(jnp.float32(4),)) == 4
    inner = lambda x: all_reduce("sum", x) + ctx().replica_id_in_sync_group  # noqa: E731
    assert default.merge_call(lambda strategy, x: strategy.run(inner, args=(x,)), args=(jnp.float32(3),)) == 3
