"""A tree is reduced and gathered in one program with few buffers, to the bit as leaf by leaf."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._replicas import cross_replica
from mirrored.testing import count_programs

SHAPES = ((), (5, 7), (100, 90))
DTYPES = ("float32", "bfloat16", "int32", "uint8", "bool", "complex64")


def tree_of(strategy: mr.Strategy, rank: int) -> dict[str, Any]:
    """Return leaves of at least this rank: of many shapes and dtypes, uneven ones, mirrored ones, and variables."""
    random = np.random.default_rng(0)

    def values(context: mr.ValueContext) -> dict[str, Any]:
        rows = (1 + context.replica_id_in_sync_group) % 3
        even = {f"{d} {s}": (random.normal(size=s) * 9).astype(jnp.dtype(d)) for s in SHAPES if len(s) >= rank for d in DTYPES}
        return even | {f"uneven {n}": np.full((rows, n), 0.1, np.float32) for n in (2, 40_000) if rank}

    tree = strategy.distribute_values_from_function(values)
    if rank > 1:
        return tree
    with strategy.scope():
        variables = {"v": mr.Variable([1.5]), "o": mr.Variable([2.5], synchronization="on_read", aggregation="sum")}
    return tree | variables | {"number": [np.float32([3])], "jax": jnp.ones(2)}


def is_leaf(value: Any) -> bool:
    return isinstance(value, mr.PerReplica | mr.Variable)


@pytest.mark.slow
@pytest.mark.parametrize("devices, num_replicas", [(1, 1), (3, 3), (2, 6)])
def test_a_tree_gives_what_its_leaves_give(devices: int, num_replicas: int) -> None:
    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(devices)], num_replicas=num_replicas)
    for op, axis, rank in (("sum", None, 0), ("mean", None, 0), ("mean", 0, 1), ("sum", (0, 1), 2), ("gather", 0, 1)):
        verb = strategy.gather if op == "gather" else functools.partial(strategy.reduce, op)
        tree = tree_of(strategy, rank)
        whole, each = verb(tree, axis), jax.tree.map(functools.partial(verb, axis=axis), tree, is_leaf=is_leaf)
        assert jax.tree.structure(whole) == jax.tree.structure(each)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(whole), jax.tree.leaves(each), strict=True):
            assert (a.dtype, a.sharding) == (b.dtype, b.sharding), path
            # XLA may add up the axes of a value in another order when it compiles more at once.
            assert (axis is not None and op != "gather") or np.asarray(a).tobytes() == np.asarray(b).tobytes(), path
            np.testing.assert_allclose(np.asarray(a, np.complex128), np.asarray(b, np.complex128), rtol=1e-5, err_msg=str(path))


def small_tree(strategy: mr.Strategy, count: int = 12) -> list[mr.PerReplica]:
    return strategy.distribute_values_from_function(
        lambda context: [np.float32([i, -0.0, 0.1 * context.replica_id_in_sync_group]) for i in range(count)]
    )


def test_a_tree_of_small_arrays_is_one_program_and_few_sums(strategy3: mr.Strategy) -> None:
    tree = {"few": small_tree(strategy3), "many": small_tree(strategy3, 1), "int": small_tree(strategy3, 2)}
    tree["int"] = strategy3.run(lambda xs: [x.astype(jnp.int32) for x in xs], args=(tree["int"],))
    with count_programs() as counted:
        total, joined = strategy3.reduce("sum", tree), strategy3.gather(tree, 0)
    assert len(counted.others) == 2, counted.others
    for array, whole, leaf in zip(*map(jax.tree.leaves, (total, joined)), jax.tree.leaves(tree, is_leaf=is_leaf), strict=True):
        values = [np.asarray(value) for value in leaf.values]
        np.testing.assert_array_equal(array, values[0] + values[1] + values[2])
        assert np.asarray(whole).tobytes() == np.concatenate(values).tobytes(), "-0.0 stays"
    task = cross_replica.Task(cross_replica.reduce_stack, (mr.ReduceOp.SUM, (), None, None))
    stacks = jax.tree.leaves(tree)
    placement = strategy3._mesh.mirrored
    program = jax.jit(lambda arrays: cross_replica.compute_all(arrays, [task] * len(stacks), placement), out_shardings=placement)
    text = program.lower(stacks).compile().as_text()
    assert text.count(" all-reduce(") + text.count("all-reduce-start(") <= 2, "one for each dtype"


def test_large_arrays_of_a_tree_travel_alone() -> None:
    shapes: list[tuple[int, ...]] = []
    stacks = [jnp.ones((2, size)) for size in (3, 40_000, 4)]
    assert [x.tolist() for x in cross_replica._move_small(stacks, lambda s: shapes.append(s.shape) or s[0])] == [
        [1] * n for n in (3, 40_000, 4)
    ]
    assert sorted(shapes) == [(2, 7), (2, 40_000)]


def test_trees_in_merge_call_and_mr_function(strategy3: mr.Strategy) -> None:
    tree = dict(enumerate(small_tree(strategy3, 3)))
    reduce = lambda strategy, tree: strategy.reduce("mean", tree)  # noqa: E731
    traced = mr.function(lambda tree: reduce(strategy3, tree))(tree)
    merged = strategy3.run(lambda tree: mr.get_replica_context().merge_call(reduce, args=(tree,)), args=(tree,))
    for other in (traced, merged):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), other, reduce(strategy3, tree))


def test_a_bad_leaf_stops_a_tree_before_anything_runs_and_keys_are_only_gathered(strategy2: mr.Strategy) -> None:
    keys = strategy2.distribute_values_from_function(lambda context: jax.random.key(context.replica_id_in_sync_group)[None])
    tree = {"keys": keys, "x": small_tree(strategy2, 2)}
    with count_programs() as counted, pytest.raises(TypeError, match="'text'"):
        strategy2.reduce("sum", [tree["x"], "text"])
    assert not counted.others and strategy2.reduce("sum", {"nothing": []}) == {"nothing": []}
    gathered = jax.random.key_data(strategy2.gather(tree, 0)["keys"])
    np.testing.assert_array_equal(gathered, [jax.random.key_data(jax.random.key(i)) for i in range(2)])
    with pytest.raises(TypeError, match="cannot be added"):
        strategy2.reduce("sum", tree)
