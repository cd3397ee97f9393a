"""What makes two calls the same program, and what each argument is: an array, or a part of the program."""

import dataclasses
import enum
import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest
from named import named

import mirrored as mr
from mirrored._program.call import ArrayLeaf, argument_names, take_apart
from mirrored._program.guards import match
from mirrored._program.own_code import look_at

STRATEGY = mr.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    name: str = "relu"


class Unhashable:
    __hash__ = None


def step(x=None, y=None, *rest, flag=None, **others):
    return x


def key(*args, **kwargs):
    return take_apart(step, args, kwargs).key


def sight(function):
    """What a function sees now."""
    return look_at((function,)).guards


def distributed(*sizes, dtype="float32"):
    return STRATEGY.distribute_values_from_function(lambda ctx: np.ones(sizes[ctx.replica_id_in_sync_group], dtype))


# -- what an argument is


class HostTensor:
    """A tensor of another library, which numpy can read."""

    def __init__(self, rows):
        self.rows = np.asarray(rows)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.rows, dtype)


class NarrowTensor:
    """A tensor with a dtype that its library's numpy arrays do not have, as torch's bfloat16."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **more):
        return jnp.ones(3, jnp.bfloat16).__dlpack__(**more)

    def __dlpack_device__(self):
        return jnp.ones(3).__dlpack_device__()


def test_arrays_of_other_libraries_on_the_host_are_arrays_and_give_the_new_rows_when_they_change_in_place():
    one, other = HostTensor(np.ones(3)), HostTensor(np.arange(3))
    assert take_apart(step, (one,), {}).leaves == [ArrayLeaf((3,), jnp.dtype("float32"), False, False)]
    assert key(one) != key(other) and key(one) == key(HostTensor(np.zeros(3))) == key(np.zeros(3))
    assert take_apart(step, (NarrowTensor(),), {}).leaves == [ArrayLeaf((3,), jnp.dtype("bfloat16"), False, False)]
    for number in range(3):
        one.rows[:] = number
        assert float(STRATEGY.run(jnp.sum, args=(one,))) == 3 * number
    for wrong, dtype in (
        (HostTensor(["a"]), "<U1"),
        (np.array(["2020"], "M8[D]"), r"datetime64\[D\]"),
        (np.zeros(2, "V3"), r"\|V3"),
    ):
        with pytest.raises(TypeError, match=f"`x` is a numpy array of dtype {dtype}, which no device can hold"):
            take_apart(step, (wrong,), {})
    with STRATEGY.scope():
        assert take_apart(step, (mr.Variable(1.0), HostTensor), {}).arrays == []


# -- equal and different programs


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.ones(2), np.ones(3)), (np.ones(2), np.ones((2, 1))), (np.ones(2, "float32"), np.ones(2, "int32")),
        (jnp.asarray(2.0), jnp.asarray(2.0, "float32")), (np.ones(2), [np.ones(2)]), ([np.ones(2)], (np.ones(2),)),
        (1, True), (0, False), (1, 1.0), ("1", 1), ("1", b"1"), (np.str_("1"), "2"), (None, False), (Config(3), Config(4)),
        (Color.RED, Color.BLUE), (Color.RED, 1), (int, float), (object(), object()), (np.float32(1), 1.0), ({"a": 1}, {"b": 1}),
        (Unhashable(), Unhashable()), (distributed(2, 2, 2), np.ones(2, "float32")),
        (distributed(2, 2, 2), np.ones((3, 2), "float32")), (distributed(1, 3, 3), distributed(2, 3, 3)),
    ],
    ids=named,
)  # fmt: skip
def test_calls_that_need_two_programs(one, other):
    assert key(one) != key(other)
    assert key(one, 2) != key(one, y=2) and key(None) != key()


# -- functions


def adder(amount, *, default=0.0):
    def add(x, y=default, *, z=default):
        return x + amount + y + z

    return add


def outer(inner):
    return lambda x: inner(x)


def scaled(x):
    return x * SCALE  # noqa: F821


class Model:
    def __init__(self, scale=1.0):
        self.scale = scale

    def step(self, x):
        return x * self.scale

    __call__ = step


ARRAY = jnp.ones(2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x + 1),  # two places, so two lines in messages
        (adder(1), adder(2)), (adder(1), adder(1.0)), (adder(1), adder(True)), (adder(0.0), adder(-0.0)),
        (adder(jnp.ones(2)), adder(jnp.ones(2))), (adder([1]), adder([1])), (adder(1, default=1.0), adder(1, default=2.0)),
        (adder(adder(3)), adder(adder(4))), (outer(outer(adder(2))), outer(outer(adder(3)))),
        (functools.partial(adder(1), y=2.0), functools.partial(adder(1), y=3.0)),
        (functools.partial(adder(1), y=2.0), functools.partial(adder(1), z=2.0)),
        (functools.partial(adder(1), 2.0), functools.partial(adder(1), y=2.0)), (functools.partial(adder(1)), adder(1)),
        (Model().step, Model().step), (Model(), Model()),
        (types.FunctionType(scaled.__code__, {"SCALE": 1}), types.FunctionType(scaled.__code__, {"SCALE": 2})),
    ],
)  # fmt: skip
def test_functions_that_need_two_programs(one, other):
    assert not match(sight(one), (other,)) and not match(sight(other), (one,))


def test_a_function_that_captures_itself_ends():
    def make():
        def countdown(n):
            return countdown(n - 1) if n else 0

        return countdown

    assert match(sight(countdown := make()), (countdown,)) and match(sight(countdown), (make(),))


def test_a_cell_that_is_still_empty_is_no_obstacle():
    def make():
        def add(x):
            return x + later

        empty = sight(add)
        assert match(empty, (add,))
        later = 1.0
        assert not match(empty, (add,))
        return add

    assert match(sight(make()), (make(),))


# -- names in messages


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lambda first, second: first, ["`first`", "`second[0]`"]),
        (lambda first, /, second: first, ["`first`", "`second[0]`"]),
        (lambda *batch: batch, ["`batch[0]`", "`batch[1][0]`"]),
        (lambda first, *, second=1: first, ["`first`", "`args[0][0]`"]),
        (Model().step, ["`x`", "`args[0][0]`"]),
        (functools.partial(step, 1), ["`y`", "`rest[0][0]`"]),
        (min, ["`args[0]`", "`args[1][0]`"]),
    ],
)
def test_names_come_from_the_signature_where_there_is_one(function, names):
    assert argument_names(take_apart(function, (ARRAY, [ARRAY]), {})) == names


class Traces:
    number = 0


num_traces = 0


def test_a_step_that_counts_its_traces_is_compiled_once():
    own = 0

    def step():
        global num_traces
        nonlocal own
        num_traces += 1
        own += 1
        Traces.number += 1

    for _ in range(3):
        STRATEGY.run(step)
    assert num_traces == own == Traces.number == 1


def test_each_change_of_what_a_function_is_made_of_is_seen():
    def step(x, y):
        return x

    changes = {
        "__defaults__": [(1,), (2,), (2, 3), None],
        "__kwdefaults__": [{"a": 1}, {"b": 1}, {"b": 2}, {"b": 2, "c": 3}, None],
        "__code__": [step.__code__.replace(co_name="other")],
    }
    for attribute, values in changes.items():
        for value in values:
            before = sight(step)
            assert match(before, (step,))
            setattr(step, attribute, value)
            assert not match(before, (step,)), (attribute, value)
