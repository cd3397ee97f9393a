"""Where a program is, and what a replica can ask for there."""

import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from strategies import variable

import mirrored as mr


def where() -> tuple[Any, int, bool, bool, int | None]:
    """The current strategy, its size, has_strategy, in_cross_replica_context, and the size that the replica context says."""
    context, strategy = mr.get_replica_context(), mr.get_strategy()
    size = None if context is None else context.num_replicas_in_sync
    return strategy, strategy.num_replicas_in_sync, mr.has_strategy(), mr.in_cross_replica_context(), size


def in_scope(strategy: mr.Strategy, function: Callable[[], Any]) -> Any:
    with strategy.scope():
        return function()


def merge(function: Callable[..., Any]) -> Any:
    return mr.get_replica_context().merge_call(function)


DEFAULT = mr.get_strategy()
OUTSIDE = (DEFAULT, 1, False, False, 1)


def outside(strategy: mr.Strategy) -> tuple[Any, ...]:
    return OUTSIDE


def cross(strategy: mr.Strategy) -> tuple[Any, ...]:
    return (strategy, strategy.num_replicas_in_sync, True, True, None)


def replica(strategy: mr.Strategy) -> tuple[Any, ...]:
    return (strategy, strategy.num_replicas_in_sync, True, False, strategy.num_replicas_in_sync)


#: A place in the program, how to call a function there, and what the context functions say there.
PLACES: dict[str, tuple[Callable[[mr.Strategy, Callable[..., Any]], Any], Callable[[mr.Strategy], Any]]] = {
    "outside": (lambda s, f: f(), outside),
    "scope": (lambda s, f: in_scope(s, f), cross),
    "run": (lambda s, f: s.run(f), replica),
    "eager run": (lambda s, f: mr.eager()(lambda: s.run(f))(), replica),
    "jit in a run": (lambda s, f: s.run(lambda: jax.jit(f)()), replica),
    "scan in a run": (lambda s, f: s.run(lambda: jax.lax.scan(lambda c, x: (f(), (c, None))[1], 0, None, 2)), replica),
    "cond in a run": (lambda s, f: s.run(lambda: jax.lax.cond(True, f, lambda: None)), replica),
    "merge_call": (lambda s, f: s.run(lambda: merge(f)), cross),
    "run in a merge_call": (lambda s, f: s.run(lambda: merge(lambda strategy: strategy.run(f))), replica),
    "after a merge_call": (lambda s, f: s.run(lambda: (merge(lambda strategy: None), f())[1]), replica),
    "function in a scope": (lambda s, f: in_scope(s, mr.function(f)), cross),
    "function": (lambda s, f: mr.function(f)(), outside),
    "run in a function": (lambda s, f: mr.function(lambda: s.run(f))(), replica),
    "scan of runs": (lambda s, f: mr.scan(lambda c, x: (c, s.run(f)), 0.0, length=2), replica),
    "jit": (lambda s, f: jax.jit(f)(), outside),
    "run of the default strategy": (lambda s, f: DEFAULT.run(f), lambda s: replica(DEFAULT)),
    "scope of the default strategy": (lambda s, f: in_scope(DEFAULT, f), lambda s: cross(DEFAULT)),
}


def test_context_functions_in_every_place_which_an_exception_leaves(strategy3: mr.Strategy) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("out")

    for place, (call, expected) in PLACES.items():
        seen: set[Any] = set()
        call(strategy3, lambda *args, seen=seen: seen.add(where()))
        assert (seen, where()) == ({expected(strategy3)}, OUTSIDE), place
        with pytest.raises(KeyError, match="out"):
            call(strategy3, fail)
        assert where() == OUTSIDE, place


# -- threads


def test_threads_have_scopes_of_their_own(strategy2: mr.MirroredStrategy, strategy3: mr.MirroredStrategy) -> None:
    both_inside = threading.Barrier(2)

    def enter(strategy: mr.Strategy) -> tuple[Any, ...]:
        with strategy.scope() as given:
            assert given is strategy
            both_inside.wait(30)
            seen = where()
            both_inside.wait(30)
            return seen

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        with strategy2.scope():
            assert pool.submit(where).result() == OUTSIDE, "a thread does not inherit the scope"
            assert contextvars.copy_context().run(where) == cross(strategy2), "a copied context does: that is what it is for"
        assert list(pool.map(enter, (strategy2, strategy3))) == [cross(strategy2), cross(strategy3)]


# -- the replica's number, and random numbers


