"""Programs: the first run, which JAX starts in Python."""

import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from strategies import all_reduce, divide_small_arrays, strategy_of, variable

import mirrored as mr
from mirrored._program import program


@pytest.mark.parametrize("where", ["_run_python_pjit", "cache_miss"])
def test_ctrl_c_in_the_first_run_of_a_program_comes_when_it_has_kept_the_new_values(where: str, strategy2: mr.Strategy) -> None:
    """JAX runs Python code there, when it has taken the old arrays over and the new ones are nowhere yet."""
    with strategy2.scope():
        w = mr.Variable(np.zeros(2, np.float32))
    hits: list[str] = []

    def interrupt_once(frame, event, argument) -> None:
        if event == "return" and frame.f_code.co_name == where and w.name in names_in(frame) and not hits:
            hits.append(where)
            signal.raise_signal(signal.SIGINT)

    def names_in(frame) -> list[str]:
        """Name the variable where the frame is in the run of a program."""
        while frame is not None and frame.f_code.co_name != "overwrite":
            frame = frame.f_back
        return [] if frame is None else [slot.name for slot in frame.f_locals["home"].slots]

    before = signal.getsignal(signal.SIGINT)
    sys.setprofile(interrupt_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            strategy2.run(lambda: w.assign_add(np.ones(2, np.float32)))
    finally:
        sys.setprofile(None)
    assert hits == [where] and w.numpy().tolist() == [1, 1] and signal.getsignal(signal.SIGINT) is before


def test_where_nobody_handles_ctrl_c_nothing_is_delayed() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with program._delaying_ctrl_c():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    seen = []

    def run() -> None:
        with program._delaying_ctrl_c():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("kind", ["nans", "infs"])
def test_an_error_of_jaxs_search_for_nans_says_how_its_line_is_found(strategy2: mr.Strategy, kind: str, is_warm: bool) -> None:
    """Where a program has given its variables away, JAX cannot run it again to find the NaN, and raises another error."""
    with strategy2.scope():
        w = mr.Variable(np.zeros(2, np.float32))
    fine, bad = np.ones(2, np.float32), np.full(2, -1 if kind == "nans" else 0, np.float32)

    def step(x) -> None:
        w.assign_add(jnp.log(x))

    if is_warm:
        strategy2.run(step, args=(fine,))
    search = {"nans": jax.debug_nans, "infs": jax.debug_infs}[kind]
    with search(True), pytest.raises(FloatingPointError if kind == "nans" and not is_warm else RuntimeError) as caught:
        strategy2.run(step, args=(bad,))
    assert "`with mr.eager(), jax.debug_nans(True):`, which" in "".join(caught.value.__notes__)
    w.assign([0, 0])
    with mr.eager(), search(True), pytest.raises(FloatingPointError) as caught:
        strategy2.run(step, args=(bad,))
    assert "jnp.log(x)" in str(caught.traceback[-1].statement)
    assert not getattr(caught.value, "__notes__", []) and w.numpy().tolist() == [0, 0]


# -- arguments that the step's own jit donates

TX = optax.adam(0.1)


def train(w, state, x):
    """Return the new weights and Adam's state; a result takes the place of each."""
    loss_of = lambda w: mr.losses.compute_average_loss(jnp.sum((x @ w) ** 2, axis=1))  # noqa: E731
    updates, state = TX.update(all_reduce("sum", jax.grad(loss_of)(w)), state)
    return optax.apply_updates(w, updates), state


@pytest.mark.parametrize(
    ("num_devices", "options", "num_rows"), [(1, {}, 7), (3, {"storage": "parts"}, 7), (2, {"num_replicas": 4}, 8)]
)
def test_what_the_steps_own_jit_donates_is_gone_after_it_and_the_numbers_are_the_same(
    num_devices: int, options: dict[str, object], num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    divide_small_arrays(monkeypatch, 64)
    strategy = strategy_of(num_devices, **options)
    trained: list[list[list[float]]] = []
    for step, is_donated in ((train, False), (jax.jit(train, donate_argnums=(0, 1)), True)):
        w, state = jnp.ones((12, 12)), TX.init(jnp.ones((12, 12)))
        for rows in strategy.distribute_dataset([np.arange(12 * num_rows, dtype=np.float32).reshape(-1, 12)] * 3):
            old = jax.tree.leaves((w, state))
            w, state = strategy.run(step, args=(w, state, rows))
        assert [array.is_deleted() for array in old] == [is_donated and array.ndim > 0 for array in old]  # no number is
        trained.append(w.tolist())
    assert trained[0] == trained[1]


def test_an_argument_that_was_donated_says_so_when_it_is_used_again(strategy2: mr.Strategy) -> None:
    v, w = variable(np.zeros(3), strategy2), jnp.ones(3)
    subtract = jax.jit(jnp.subtract, donate_argnums=0)

    def step(w, other):
        v.assign_add(np.ones(3))
        return subtract(w, v.value), other * 2

    new, _ = strategy2.run(step, args=(w, np.ones(3)))
    assert new.tolist() == [0, 0, 0] and w.is_deleted()
    with pytest.raises(RuntimeError, match="deleted") as caught:
        strategy2.run(step, args=(w, np.ones(3)))
    assert "`donate_argnums`" in "".join(caught.value.__notes__) and v.numpy().tolist() == [1, 1, 1]
    assert new.tolist() == [0, 0, 0] and v.numpy().tolist() == [1, 1, 1]


def test_what_a_jit_inside_a_step_gets_from_the_step_and_numbers_and_programs_with_callbacks_donate_nothing(
    strategy2: mr.Strategy,
) -> None:
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    same = jax.jit(lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((3,), jnp.float32), x), donate_argnums=0)
    for step in (lambda x: double(x + 1), same, lambda x: jax.lax.scan(lambda x, _: (double(x), None), x, length=2)[0]):
        x = strategy2.run(lambda: jnp.ones(3))
        strategy2.run(step, args=(x,))
        assert x.tolist() == [1, 1, 1]
    for _ in range(2):  # a number's array is kept for the next step
        assert float(strategy2.run(double, args=(0.5,))) == 1
    with mr.eager():  # nothing is donated where nothing is compiled
        x = strategy2.run(lambda: jnp.ones(3))
        assert strategy2.run(double, args=(x,)).tolist() == [2, 2, 2] and x.tolist() == [1, 1, 1]


def test_of_an_array_given_twice_or_also_closed_over_a_copy_is_donated(strategy2: mr.Strategy) -> None:
    """One of one device would be gone on that one only, and the next program would wait forever; else variables were lost."""
    v, double = variable(np.zeros(3), strategy2), jax.jit(lambda x: 2 * x, donate_argnums=0)
    add, add_both = jax.jit(jnp.add, donate_argnums=0), jax.jit(jnp.add, donate_argnums=(0, 1))
    for x in (jnp.ones(3), strategy2.run(lambda: jnp.ones(3))):
        for function, args in ((add, (x, x)), (add_both, (x, x)), (lambda a, x=x: double(a) + x - 1, (x,))):
            step = lambda *args, function=function: (v.assign_add(np.ones(3)), function(*args))[1]  # noqa: E731
            for _ in range(2):
                assert strategy2.run(step, args=args).tolist() == [2, 2, 2] and x.tolist() == [1, 1, 1]
    assert v.numpy().tolist() == [12, 12, 12]


@pytest.mark.parametrize("is_on_replicas", [False, True])
def test_a_variable_keeps_its_memory_when_what_it_was_given_or_gave_is_donated(
    strategy2: mr.Strategy, is_on_replicas: bool
) -> None:
    v, w, double = variable(np.zeros(3), strategy2), variable(np.zeros(3), strategy2), jax.jit(lambda x: 2 * x, donate_argnums=0)

    def step(x):
        w.assign_add(np.ones(3))
        return double(x) + v.value

    donate_in_steps = [lambda x: strategy2.run(double, args=(x,)), lambda x: strategy2.run(step, args=(x,)) - 1]
    for donate in (double, *donate_in_steps):
        x = strategy2.run(lambda: jnp.ones(3)) if is_on_replicas else jnp.ones(3)
        v.assign(x)
        assert donate(x).tolist() == [2, 2, 2] and x.is_deleted()
        assert [copy.tolist() for copy in strategy2.local_results(v)] == [[1, 1, 1]] * 2
    for donate in donate_in_steps:  # a step donates a copy of the variable's own array, a program of JAX's own the array
        assert donate(v.value).tolist() == [2, 2, 2]
        assert [copy.tolist() for copy in strategy2.local_results(v)] == [[1, 1, 1]] * 2
    assert w.numpy().tolist() == [2, 2, 2]
    own = variable(np.zeros(3), strategy2, synchronization="on_read", aggregation="sum")
    rows = strategy2.run(lambda: jnp.ones(3) * (1 + mr.get_replica_context().replica_id_in_sync_group))
    own.assign(rows)
    strategy2.run(double, args=(rows,))
    assert [copy.tolist() for copy in strategy2.local_results(own)] == [[1, 1, 1], [2, 2, 2]]


def test_what_a_variable_was_given_in_any_form_may_be_donated(strategy2: mr.Strategy) -> None:
    """Assign copies the array of another variable, of what gives itself as an array, and of a PerReplica."""
    other, v = variable(np.ones(3), strategy2), variable(np.zeros(3), strategy2)
    count = variable(np.zeros(3), strategy2, synchronization="on_read", aggregation="mean")
    given = nnx.Param(jnp.ones(3)), strategy2.distribute_values_from_function(lambda _: np.ones(3, np.float32))
    for taker, value in ((v, other), (v, given[0]), (count, given[1])):
        taker.assign(np.zeros(3)).assign(value)
        jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(value)
        assert taker.numpy().tolist() == [1, 1, 1]


@pytest.mark.parametrize("others", [["cpu:0"], ["cpu:1", "cpu:0"], ["cpu:0", "cpu:1", "cpu:2"]], ids=len)
def test_another_strategy_donates_no_memory_of_a_variable(strategy2: mr.Strategy, others: list[str]) -> None:
    """An array that moves to other devices shares the memory on those that it is on already."""
    v, other, double = variable(np.ones(3), strategy2), mr.MirroredStrategy(others), jax.jit(lambda x: 2 * x, donate_argnums=0)
    for x in (v.value, jax.device_put(v.value, jax.devices()[0]), jax.device_put(v.value, jax.devices()[1])):
        assert other.run(double, args=(x,)).tolist() == [2, 2, 2]
        nnx_step = nnx.jit(lambda p: p.set_value(p[...] + 1), donate_argnums=0)
        other.run(nnx_step, args=(param := nnx.Param(x),))
        assert param[...].tolist() == [2, 2, 2]
        assert [copy.tolist() for copy in strategy2.local_results(v)] == [[1, 1, 1]] * 2
    x = jnp.ones(3)
    assert other.run(double, args=(x,)).tolist() == [2, 2, 2] and x.is_deleted()


def test_of_two_arrays_with_one_memory_a_copy_is_donated(strategy2: mr.Strategy) -> None:
    v, add = variable(np.zeros(3), strategy2), jax.jit(jnp.add, donate_argnums=(0, 1))
    step = lambda *args: (v.assign_add(np.ones(3)), add(*args))[1]  # noqa: E731
    for device in jax.devices()[:2]:
        for choose in (lambda x, y: (x, y), lambda x, y: (y, x), lambda x, y: (y, y)):
            x = strategy2.run(lambda: jnp.ones(3))
            assert strategy2.run(step, args=choose(x, jax.device_put(x, device))).tolist() == [2, 2, 2]
    assert v.numpy().tolist() == [6, 6, 6]


@pytest.mark.parametrize("number", [0, 1])
def test_a_step_whose_closed_over_array_is_deleted_says_so_and_changes_nothing(strategy2: mr.Strategy, number: int) -> None:
    """JAX looks at the first device only: the program failed on the second, and the variables were lost."""
    v, x = variable(np.zeros(3), strategy2), jax.device_put(np.ones(3, np.float32), jax.devices()[number])
    step = lambda: (v.assign_add(x), None)[1]  # noqa: E731
    strategy2.run(step)
    jax.jit(lambda x: 2 * x, donate_argnums=0)(x)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"an array that .*<lambda> closes over has been deleted"):
            strategy2.run(step)
    assert [copy.tolist() for copy in strategy2.local_results(v)] == [[1, 1, 1]] * 2


