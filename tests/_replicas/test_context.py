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

import mirrored as mr


def where() -> tuple[Any, int, bool, bool, int | None]:
    """The current strategy, its size, has_strategy, in_cross_replica_context, and the size that the replica context says."""
    context = mr.get_replica_context()
    return (
        mr.get_strategy(),
        mr.get_strategy().num_replicas_in_sync,
        mr.has_strategy(),
        mr.in_cross_replica_context(),
        None if context is None else context.num_replicas_in_sync,
    )


def kept(box: list[Any]) -> Callable[..., None]:
    return lambda *args: box.append(where())


def in_scope(strategy: mr.Strategy, function: Callable[[], Any]) -> Any:
    with strategy.scope():
        return function()


def eagerly(function: Callable[[], Any]) -> Any:
    with mr.eager():
        return function()


DEFAULT = mr.get_strategy()
OUTSIDE = (DEFAULT, 1, False, False, 1)


def cross(strategy: mr.Strategy) -> tuple[Any, ...]:
    return (strategy, strategy.num_replicas_in_sync, True, True, None)


def replica(strategy: mr.Strategy) -> tuple[Any, ...]:
    return (strategy, strategy.num_replicas_in_sync, True, False, strategy.num_replicas_in_sync)


#: A place in the program, how to call a function there, and what the context functions say there.
PLACES: dict[str, tuple[Callable[[mr.Strategy, Callable[..., Any]], Any], Callable[[mr.Strategy], Any]]] = {
    "outside": (lambda s, f: f(), lambda s: OUTSIDE),
    "scope": (lambda s, f: in_scope(s, f), cross),
    "scope in the same scope": (lambda s, f: in_scope(s, lambda: in_scope(s, f)), cross),
    "after a scope": (lambda s, f: (in_scope(s, lambda: None), f()), lambda s: OUTSIDE),
    "run": (lambda s, f: s.run(f), replica),
    "run in a scope": (lambda s, f: in_scope(s, lambda: s.run(f)), replica),
    "eager run": (lambda s, f: eagerly(lambda: s.run(f)), replica),
    "after a run": (lambda s, f: (s.run(lambda: None), f()), lambda s: OUTSIDE),
    "jit in a run": (lambda s, f: s.run(lambda: jax.jit(f)()), replica),
    "scan in a run": (lambda s, f: s.run(lambda: jax.lax.scan(lambda c, x: (f(), (c, None))[1], 0, None, 2)), replica),
    "cond in a run": (lambda s, f: s.run(lambda: jax.lax.cond(True, f, lambda: None)), replica),
    "grad in a run": (lambda s, f: s.run(lambda: jax.grad(lambda x: (f(), x)[1])(1.0)), replica),
    "merge_call": (lambda s, f: s.run(lambda: mr.get_replica_context().merge_call(f)), cross),
    "run in a merge_call": (
        lambda s, f: s.run(lambda: mr.get_replica_context().merge_call(lambda strategy: strategy.run(f))),
        replica,
    ),
    "after a merge_call": (
        lambda s, f: s.run(lambda: (mr.get_replica_context().merge_call(lambda strategy: None), f())[1]),
        replica,
    ),
    "scope in a merge_call": (
        lambda s, f: s.run(lambda: mr.get_replica_context().merge_call(lambda strategy: in_scope(strategy, f))),
        cross,
    ),
    "function in a scope": (lambda s, f: in_scope(s, mr.function(f)), cross),
    "scope in a function": (lambda s, f: mr.function(lambda: in_scope(s, f))(), cross),
    "run in a function": (lambda s, f: mr.function(lambda: s.run(f))(), replica),
    "scan of runs": (lambda s, f: mr.scan(lambda c, x: (c, s.run(f)), 0.0, length=2), replica),
    "jit": (lambda s, f: jax.jit(f)(), lambda s: OUTSIDE),
    "jit in a scope": (lambda s, f: in_scope(s, lambda: jax.jit(f)()), cross),
    "run of the default strategy": (lambda s, f: DEFAULT.run(f), lambda s: replica(DEFAULT)),
    "scope of the default strategy": (lambda s, f: in_scope(DEFAULT, f), lambda s: cross(DEFAULT)),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_context_functions_in_every_place(place: str, strategy: mr.MirroredStrategy) -> None:
    call, expected = PLACES[place]
    seen: list[Any] = []
    call(strategy, kept(seen))
    assert seen
    assert set(seen) == {expected(strategy)}
    assert where() == OUTSIDE


@pytest.mark.parametrize("place", ["scope", "run", "merge_call", "function in a scope", "eager run", "jit in a scope"])
def test_an_exception_leaves_every_place(place: str, strategy2: mr.MirroredStrategy) -> None:
    def fail(*args: Any) -> None:
        raise KeyError("out")

    with pytest.raises(KeyError, match="out"):
        PLACES[place][0](strategy2, fail)
    assert where() == OUTSIDE


def test_a_scope_gives_the_strategy(strategy2: mr.MirroredStrategy) -> None:
    with strategy2.scope() as given:
        assert given is strategy2
        assert mr.get_strategy() is strategy2
    assert strategy2.run(lambda: mr.get_replica_context().strategy is strategy2) is True


# -- threads


def test_a_thread_does_not_inherit_the_scope(strategy2: mr.MirroredStrategy) -> None:
    seen: list[Any] = []
    with strategy2.scope():
        thread = threading.Thread(target=kept(seen))
        thread.start()
        thread.join()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(kept(seen)).result()
        contextvars.copy_context().run(kept(seen))  # a copied context does: that is what it is for
    assert seen == [OUTSIDE, OUTSIDE, cross(strategy2)]


def test_threads_have_scopes_of_their_own(strategy2: mr.MirroredStrategy, strategy3: mr.MirroredStrategy) -> None:
    seen: list[Any] = []
    both_inside = threading.Barrier(2)

    def enter(strategy: mr.Strategy) -> None:
        with strategy.scope():
            both_inside.wait(30)
            seen.append(where() == cross(strategy))
            both_inside.wait(30)

    threads = [threading.Thread(target=enter, args=(strategy,)) for strategy in (strategy2, strategy3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True, True]


# -- scopes


def test_scopes_of_two_strategies_do_not_nest(strategy2: mr.MirroredStrategy, strategy3: mr.MirroredStrategy) -> None:
    message = r"the scope of .*3 replicas.* was entered inside the scope of .*2 replicas.*; leave the outer scope first"
    with strategy2.scope():
        with pytest.raises(mr.StrategyMismatchError, match=message), strategy3.scope():
            raise AssertionError("not reached")
        assert where() == cross(strategy2)


@pytest.mark.parametrize("is_other", [False, True])
def test_no_scope_in_a_step(is_other: bool, strategy2: mr.MirroredStrategy, strategy3: mr.MirroredStrategy) -> None:
    inner = strategy3 if is_other else strategy2
    with pytest.raises(mr.ContextError, match=r"strategy\.scope\(\) was entered inside a step .* make variables before it"):
        strategy2.run(lambda: in_scope(inner, lambda: None))


@pytest.mark.parametrize("verb", ["run", "reduce", "gather", "local_results", "distribute_dataset"])
def test_verbs_of_another_strategy_in_a_scope(verb: str, strategy2: mr.MirroredStrategy, strategy3: mr.MirroredStrategy) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "run": (lambda: 1,),
        "reduce": ("sum", 1.0),
        "gather": (np.ones(2), 0),
        "local_results": (1.0,),
        "distribute_dataset": ([np.ones(6)],),
    }
    getattr(strategy3, verb)(*arguments[verb])
    with (
        strategy2.scope(),
        pytest.raises(mr.StrategyMismatchError, match=f"^{verb} of .*3 replicas.* in the scope of .*2 replicas"),
    ):
        getattr(strategy3, verb)(*arguments[verb])


# -- the replica context


def test_replica_numbers(strategy: mr.MirroredStrategy) -> None:
    count = strategy.num_replicas_in_sync
    numbers = strategy.run(lambda: mr.get_replica_context().replica_id_in_sync_group)
    assert numbers.dtype == "int32"
    assert [int(value) for value in numbers.values] == list(range(count))
    assert strategy.run(lambda: mr.get_replica_context().num_replicas_in_sync) == count
    assert type(strategy.run(lambda: mr.get_replica_context().num_replicas_in_sync)) is int


def test_the_default_replica_context_is_one_replica_that_reaches_itself() -> None:
    context = mr.get_replica_context()
    assert context.strategy is DEFAULT
    assert int(context.replica_id_in_sync_group) == 0
    assert float(context.all_reduce("sum", 3.0)) == float(context.all_reduce("mean", 3.0)) == 3
    np.testing.assert_array_equal(context.all_gather(np.arange(3), axis=0), np.arange(3))
    strategy, value = context.merge_call(lambda strategy, x: (strategy, strategy.reduce("sum", x)), args=(jnp.ones(2),))
    assert strategy is DEFAULT
    np.testing.assert_array_equal(value, np.ones(2))


@pytest.mark.parametrize("verb", ["replica_id_in_sync_group", "all_reduce", "all_gather", "merge_call", "rng"])
def test_a_context_is_of_no_use_outside_its_step(verb: str, strategy2: mr.MirroredStrategy) -> None:
    def use(context: mr.ReplicaContext) -> Any:
        return {
            "replica_id_in_sync_group": lambda: context.replica_id_in_sync_group,
            "all_reduce": lambda: context.all_reduce("sum", jnp.ones(2)),
            "all_gather": lambda: context.all_gather(jnp.ones(2), axis=0),
            "merge_call": lambda: context.merge_call(lambda strategy: None),
            "rng": lambda: context.rng(0),
        }[verb]()

    contexts: list[mr.ReplicaContext] = []
    strategy2.run(lambda: (contexts.append(mr.get_replica_context()), use(contexts[-1]), None)[2])
    message = r"of the replica context of .*2 replicas.* was used outside the step .* ctx = mr.get_replica_context\(\) inside"
    with pytest.raises(mr.ContextError, match=message):
        use(contexts[-1])
    default = mr.get_replica_context()
    with pytest.raises(mr.ContextError, match=r"the replica context of mr\.DefaultStrategy"):
        strategy2.run(lambda: use(default))
    with strategy2.scope(), pytest.raises(mr.ContextError, match=r"the replica context of mr\.DefaultStrategy"):
        use(default)


# -- random numbers


def drawn(strategy: mr.Strategy, key: Any = 0) -> list[float]:
    """Numbers drawn on each replica from one key, which is closed over."""
    result = strategy.run(lambda: jax.random.uniform(mr.get_replica_context().rng(key)))
    return [float(value) for value in result.values]


def test_random_numbers_differ_by_replica_and_are_the_same_in_every_run(strategy: mr.MirroredStrategy) -> None:
    numbers = drawn(strategy)
    assert len(set(numbers)) == strategy.num_replicas_in_sync
    assert drawn(strategy) == numbers
    assert drawn(mr.MirroredStrategy(strategy.devices)) == numbers
    assert set(drawn(strategy, 1)).isdisjoint(numbers)


def test_random_numbers_of_a_replica_do_not_depend_on_how_many_there_are() -> None:
    numbers = [drawn(mr.MirroredStrategy([f"cpu:{i}" for i in range(count)])) for count in (1, 2, 3)]
    assert numbers[0] == numbers[2][:1]
    assert numbers[1] == numbers[2][:2]


@pytest.mark.parametrize(
    "key", [5, np.int32(5), jax.random.key(5), jax.random.PRNGKey(5)], ids=["int", "numpy", "key", "old key"]
)
def test_random_keys_may_be_numbers(key: Any, strategy2: mr.MirroredStrategy) -> None:
    assert drawn(strategy2, key) == drawn(strategy2, 5)


# -- one program


BRANCHES: dict[str, Callable[[Any], Any]] = {
    "if ==": lambda i: 1 if i == 0 else 2,
    "if": lambda i: 1 if i else 2,
    "and": lambda i: i and 1,
    "int": int,
    "float": float,
    "bool": bool,
    "if in jit": jax.jit(lambda i: 1 if i == 0 else 2),
    "if in a loop": lambda i: jax.lax.fori_loop(0, 2, lambda _, x: x if i == 0 else x + 1, 0),
    "item": lambda i: i.item(),
}


@pytest.mark.parametrize("how", BRANCHES)
def test_python_cannot_branch_on_the_replicas_number(how: str, strategy: mr.MirroredStrategy) -> None:
    def step() -> Any:
        return BRANCHES[how](mr.get_replica_context().replica_id_in_sync_group)

    with pytest.raises(mr.OneProgramError) as caught:
        strategy.run(step)
    message = str(caught.value)
    assert f"at {__file__}:" in message
    for remedy in (
        "jnp.where(ctx.replica_id_in_sync_group == 0, a, b)",
        "jax.lax.cond(",
        "variable.assign(value)",
        "only_first_",
    ):
        assert remedy in message
    assert isinstance(caught.value.__cause__, jax.errors.ConcretizationTypeError)


def test_python_cannot_branch_on_the_replicas_number_in_any_context(strategy2: mr.MirroredStrategy) -> None:
    def step() -> Any:
        return 1 if mr.get_replica_context().replica_id_in_sync_group == 0 else 2

    for call in (
        lambda: in_scope(strategy2, lambda: strategy2.run(step)),
        lambda: mr.function(lambda: strategy2.run(step))(),
        lambda: eagerly(lambda: strategy2.run(step)),
    ):
        with pytest.raises(mr.OneProgramError, match="All replicas run one program"):
            call()


def test_the_remedies_work(strategy3: mr.MirroredStrategy) -> None:
    with strategy3.scope():
        w = mr.Variable(0.0)
        first = mr.Variable(0.0, aggregation="only_first_replica")

    def step() -> tuple[Any, Any]:
        number = mr.get_replica_context().replica_id_in_sync_group
        first.assign(10.0 + number)
        return jnp.where(number == 0, 5.0, 7.0), jax.lax.cond(number == 0, lambda: 5.0, lambda: 7.0)

    for result in strategy3.run(step):
        assert [float(value) for value in result.values] == [5, 7, 7]
    assert float(first) == 10
    assert float(w.assign(3.0)) == 3


def test_a_branch_on_something_else_is_the_error_of_jax(strategy2: mr.MirroredStrategy) -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError):
        strategy2.run(lambda x: 1 if x > 0 else 2, args=(np.float32(1),))


def test_branching_on_the_number_of_replicas_is_fine(strategy: mr.MirroredStrategy) -> None:
    assert strategy.run(lambda: "one" if mr.get_replica_context().num_replicas_in_sync == 1 else "many") == (
        "one" if strategy.num_replicas_in_sync == 1 else "many"
    )


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
