"""Where variables' arrays are: warm steps hand over one list, and nothing is lost when programs share variables."""

import contextlib
import functools
import gc
import weakref

import ctrl_c
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from strategies import TWO, strategy_of

import mirrored as mr
from mirrored._program import cache
from mirrored._variables import storage
from mirrored._workers import joint_programs

# Many steps here come from one factory.
pytestmark = pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")


def variables(values, strategy=TWO, **how):
    with strategy.scope():
        return [mr.Variable(np.full(3, value, np.float32), **how) for value in values]


def adding_one(*written):
    """Make a step that adds one to some variables."""

    def step():
        for variable in written:
            variable.assign_add(jnp.ones(3))

    return step


def home_of(variable):
    return variable._slot.place[0]


def first(variable):
    values = variable.numpy()
    assert (values == values[0]).all()
    return float(values[0])


#: What each step writes, of four variables; the last one is a counter of all.
WRITTEN = [(0, 3), (1, 3), (0, 1, 2, 3), (3, 0)]

SHARED = variables([0, 0, 0, 0])
STEPS = [adding_one(*(SHARED[index] for index in indices)) for indices in WRITTEN]
FUNCTIONS = [mr.function(step) for step in STEPS]


def read_and_write(index):
    SHARED[3 - index].assign(SHARED[index] + 1.0)


def check_interleaved(sequence):
    expected, taken = [0.0] * 4, []
    for variable in SHARED:
        variable.assign(np.zeros(3, np.float32))
    for verb, index in sequence:
        if verb == "take":
            taken.append((SHARED[index].value, expected[index]))
        elif verb == "assign":
            SHARED[index].assign(np.full(3, 100.0, np.float32))
            expected[index] = 100.0
        elif verb == "read":
            TWO.run(functools.partial(read_and_write, index))
            expected[3 - index] = expected[index] + 1
        else:
            with mr.eager() if verb == "eager" else contextlib.nullcontext():
                FUNCTIONS[index]() if verb == "function" else TWO.run(STEPS[index])
            for written in WRITTEN[index]:
                expected[written] += 1
        assert [first(variable) for variable in SHARED] == expected
    for array, value in taken:
        np.testing.assert_array_equal(array, np.full(3, value))


operations = st.one_of(
    st.tuples(st.sampled_from(["run", "run", "function", "eager"]), st.sampled_from(range(len(WRITTEN)))),
    st.tuples(st.sampled_from(["take", "assign", "read"]), st.integers(0, 3)),
)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.lists(operations, min_size=4, max_size=12))
def test_interleaved_programs_agree_on_the_variables_and_what_was_taken_stays(sequence):
    check_interleaved(sequence)


def test_programs_that_are_made_again_find_their_variables(monkeypatch):
    monkeypatch.setattr(cache, "MAX_PROGRAMS", 1)
    monkeypatch.setattr(cache, "MAX_FORGOTTEN", 1)
    check_interleaved([("run", index) for index in (0, 1, 1, 0, 2)] + [("take", 3), ("run", 3), ("read", 3), ("run", 0)])


def test_a_ctrl_c_at_any_call_of_steps_that_share_a_variable_loses_nothing():
    a, b, c = variables([0, 0, 0])
    left, right = adding_one(a, b), adding_one(b, c)
    function = mr.function(left)

    def steps():
        a.value, b.value  # taken: to be copied
        TWO.run(left)
        TWO.run(right)
        function()

    def check():
        assert first(b) == first(a) + first(c)

    steps()
    assert ctrl_c.after_each_call(steps, check) > 100


def test_a_ctrl_c_at_any_call_of_a_step_of_several_workers_loses_nothing():
    [a] = variables([0])
    program = jax.jit(lambda arrays, read: ([], [array + 1 for array in arrays]), donate_argnums=0)
    home, started = home_of(a), joint_programs.Announced(program, lambda: None, lambda *arguments: None)
    step = functools.partial(storage.overwrite, started, home, [])
    step()
    assert ctrl_c.after_each_call(step, lambda: first(a)) > 3


def test_what_a_handler_of_a_signal_takes_at_any_call_of_a_step_stays():
    a, b, c = variables([0, 0, 0])
    steps = [adding_one(a, b), adding_one(b, c)]  # b moves
    taken = []

    def work():
        a.numpy(), b.value  # borrowed and taken: to be copied
        for step in steps:
            TWO.run(step)

    def take():
        taken.extend((variable.value, variable.numpy()) for variable in (a, b, c))

    work()
    assert ctrl_c.after_each_call(work, lambda: None, take) > 50
    assert len(taken) > 150
    for array, before in taken:
        np.testing.assert_array_equal(array, before)


def test_a_variable_that_dies_frees_its_array_while_others_of_its_home_live():
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    a, b = variables([0, 0], strategy)
    step = adding_one(a, b)
    strategy.run(step)
    strategy.run(step)
    home, array, slot = home_of(b), weakref.ref(a._array), a._slot
    assert home_of(a) is home
    slot.note_held()
    del a
    gc.collect()
    assert array() is not None  # the program holds its variables
    del step, strategy
    gc.collect()
    assert array() is None
    assert home.arrays[0] is None and slot not in storage.held
    assert first(b) == 2
    TWO.run(adding_one(b))
    assert first(b) == 3