def test_a_written_variable_that_is_deleted_on_one_device_is_named_and_no_other_is_lost(strategy2: mr.Strategy) -> None:
    """JAX looks at the first device only, and the step never ended."""
    v, w = variable(np.ones(3), strategy2), variable(np.zeros(3), strategy2)
    step = lambda: (w.assign_add(v.value), v.assign(v + 1), None)[2]  # noqa: E731
    strategy2.run(step)
    copy = jax.device_put(v.value, jax.devices()[1])
    jax.jit(lambda x: 2 * x, donate_argnums=0)(copy)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"variable '{v.name}' has been deleted on one of its devices"):
            strategy2.run(step)
    v.assign(np.ones(3))
    strategy2.run(step)
    assert [copy.tolist() for copy in strategy2.local_results(w)] == [[2, 2, 2]] * 2


def test_a_function_of_steps_donates_as_its_own_jit_says(strategy2: mr.Strategy) -> None:
    double = lambda x: 2 * x  # noqa: E731
    twice = lambda x: strategy2.run(double, args=(strategy2.run(double, args=(x,)),))  # noqa: E731
    for function, is_donated in ((mr.function(twice), False), (mr.function(jax.jit(twice, donate_argnums=0)), True)):
        x = strategy2.run(lambda: jnp.ones(3))
        assert function(x).tolist() == [4, 4, 4] and x.is_deleted() is is_donated
