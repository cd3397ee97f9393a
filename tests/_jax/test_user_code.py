"""Messages name the user's line."""

import contextlib
import inspect
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._jax import user_code
from mirrored._program import proof


def test_the_users_line_is_the_innermost_that_is_neither_ours_nor_jaxs():
    here = inspect.currentframe().f_lineno
    assert user_code.user_line() == f"{__file__}:{here + 1}"
    lines = []
    jax.jit(lambda x: (lines.append(user_code.user_line()), x)[1])(1.0)
    jax.tree.map(lambda x: lines.append(user_code.user_line()), [1])
    assert lines == [f"{__file__}:{here + 3}", f"{__file__}:{here + 4}"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.tree.map(lambda x: warnings.warn("from inside", UserWarning, stacklevel=user_code.user_stacklevel()), [1])
    assert (caught[0].filename, caught[0].lineno) == (__file__, here + 8)


def lines_of(error):
    """The functions whose lines are in a traceback, from the outermost to the innermost."""
    return [entry.name for entry in traceback.extract_tb(error.__traceback__)]


def test_the_traceback_has_the_users_lines_only():
    strategy = mr.MirroredStrategy(["cpu:0"])

    def users_mistake(x):
        raise RuntimeError("mine") from ValueError("before")

    def step(x):
        with jax.named_scope("inside"), contextlib.ExitStack() as stack:
            stack.callback(users_mistake, x)

    def hides(x):
        try:
            step(x)
        except RuntimeError as error:
            raise OSError("another") from error

    def call(function):
        with pytest.raises(Exception) as caught:
            strategy.run(function, args=(np.float32(1),))
        return caught.value

    error = call(hides)
    here = "test_the_traceback_has_the_users_lines_only"  # pytest's own lines are the user's, like this one
    assert lines_of(error)[-2:] == ["call", "hides"] and here not in lines_of(error)
    assert lines_of(error.__cause__) == ["hides", "step", "users_mistake"]
    assert lines_of(mr.function(lambda: call(step))()) == ["call", "step", "users_mistake"]
    with jax_config("jax_traceback_filtering", "off"):
        assert "_make_program" in lines_of(call(hides))


def test_a_public_function_shows_the_users_lines_only():
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    x = strategy.distribute_values_from_function(lambda ctx: np.ones(2))
    w = mr.Variable(np.ones(2))

    def loss(x):
        return jnp.sum((w - x) ** 2)

    def forgot_run(x):
        return mr.value_and_grad(loss, [w])(x)

    def users_mistake(x):
        raise KeyError("mine")

    with pytest.raises(mr.PerReplicaError) as caught:
        forgot_run(x)
    here = "test_a_public_function_shows_the_users_lines_only"
    assert lines_of(caught.value) == [here, "forgot_run", "loss"] and not getattr(caught.value, "__notes__", [])
    with pytest.raises(KeyError) as caught:
        next(iter(strategy.distribute_dataset([np.ones(4)]).map(users_mistake)))
    assert lines_of(caught.value) == [here, "users_mistake"]
    with pytest.raises(TypeError) as caught:
        strategy.distribute_dataset(np.ones(4))
    assert lines_of(caught.value) == [here]
    with jax_config("jax_traceback_filtering", "off"), pytest.raises(TypeError) as caught:
        strategy.distribute_dataset(np.ones(4))
    assert lines_of(caught.value)[-1] == "check_dataset"


def test_wrong_arguments_of_run_and_a_ctrl_c_show_the_users_lines_only():
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    x = strategy.distribute_values_from_function(lambda ctx: np.ones(2))

    def interrupted(*args):
        raise KeyboardInterrupt

    def called(verb):
        with pytest.raises((TypeError, KeyboardInterrupt)) as caught:
            verb()
        return lines_of(caught.value)[1:]

    assert called(lambda: strategy.run(len, args=x)) == ["<lambda>"]
    assert called(lambda: strategy.run(interrupted, args=(x,))) == ["<lambda>", "interrupted"]
    assert called(mr.function(interrupted)) == ["interrupted"]
    assert called(lambda: next(iter(strategy.distribute_dataset([np.ones(4)]).map(interrupted)))) == ["<lambda>", "interrupted"]


def test_in_a_notebook_a_per_replica_that_jax_was_given_hides_jaxs_lines():
    strategy = mr.MirroredStrategy(["cpu:0", "cpu:1"])
    x = strategy.distribute_values_from_function(lambda ctx: np.ones(2))

    def shown():
        with pytest.raises(mr.PerReplicaError) as caught:
            jnp.sum(x)
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        return [frame.f_code.co_name for frame in frames if not frame.f_locals.get("__tracebackhide__")]

    assert shown() == ["shown"]
    with jax_config("jax_traceback_filtering", "off"):
        assert shown()[-1] == "_refuse"


def test_a_bug_of_ours_shows_its_lines(monkeypatch):
    strategy = mr.MirroredStrategy(["cpu:0"])
    for kind, last in ((AssertionError, "prove"), (KeyError, "prove"), (ValueError, "test_a_bug_of_ours_shows_its_lines")):
        code = compile("def prove(*args): raise kind", user_code.__file__, "exec")
        exec(code, names := {"kind": kind})
        monkeypatch.setattr(proof, "prove", names["prove"])

        with pytest.raises(kind) as caught:
            strategy.run(lambda: 1.0)
        assert lines_of(caught.value)[-1] == last


@contextlib.contextmanager
def jax_config(name, value):
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)