def test_programs_that_overwrite_the_same_variables_in_the_same_order_share_a_home():
    a, b = variables([0, 0])

    def step(x):
        a.assign_add(jnp.sum(x) + jnp.zeros(3))
        b.assign_add(jnp.ones(3))

    homes = []
    for size in (1, 2, 1):
        TWO.run(step, args=(jnp.ones(size),))
        homes.append(home_of(a))
    assert homes[0] is homes[1] is homes[2] is home_of(b) and homes[0].is_whole
    assert (first(a), first(b)) == (4, 3)


def test_a_variable_that_lives_to_the_end_of_a_program_ends_after_the_names_of_our_modules(monkeypatch):
    [v] = variables([0])
    monkeypatch.setattr(storage, "held", None)
    v.__del__()


def test_a_home_that_a_variable_has_left_holds_nothing_of_it():
    a, b = variables([0, 0])
    both = adding_one(a, b)
    TWO.run(both)
    home = home_of(a)
    taken = b.value  # copied before it moves
    TWO.run(adding_one(b))
    assert home.arrays[1] is None
    assert not home.is_whole
    assert (home_of(a), first(a), first(b)) == (home, 1, 2) and taken.tolist() == [1] * 3
    TWO.run(both)
    assert (home_of(b), first(a), first(b)) == (home, 2, 3)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_first_step_overwrites_what_was_given_as_numpy_and_as_jax_and_what_an_optimizer_made(num_replicas, monkeypatch):
    """Copies of all state at the first step were 0.4 of the peak memory of training."""
    copied = []
    monkeypatch.setattr(storage, "_copy", lambda arrays: copied.append(len(arrays)) or [jnp.copy(array) for array in arrays])
    strategy = strategy_of(num_replicas)
    given = jnp.full(20_000, 2.0)
    with strategy.scope():
        w, v = mr.Variable(np.ones(20_000, np.float32)), mr.Variable(given)
        optimizer = mr.Optimizer(optax.chain(optax.trace(0.9), optax.ema(0.9)), [w, v])
    held = v.value
    every = [w, v, *jax.tree.leaves(optimizer.state, is_leaf=lambda leaf: isinstance(leaf, mr.Variable))]

    def step():
        value, gradients = mr.value_and_grad(lambda: jnp.sum(w * v.value), [w, v])()
        optimizer.apply_gradients(gradients, aggregate=False)
        return value

    before = [variable._array for variable in every]
    strategy.run(step)
    assert copied == [1], "what the user holds, and nothing else"
    assert [array.is_deleted() for array in before] == [array is not held for array in before]
    np.testing.assert_array_equal(held, np.full(20_000, 2.0))
    np.testing.assert_array_equal(given, np.full(20_000, 2.0))


def test_only_some_megabytes_are_copied_at_once(monkeypatch):
    sizes = []
    original = storage._copy
    monkeypatch.setattr(storage, "_copy", lambda arrays: (sizes.append(len(arrays)), original(arrays))[1])
    monkeypatch.setattr(storage, "MAX_COPIED_BYTES", 24)  # two of them
    made = variables(range(5))
    for variable in made:
        variable.value  # taken
    TWO.run(adding_one(*made))
    assert sizes == [2, 2, 1] and [first(variable) for variable in made] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_after_out_of_memory_everything_lost_is_named_once_and_training_goes_on(num_replicas):
    strategy = strategy_of(num_replicas)
    with strategy.scope():
        w, other = mr.Variable(np.zeros(3, np.float32), name="w"), mr.Variable(1.0, name="other")
        optimizer = mr.Optimizer(optax.adam(0.1), [w])

    def step(x):
        pairs = jnp.sin(jnp.arange(x.shape[0] ** 4, dtype=jnp.float32) * x[0, 0])  # too large for 1024 rows
        losses = lambda: (x @ w - 1) ** 2 + 1e-9 * jnp.sort(pairs).sum()  # noqa: E731
        loss, gradients = mr.value_and_grad(losses, [w])()
        optimizer.apply_gradients(gradients)
        return loss

    def train(num_rows):
        (batch,) = strategy.distribute_dataset([np.ones((num_rows * num_replicas, 3), np.float32)])
        return float(strategy.reduce("sum", strategy.run(step, args=(batch,))))

    first_loss = train(4)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Out of memory"):
        train(1024)
    lost = (
        r"'w', 'optimizer.*mu.*nu.*'optimizer.iterations' is lost: .* failed \(JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    )
    for _ in range(2):
        with pytest.raises(mr.VariableLostError, match=lost + r"[^:]*\. .*restore_latest.*each of them.*optimizer ag") as error:
            train(4)
        assert "Error dispatching" not in str(error.value)
    assert float(other) == 1
    w.assign(np.zeros(3, np.float32))
    with pytest.raises(mr.VariableLostError, match=lost):
        train(4)
    optimizer = mr.Optimizer(optax.adam(0.1), [w])
    assert train(4) == first_loss


def test_of_many_lost_variables_the_first_are_named():
    lost = storage.Lost.of([f"w{i}" for i in range(400)], RuntimeError("first line\nlast line"))
    assert "'w18', 'w19' and 380 more variables is lost" in lost and "(RuntimeError: last line)" in lost