def test_rng_gives_replicas_their_rows_of_one_draw_and_folds_other_keys(strategy3: mr.MirroredStrategy) -> None:
    in_variable, old, rbg = variable(jax.random.key(3), strategy3), jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")
    keys = [np.int64(3), jax.random.key(3), in_variable]

    def draw() -> list[Any]:
        rng, traced = mr.get_replica_context().rng, jax.lax.fori_loop(0, 3, lambda i, n: n + 1, 0)
        every = jnp.stack([rng(key) for key in (*keys, traced, rng(3))])
        by_rows = list(jax.vmap(lambda key: jax.random.uniform(key, (2, 2)))(every))
        others = [jax.random.uniform(key, (2, 2)) for key in (rng(old), rng(rbg), rng(3, by_rows=False))]
        return [*by_rows, *others, jax.random.gamma(rng(3), 9.0, (9,))]

    def values(result: mr.PerReplica) -> list[Any]:
        return [np.asarray(value).tolist() for value in result.values]

    *by_rows, of_old, of_rbg, of_plain, gamma = map(values, strategy3.run(draw))
    whole = np.asarray(jax.random.uniform(jax.random.key(3), (6, 2))).reshape(3, 2, 2)
    assert by_rows == [whole.tolist()] * 5
    first = [whole[0].tolist(), jax.random.uniform(rbg, (2, 2)).tolist()]  # the first elements, whatever the shape
    first += [first[0], jax.random.gamma(jax.random.key(3), 9.0, (9,)).tolist()]
    for each, expected in zip((of_old, of_rbg, of_plain, gamma), first, strict=True):
        np.testing.assert_allclose(each[0], expected, rtol=1e-5, err_msg="the first is one device's")
        assert len(set(map(str, each))) == 3
    assert not isinstance(strategy3.run(lambda: jax.random.uniform(jax.random.key(3))), mr.PerReplica), "the same without rng"


def test_each_key_of_an_array_of_keys_is_made_different(strategy3: mr.MirroredStrategy) -> None:
    """As of the layers that a scan goes through."""
    given = np.arange(16, dtype=np.uint32).reshape(2, 4, 2)

    def draw(given: jax.Array) -> list[jax.Array]:
        rng = mr.get_replica_context().rng
        of_each = jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (2,)), out_axes=-1), out_axes=-1)
        return [of_each(rng(jax.random.wrap_key_data(given))), of_each(rng(given))]  # the second is keys of the old kind

    by_rows, folded = strategy3.run(draw, args=(given,))
    draw_all = jax.jit(jax.vmap(jax.vmap(lambda key: jax.random.bits(key, (6,)), out_axes=-1), out_axes=-1))
    np.testing.assert_array_equal(np.concatenate(by_rows.values), draw_all(jax.random.wrap_key_data(given)))
    assert len({np.asarray(value).tobytes() for value in folded.values}) == 3 and folded.shape == (2, 4, 2)


# -- one program


BRANCHES: dict[str, Callable[[Any], Any]] = {
    "if ==": lambda i: 1 if i == 0 else 2,
    "if": lambda i: 1 if i else 2,
    "if on what is computed of it": lambda i: "many" if jnp.sum(i + 1.0) > 2 else "few",
    "bool": bool,
    "if in jit": jax.jit(lambda i: 1 if i == 0 else 2),
    "if in a loop": lambda i: jax.lax.fori_loop(0, 2, lambda _, x: x if i == 0 else x + 1, 0),
    "item": lambda i: i.item(),
    "as an index": lambda i: [1, 2][i],
    "numpy": np.asarray,
}


def test_python_cannot_branch_on_the_replicas_number(strategy3: mr.MirroredStrategy) -> None:
    remedies = ("jnp.where(ctx.replica_id_in_sync_group == 0, a, b)", "jax.lax.cond(", "variable.assign(value)", "only_first_")
    number = lambda: mr.get_replica_context().replica_id_in_sync_group  # noqa: E731
    run = lambda branch: strategy3.run(lambda: branch(number()))  # noqa: E731
    calls = {how: lambda branch=branch: run(branch) for how, branch in BRANCHES.items()} | {
        "in a scope": lambda: in_scope(strategy3, lambda: run(bool)),
        "in a function": mr.function(lambda: run(bool)),
        "eagerly": lambda: mr.eager()(lambda: run(bool))(),
        "one replica": lambda: mr.MirroredStrategy(["cpu:0"]).run(lambda: bool(number())),
    }
    for how, call in calls.items():
        with pytest.raises(mr.OneProgramError, match="All replicas run one program") as caught:
            call()
        message = str(caught.value)
        assert f"differs by replica, at {__file__}:" in message and all(remedy in message for remedy in remedies), how
    with pytest.raises(mr.OneProgramError, match="needed the value of an array"):  # a branch on something else
        strategy3.run(lambda x: 1 if x > 0 else 2, args=(np.float32(1),))


def test_an_axis_of_vmap_with_the_name_of_the_replicas_is_refused(strategy2: mr.Strategy) -> None:
    def step(name: str) -> jax.Array:
        ctx = mr.get_replica_context()
        return jax.vmap(lambda a: ctx.all_reduce("sum", a), axis_name=name)(jnp.ones(3))

    assert strategy2.run(step, args=("rows",)).tolist() == [2.0] * 3
    for verb in (lambda ctx, a: ctx.all_reduce("sum", a), lambda ctx, a: ctx.all_gather(a[None], 0), lambda ctx, a: ctx.rng(0)):
        with pytest.raises(mr.ContextError, match=r"jax\.vmap\(\.\.\., axis_name='replica'\).*another name"):
            strategy2.run(
                lambda verb=verb: jax.vmap(lambda a: verb(mr.get_replica_context(), a), axis_name="replica")(jnp.ones(3))
            )
