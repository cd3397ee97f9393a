"""The numbers of real TensorFlow, recorded in tf_recorded.json, come out here too; or a better answer, said case by case.

Each table pairs the name of a recorded case with the same program written with this library. A case under a heading
"not so here" also asserts what TensorFlow did, so that nobody mistakes an agreement for a difference.
"""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import nightly
from strategies import all_reduce, numbers, strategy_of, values_of, variable

import mirrored as mr

pytestmark = pytest.mark.usefixtures("in_numpy")

METHODS = ("assign", "assign_add", "assign_sub")
RECORDED = json.loads((pathlib.Path(__file__).parent / "tf_recorded.json").read_text())


def values(strategy, value_fn):
    return strategy.distribute_values_from_function(lambda ctx: value_fn(ctx.replica_id_in_sync_group))


def vec(strategy):
    return values(strategy, lambda i: np.float32([i, 10 * i]))


def uneven(strategy, dtype="float32"):
    return values(strategy, lambda i: np.full(i + 1, i, dtype))


def replica_id():
    return mr.get_replica_context().replica_id_in_sync_group.astype(jnp.float32)


def merge_call(merge_fn, *args):
    return mr.get_replica_context().merge_call(merge_fn, args=args)


def copies(strategy, variable):
    return [np.asarray(value).tolist() for value in strategy.local_results(variable)]


def plain(tree):
    """Turn a result into lists and numbers, a PerReplica into the list of its values."""
    return jax.tree.map(
        lambda x: [np.asarray(value).tolist() for value in x.values] if isinstance(x, mr.PerReplica) else np.asarray(x).tolist(),
        tree,
        is_leaf=lambda x: isinstance(x, mr.PerReplica),
    )


def assert_equal(result, expected):
    result = plain(result)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, complex(theirs) if isinstance(theirs, str) else theirs, rtol=1e-6)


def all_cases(check, cases):
    """Check each case, and name all that fail."""
    failed = []
    for case in cases:
        try:
            check(*case)
        except Exception as error:
            failed.append(f"{case[0]}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


# -- reduce and gather

REDUCE = {
    "sum_none_scalar": lambda s: s.reduce("SUM", values(s, lambda i: i + 1.0), axis=None),
    "sum_complex": lambda s: s.reduce("SUM", values(s, lambda i: np.complex64(1 + 2j))),
    "sum_axis0_vec": lambda s: s.reduce("SUM", vec(s), axis=0),
    "mean_axis0_vec": lambda s: s.reduce("MEAN", vec(s), axis=0),
    "sum_axis0_uneven": lambda s: s.reduce("SUM", uneven(s), axis=0),
    "mean_axis0_uneven_true_denominator": lambda s: s.reduce("MEAN", uneven(s), axis=0),
    "mean_of_means_differs": lambda s: s.reduce("MEAN", values(s, lambda i: np.mean(np.full(i + 1, i, np.float32)))),
    "mean_axis0_int32": lambda s: s.reduce("MEAN", uneven(s, "int32"), axis=0),
    "mean_none_int32": lambda s: s.reduce("MEAN", values(s, lambda i: i + 1), axis=None),
    "mean_axis0_bf16": lambda s: s.reduce("MEAN", uneven(s, "bfloat16"), axis=0).astype(jnp.float32),
    "mean_none_f16": lambda s: s.reduce("MEAN", values(s, lambda i: np.float16(i + 1)), axis=None),
    "axis_tuple_mean": lambda s: s.reduce("MEAN", values(s, lambda i: np.full((2, 3), float(i))), axis=(0, 1)),
    "axis1_sum": lambda s: s.reduce("SUM", values(s, lambda i: np.full((2, 3), i + 1.0)), axis=1),
    "axis_neg1_mean": lambda s: s.reduce("MEAN", values(s, lambda i: np.full((2, 3), i + 1.0)), axis=-1),
    "empty_replica_mean_axis0": lambda s: s.reduce(
        "MEAN", values(s, lambda i: np.float32([] if i == s.num_replicas_in_sync - 1 else [2, 4])), axis=0
    ),
    "all_empty_mean_axis0": lambda s: s.reduce("MEAN", values(s, lambda i: np.zeros(0)), axis=0),
    "empty_rank2_mean_axis0": lambda s: s.reduce("MEAN", values(s, lambda i: np.zeros((0, 3)) if i else np.ones((2, 3))), axis=0),
    "nest_value_axis_none": lambda s: s.reduce("SUM", {"a": vec(s), "b": [values(s, lambda i: 1.0)]}, axis=None),
    "plain_tensor_mean_axis0": lambda s: s.reduce("MEAN", jnp.float32([1, 2]), axis=0),
    "run_result_constant_tensor_unwrapped_ok": lambda s: s.reduce("SUM", s.run(lambda: jnp.float32(1.5)), axis=None),
    "mirrored_variable_mean": lambda s: s.reduce("MEAN", variable(2.0, s), axis=None),
    "sync_on_read_variable_sum": lambda s: s.reduce(
        "SUM", variable(2.0, s, synchronization="on_read", aggregation="mean"), axis=None
    ),
    "reduce_in_function": lambda s: mr.function(lambda v: s.reduce("MEAN", v, axis=0))(uneven(s)),
    "gather_axis0": lambda s: s.gather(vec(s), axis=0),
    "gather_uneven_axis0": lambda s: s.gather(uneven(s), axis=0),
    "gather_axis1_uneven": lambda s: s.gather(values(s, lambda i: np.full((2, i + 1), float(i))), axis=1),
    "gather_empty_replica": lambda s: s.gather(values(s, lambda i: np.ones((1, 2)) if i else np.zeros((0, 2))), axis=0),
    "gather_variable": lambda s: s.gather(variable(np.float32([1, 2]), s), axis=0),
    "gather_in_function": lambda s: mr.function(lambda v: s.gather(v, axis=0))(uneven(s)),
}


@pytest.mark.parametrize("num_replicas", ["3", *nightly("2")])
def test_reduce_and_gather_give_the_numbers_of_tensorflow(num_replicas):
    strategy, recorded = strategy_of(int(num_replicas)), RECORDED["reduce_and_gather"]
    names = [name for name in REDUCE if num_replicas in recorded[name]]
    assert names
    all_cases(lambda name: assert_equal(REDUCE[name](strategy), recorded[name][num_replicas]), [(name,) for name in names])


#: What TensorFlow refuses, crashes on or gets wrong, and why it has an answer here: one rule for mirrored values (SUM is R times
#: it), Python numbers and nests everywhere, every dtype and shape in gather, a sum of bools counts.
REDUCE_NOT_SO_HERE = {
    "sum_none_bool": (lambda s: s.reduce("SUM", values(s, lambda i: True), axis=None), 2),
    "nest_value_axis0_mean": (lambda s: s.reduce("MEAN", {"a": vec(s)}, axis=0), {"a": 2.75}),
    "plain_tensor_sum": (lambda s: s.reduce("SUM", jnp.float32(3), axis=None), 6.0),
    "mirrored_variable_sum": (lambda s: s.reduce("SUM", variable(2.0, s), axis=None), 4.0),
    "gather_plain_tensor": (lambda s: s.gather(jnp.float32([1, 2]), axis=0), [1, 2, 1, 2]),
    "gather_nest": (lambda s: s.gather({"a": vec(s)}, axis=0), {"a": [0, 0, 1, 10]}),
    "gather_bool": (lambda s: s.gather(values(s, lambda i: np.array([bool(i)])), axis=0), [False, True]),
    "gather_axis_neg": (lambda s: s.gather(values(s, lambda i: np.full((2, 1), float(i))), axis=-1), [[0, 1], [0, 1]]),
}


def test_what_tensorflow_cannot_reduce_or_gather_works_here(strategy2):
    """See REDUCE_NOT_SO_HERE."""

    def check(name, program, ours):
        theirs = RECORDED["reduce_and_gather"][name]["2"]
        assert theirs != ours and ("error" in theirs or name in ("gather_plain_tensor", "gather_nest"))
        np.testing.assert_equal(plain(program(strategy2)), ours)

    all_cases(check, [(name, *case) for name, case in REDUCE_NOT_SO_HERE.items()])


#: What both refuse; here by a `ValueError` or `TypeError` that says what to do, and without harm to later collectives.
REFUSED_BY_BOTH = {
    "sum_none_uneven_shapes": (lambda s: s.reduce("SUM", uneven(s), axis=None), mr.UnevenReplicasError, r"\(1,\), \(2,\)"),
    "gather_mismatch_other_dim": (
        lambda s: s.gather(values(s, lambda i: np.full((2, i + 1), 1.0)), axis=0),
        mr.UnevenReplicasError,
        r"\(2, 1\), \(2, 2\)",
    ),
    "axis_oob_mean": (lambda s: s.reduce("MEAN", vec(s), axis=1), ValueError, "its only axis is 0"),
    "axis0_scalar_sum": (lambda s: s.reduce("SUM", values(s, float), axis=0), ValueError, "it is a scalar"),
    "axis_float": (lambda s: s.reduce("MEAN", vec(s), axis=0.5), TypeError, "expected an int"),
    "sum_none_string": (lambda s: s.reduce("SUM", values(s, lambda i: "a")), TypeError, "expected arrays or numbers"),
    "dtype_mismatch": (lambda s: s.reduce("SUM", values(s, lambda i: 1 if i else 1.0)), TypeError, "different dtypes"),
    "gather_scalar": (lambda s: s.gather(values(s, float), axis=0), ValueError, "it is a scalar"),
}


def test_what_tensorflow_refuses_is_refused_here_and_does_no_harm(strategy2):
    """TensorFlow's collectives are all dead after a gather of shapes that do not fit; here the next one works."""

    def check(name, program, error, message):
        assert "error" in RECORDED["reduce_and_gather"][name]["2"]
        with pytest.raises(error, match=message):
            program(strategy2)
        assert strategy2.gather(vec(strategy2), axis=0).tolist() == RECORDED["reduce_and_gather"]["gather_axis0"]["2"]

    all_cases(check, [(name, *case) for name, case in REFUSED_BY_BOTH.items()])


# -- in a step


def gradient_of_all_reduce(op, weight):
    def step():
        def loss(x):
            y = all_reduce(op, x * x)
            return weight() * y, y

        (_, y), gradient = jax.value_and_grad(loss, has_aux=True)(replica_id() + 1)
        return [y, gradient]

    return step


def thrice():
    total = jnp.float32(0)
    for _ in range(3):
        total = total + all_reduce("SUM", replica_id())
    return total


def nest():
    result = all_reduce("SUM", {"a": replica_id(), "b": (1.0, [jnp.float32([2, 3])])})
    return {"a": result["a"], "b": {"tuple": list(result["b"])}}


STEPS = {
    "ar_nested": nest,
    "ar_sum_fn": lambda: all_reduce("SUM", replica_id() + 1),
    "ar_mean_eager": lambda: all_reduce("MEAN", replica_id() + 1),
    "ar_mean_int32": lambda: all_reduce("MEAN", replica_id().astype(jnp.int32) + 1),
    "ar_numpy": lambda: all_reduce("SUM", np.ones(2, np.float32)),
    "ar_in_python_loop_fn": thrice,
    "ar_gradient_sum": gradient_of_all_reduce("SUM", lambda: replica_id() + 1),
    "ar_gradient_mean": gradient_of_all_reduce("MEAN", lambda: replica_id() + 1),
    "ar_gradient_eager": gradient_of_all_reduce("SUM", lambda: 1.0),
    "ag_axis0": lambda: mr.get_replica_context().all_gather(jnp.stack([replica_id(), jnp.float32(10)]), axis=0),
    "mc_return_perreplica_unpacked": lambda: merge_call(lambda s, x: jax.tree.map(lambda stack: 10 * stack, x), replica_id() + 1),
    "mc_return_nested": lambda: merge_call(lambda s, x: {"a": x, "b": 1}, replica_id()),
    "mc_run_in_merge_read_values": lambda: merge_call(lambda s, x: s.run(lambda y: y * 2, args=(x,)), replica_id() + 1),
    "mc_basic": lambda: merge_call(lambda s, x: s.reduce("SUM", x, axis=None), replica_id() + 1),
}


def as_recorded(strategy, result):
    """Write a mirrored array as TensorFlow does: the same value for each replica; other leaves as they are."""
    count = strategy.num_replicas_in_sync
    return jax.tree.map(
        lambda x: x if isinstance(x, mr.PerReplica | int) else [np.asarray(x).tolist()] * count,
        result,
        is_leaf=lambda x: isinstance(x, mr.PerReplica),
    )


@pytest.mark.parametrize("num_replicas", ["2", *nightly("3")])
def test_collectives_and_their_gradients_give_the_numbers_of_tensorflow(num_replicas):
    strategy, recorded = strategy_of(int(num_replicas)), RECORDED["replica_context"]
    v = variable(2.0, strategy)
    steps = STEPS | {"ar_variable_mirrored": lambda: all_reduce("SUM", v)}
    names = [name for name in steps if num_replicas in recorded[name]]
    results = strategy.run(lambda: {name: steps[name]() for name in names})
    assert names

    def check(name):
        result, number = results[name], recorded[name][num_replicas]
        if isinstance(number, list) and number[0] is None:  # only the gradient was recorded
            result, number = result[1], number[1]
        assert_equal(result if name == "mc_basic" else as_recorded(strategy, result), number)

    all_cases(check, [(name,) for name in names])


def test_the_gradient_of_all_gather_is_that_of_tensorflow(strategy2):
    """TensorFlow's replicas gather 1 and 2 rows; rows of one replica have equal gradients, so one row of each shows them all."""

    def step():
        def loss(x):
            y = mr.get_replica_context().all_gather(x * x, axis=0)
            multiplicity = jnp.float32([1, 2])  # how often each row stands in TensorFlow's gathered value
            return jnp.sum((replica_id() + 1) * y * multiplicity), y

        gradient, y = jax.grad(loss, has_aux=True)((replica_id() + 1)[None])
        return y, gradient / jnp.float32([1, 2])[replica_id().astype(jnp.int32)]

    y, gradient = strategy2.run(step)
    their_y, their_gradient = RECORDED["replica_context"]["ag_gradient_fn"]["2"]
    assert np.repeat(np.asarray(y), [1, 2]).tolist() == their_y[0]
    assert [np.repeat(value, i + 1).tolist() for i, value in enumerate(gradient.values)] == their_gradient


#: What TensorFlow refuses in a step, and the answer here: Python numbers, None and mixed dtypes in one call; float16 means that
#: are added in float32 (TensorFlow: inf); collectives and merge_call in nested functions, conditions and loops.
STEPS_NOT_SO_HERE = {
    "ar_python_float": (lambda: all_reduce("SUM", 1.0), 2.0),
    "ar_nested_mixed_f32_i32": (lambda: all_reduce("SUM", [replica_id(), jnp.int32(1)]), [1.0, 2]),
    "ar_list_with_none": (lambda: all_reduce("SUM", [1.0, None]), [2.0, None]),
    "ar_bool": (lambda: all_reduce("SUM", jnp.array(True)), 2),
    "ar_f16_overflow": (lambda: all_reduce("MEAN", jnp.float16(60000)), 60000.0),
    "mc_in_nested_tf_function": (lambda: jax.jit(lambda: merge_call(lambda s, x: s.reduce("SUM", x), replica_id()))(), 1.0),
}


def test_what_tensorflow_cannot_do_in_a_step_works_here(strategy2):
    """See STEPS_NOT_SO_HERE."""
    results = strategy2.run(lambda: {name: step() for name, (step, _) in STEPS_NOT_SO_HERE.items()})
    for name, (_, ours) in STEPS_NOT_SO_HERE.items():
        theirs = RECORDED["replica_context"][name]["2"]
        assert "error" in theirs or theirs == [float("inf")] * 2, name
        assert plain(results[name]) == ours, name


# -- the assign matrix: synchronization x context x aggregation x method x value, from 1.0


def ours_where_tensorflow_differs(num_replicas, synchronization, context, aggregation, method, value):
    """Return the copies, or the error, where the design differs from TensorFlow; None where it agrees.

    * A value that differs by replica, for a mirrored variable without aggregation: TensorFlow lets the copies diverge; here it is
      an error.
    * A PerReplica assigned from outside to a mirrored variable with an aggregation: TensorFlow ignores the aggregation and lets
      the copies diverge; here the result is that of the same assignment inside a step.
    * A literal or common array for a mirrored SUM variable in a step: TensorFlow refuses; here it counts as the same value on
      each replica, so that R times it arrives.
    * A sync-on-read variable with aggregation NONE, assigned from outside: both refuse; TensorFlow has already changed the
      copies.
    * A PerReplica assigned to a sync-on-read variable from outside: TensorFlow fails in an AttributeError; here each copy gets
      its own.
    * assign_add and assign_sub to a sync-on-read SUM variable from outside: TensorFlow refuses; here the sum of the copies,
      which is R at the start, changes by the value.
    """
    sign = {"assign_add": 1, "assign_sub": -1}.get(method, 0)
    if synchronization == "ON_WRITE":
        if value == "per_replica" and aggregation == "NONE":
            return mr.ReplicasDivergeError
        if value == "per_replica" and context == "cross":
            return RECORDED["assign"][f"ON_WRITE.replica.{aggregation}.{method}(per_replica)"]
        if value != "per_replica" and context == "replica" and aggregation == "SUM":
            total = 2.0 * num_replicas
            return [1 + sign * total if sign else total] * num_replicas
    elif context == "cross":
        if aggregation == "NONE":
            return ValueError
        if value == "per_replica":
            return RECORDED["assign"][f"ON_READ.replica.{aggregation}.{method}(per_replica)"]
        if aggregation == "SUM" and sign:
            return [(num_replicas + sign * 2.0) / num_replicas] * num_replicas
    return None


#: Where something is assigned: in a step, and where no replica is the writer.
PLACES = {
    "replica": lambda s, x, write: s.run(write, args=(x,)),
    "cross": lambda s, x, write: write(x),
    "function": lambda s, x, write: mr.function(lambda x: write(x))(x),
    "merge_call": lambda s, x, write: s.run(lambda x: merge_call(lambda _, x: write(x), x), args=(x,)),
}
GIVEN = {"number": lambda x: 2.0, "array": lambda x: jnp.float32(2), "per_replica": lambda x: x}
REFUSALS = {mr.ReplicasDivergeError: "'w'.*aggregation='mean'", ValueError: "'w'.*aggregation NONE.*Nothing was changed"}


@pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")  # one function is each cell that is refused
@pytest.mark.parametrize("place", PLACES)
def test_the_assign_matrix_is_that_of_tensorflow_where_tensorflow_is_right(strategy2, place):
    """See `ours_where_tensorflow_differs` for every cell that is not TensorFlow's. All in a step are one program."""
    context, x = "replica" if place == "replica" else "cross", numbers(strategy2, 1)
    kinds = itertools.product(("ON_WRITE", "ON_READ"), ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA"))
    cells = [(*kind, method, value) for kind in kinds for method in METHODS for value in GIVEN]
    assert len(cells) == 72
    made = {cell: variable(1.0, strategy2, name="w", synchronization=cell[0], aggregation=cell[1]) for cell in cells}
    ours = {(s, a, *rest): ours_where_tensorflow_differs(2, s, context, a, *rest) for s, a, *rest in cells}
    right = [cell for cell in cells if not isinstance(ours[cell], type)]

    def assign(cells, x):
        for cell in cells:
            assert getattr(made[cell], cell[2])(GIVEN[cell[3]](x)) is made[cell]

    PLACES[place](strategy2, x, lambda x: assign(right, x))

    def check(cell):
        synchronization, aggregation, method, value = cell
        theirs = RECORDED["assign"][f"{synchronization}.{context}.{aggregation}.{method}({value})"]
        if cell in right:
            assert ours[cell] != theirs and (ours[cell] is not None or isinstance(theirs, list))
            assert copies(strategy2, made[cell]) == (theirs if ours[cell] is None else ours[cell])
            return
        with pytest.raises(ours[cell], match=f"(?s){REFUSALS[ours[cell]]}"):
            PLACES[place](strategy2, x, lambda x: assign([cell], x))
        assert copies(strategy2, made[cell]) == [1, 1]

    all_cases(check, [(cell,) for cell in cells])
    strategy2.assert_mirrored()


# -- variables


def on_read(strategy, value, aggregation):
    return variable(value, strategy, synchronization="on_read", aggregation=aggregation)


def test_a_sync_on_read_variable_is_aggregated_as_in_tensorflow_when_it_is_read_outside(strategy2):
    recorded = dict(RECORDED["variables"]["read_cross_onread"])
    made = {aggregation: on_read(strategy2, 0.0, aggregation) for aggregation in recorded}
    inside = strategy2.run(lambda x: [v.assign(x).value for v in made.values()], args=(numbers(strategy2, 1),))
    assert [values_of(value) for value in inside] == [[1, 2]] * 4
    v = made.pop("NONE")
    assert recorded.pop("NONE") == "ValueError" and len(recorded) == 3
    for read in (lambda: v.value, v.numpy, lambda: v + 1, lambda: float(v), mr.function(lambda: v.value)):
        with pytest.raises(ValueError, match=r"one value per replica and aggregation NONE.*local_results"):
            read()
    values = lambda *_: {aggregation: v.value for aggregation, v in made.items()}  # noqa: E731
    ways = values(), strategy2.run(lambda: merge_call(values)), mr.function(values)(), {a: v + 0 for a, v in made.items()}
    for found in ways:
        assert {aggregation: float(value) for aggregation, value in found.items()} == recorded


def test_what_is_assigned_outside_is_divided_as_in_tensorflow_but_loses_no_remainder(strategy2):
    recorded = RECORDED["variables"]
    total, mean, integer = on_read(strategy2, 0.0, "sum"), on_read(strategy2, 1.0, "mean"), on_read(strategy2, 0, "sum")
    total.assign(6.0)
    assert [copies(strategy2, total), float(total)] == recorded["onread_sum_cross_assign_divides"]
    mean.assign_add(2.0)
    assert copies(strategy2, mean) == recorded["onread_cross_assign_add_mean"]
    integer.assign(7)
    assert recorded["onread_sum_int_cross_assign_truncates"] == [[3, 3], 6]
    assert [copies(strategy2, integer), int(integer)] == [[4, 3], 7]


def gradient_step(v, how=""):
    gradient = jax.grad(lambda value: value * value * (replica_id() + 1))(v.value)
    v.assign_sub(0.1 * (all_reduce("MEAN", gradient) if how == "all_reduce" else gradient))


def test_gradient_descent_by_hand_gives_the_numbers_of_tensorflow(strategy2):
    cases = {
        "sgd_manual_agg_mean": ("mean", ""),
        "sgd_manual_agg_sum": ("sum", ""),
        "sgd_manual_all_reduce_none": ("none", "all_reduce"),
    }
    made = {name: variable(1.0, strategy2, aggregation=aggregation) for name, (aggregation, _) in cases.items()}
    with pytest.warns(mr.FactorOfReplicasWarning, match="sums over the replicas"):  # the sum, of which TensorFlow says nothing
        strategy2.run(lambda: [gradient_step(made[name], how) for name, (_, how) in cases.items()])
    for name, v in made.items():
        np.testing.assert_allclose(copies(strategy2, v), RECORDED["variables"][name], rtol=1e-6)


def fails(v):
    v.assign(1.0)
    raise ValueError("x")


def on_one_replica(v):
    if mr.get_replica_context().replica_id_in_sync_group == 0:
        v.assign(1.0)


#: What TensorFlow writes all the same, to all copies or some (seed 003, examples 1 and 2): the first value, the step, the error.
PARTLY_WRITTEN = {
    "failed_replica_partial_write": ([1.0, 0.0], 0.0, fails, ValueError, r"^x\b"),
    "onwrite_none_only_replica0_assigns": ([1.0, 0.0], 0.0, on_one_replica, mr.OneProgramError, r"jnp\.where"),
    "sgd_manual_no_aggregation": ([0.8, 0.6], 1.0, gradient_step, mr.ReplicasDivergeError, "may differ by replica"),
}


def test_what_is_refused_or_fails_changes_nothing(strategy2):
    def check(name, theirs, start, step, error, message):
        recorded = RECORDED["variables"][name]
        np.testing.assert_allclose(next((copies for copies in recorded if isinstance(copies, list)), recorded), theirs, rtol=1e-6)
        v = variable(start, strategy2)
        with pytest.raises(error, match=message):
            strategy2.run(step, args=(v,))
        assert copies(strategy2, v) == [start, start]

    all_cases(check, [(name, *case) for name, case in PARTLY_WRITTEN.items()])
    assert RECORDED["variables"]["onread_none_cross_assign_raises_after_mutating"] == ["error", [7.0, 7.0]]
    v = on_read(strategy2, 1.0, "none")
    with pytest.raises(ValueError, match="Nothing was changed"):
        v.assign(7.0)
    assert copies(strategy2, v) == [1, 1]


def test_adding_at_one_place_on_each_replica_is_tensorflows_scatter_add(strategy2):
    """Replica i adds i + 2 at place i. Without an aggregation TensorFlow's copies diverge; here that is an error."""
    recorded = RECORDED["variables"]["scatter_add"]
    made = {aggregation: variable(np.ones(3, np.float32), strategy2, aggregation=aggregation) for aggregation in recorded}

    def step(aggregations):
        place = mr.get_replica_context().replica_id_in_sync_group
        for aggregation in aggregations:
            made[aggregation].assign_add(jnp.zeros(3).at[place].add(place + 2.0))

    with pytest.raises(mr.ReplicasDivergeError):
        strategy2.run(step, args=(("NONE",),))
    assert recorded["NONE"][0] != recorded["NONE"][1] and copies(strategy2, made["NONE"]) == [[1, 1, 1]] * 2
    strategy2.run(lambda: step(("SUM", "MEAN", "ONLY_FIRST_REPLICA")))
    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        assert copies(strategy2, made[aggregation]) == recorded[aggregation], aggregation


def test_the_rest_of_the_recorded_variable_numbers(strategy2):
    recorded = RECORDED["variables"]
    v = variable(3.0, strategy2)
    gradient = strategy2.run(lambda: jax.grad(lambda value: value * value * (replica_id() + 1))(v.value))
    assert plain(gradient) == recorded["var_in_gradient_tape"]
    results = [v * 2, 2 * v, v - 1, 1 - v, v / 2, v // 2, v % 2, v**2, -v, abs(v), v > 2, v < 2]
    assert [np.asarray(x).tolist() for x in results] == recorded["operators_cross"]

    w = variable(1.0, strategy2)
    strategy2.run(lambda: merge_call(lambda s, x: w.assign(s.reduce("SUM", x)), replica_id() + 1))
    assert copies(strategy2, w) == recorded["merge_call_assign"]

    not_a_number = variable(0.0, strategy2, aggregation="mean")
    strategy2.run(lambda: not_a_number.assign(jnp.where(replica_id() == 0, jnp.nan, 1.0)))
    np.testing.assert_equal(copies(strategy2, not_a_number), recorded["assign_nan_mean"])

    seen = on_read(strategy2, 1.0, "sum")
    strategy2.run(lambda: seen.assign(replica_id() + 1))
    assert [strategy2.run(lambda: all_reduce("SUM", seen)).tolist()] * 2 == recorded["all_reduce_on_sync_on_read"]


def test_reads_after_writes_in_one_step_see_them_as_in_tensorflow(strategy2):
    v, w = variable(1.0, strategy2, aggregation="sum"), variable(0.0, strategy2, aggregation="sum")

    def step():
        w.assign_add(replica_id() + 1)
        first = w.value
        w.assign_add(replica_id() + 1)
        return v.assign_add(replica_id() + 1).value, [first, w.value]

    once, twice = strategy2.run(step)
    assert [once.tolist()] * 2 == RECORDED["variables"]["read_after_write_same_step"]
    assert [[x.tolist()] * 2 for x in twice] == RECORDED["variables"]["control_dep_order_fn"]
