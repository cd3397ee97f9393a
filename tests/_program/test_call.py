"""What makes two calls the same program, and what each argument is: an array, or a part of the program."""

import dataclasses
import enum
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from named import named

import mirrored as mr
from mirrored._program.call import ArrayLeaf, argument_names, leaf_names, static_key, take_apart
from mirrored._program.guards import match
from mirrored._program.own_code import Guards, look_at


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    name: str = "relu"


class Unhashable:
    __hash__ = None


def step(x: Any = None, y: Any = None, *rest: Any, flag: Any = None, **others: Any) -> Any:
    return x


def key(*args: Any, **kwargs: Any) -> Any:
    return take_apart(step, args, kwargs).key


def sight(function: Any) -> Guards:
    """What a function sees now."""
    return look_at((function,)).guards


def same_key(first: Any, second: Any) -> bool:
    return first == second and hash(first) == hash(second)


# -- what an argument is


@pytest.mark.parametrize(
    "static",
    [
        True, "relu", b"relu", None, Color.RED, Config(3), int, jnp.float32, step, max, np.str_("relu"), range(3),
        frozenset({1}), object(), Unhashable(), np.dtype("float32"), functools.partial(step, 1), Ellipsis, slice(None),
    ],
    ids=named,
)  # fmt: skip
def test_what_is_no_array_is_compiled_in(static: Any) -> None:
    call = take_apart(step, (static,), {})
    assert call.arrays == []
    assert call.leaves == ([] if static is None else [(static,)])
    hash(call.key)
    assert call.apply([], lambda leaf, array: array) is static


@pytest.mark.parametrize(
    ("array", "shape", "dtype", "is_weak"),
    [
        (np.ones((2, 3)), (2, 3), "float32", False),
        (np.ones(2, "int64"), (2,), "int32", False),
        (np.float64(2), (), "float32", False),
        (np.bool_(True), (), "bool", False),
        (np.ones(2, ml_dtypes.bfloat16), (2,), "bfloat16", False),
        (np.ones(0, "int8"), (0,), "int8", False),
        (np.ones(2, "complex64"), (2,), "complex64", False),
        (jnp.ones((2, 3)), (2, 3), "float32", False),
        (jnp.asarray(2.0), (), "float32", True),
        (jnp.asarray(2), (), "int32", True),
        (2, (), "int32", True),
        (2.5, (), "float32", True),
        (1j, (), "complex64", True),
    ],
    ids=named,
)
def test_an_array_is_passed(array: Any, shape: tuple[int, ...], dtype: str, is_weak: bool) -> None:
    call = take_apart(step, (array,), {})
    assert call.leaves == [ArrayLeaf(shape, jnp.dtype(dtype), is_weak, False)]
    assert (call.arrays[0] is array) is not isinstance(array, np.ndarray | np.generic)  # what lies on the host is copied
    np.testing.assert_array_equal(call.arrays[0], array)
    assert call.apply(["own"], lambda leaf, own: (leaf, own)) == (call.leaves[0], "own")


def test_a_random_key_is_an_array() -> None:
    [leaf] = take_apart(step, (jax.random.key(0),), {}).array_leaves()
    assert leaf.shape == ()
    assert leaf.dtype == jax.random.key(1).dtype


def test_a_per_replica_is_one_replicas_array(strategy3: mr.MirroredStrategy) -> None:
    even = strategy3.distribute_values_from_function(lambda ctx: np.ones(4, "float32"))
    uneven = strategy3.distribute_values_from_function(lambda ctx: np.ones(ctx.replica_id_in_sync_group, "float32"))
    call = take_apart(step, ({"even": even, "uneven": uneven},), {})
    assert call.leaves == [
        ArrayLeaf((4,), jnp.dtype("float32"), False, True),
        ArrayLeaf((2,), jnp.dtype("float32"), False, True, ((0,), (1,), (2,))),
    ]
    assert [array.shape for array in call.arrays] == [(3, 4), (3, 2)]


def test_a_variable_is_compiled_in_and_stays_itself(strategy2: mr.MirroredStrategy) -> None:
    with strategy2.scope():
        w = mr.Variable(np.ones(2))
    call = take_apart(step, ([w],), {})
    assert call.arrays == []
    assert call.apply([], lambda leaf, array: array)[0] is w
    before = call.key
    w.assign(np.zeros(2))
    assert key([w]) == before


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a"]), np.array([b"a"]), np.array([None]), np.array(["2020"], "M8[D]"), np.array([1], "m8[s]"),
        np.zeros(2, [("a", int)]), np.zeros(2, "V3"), np.array(object(), object), np.datetime64("2020"),
    ],
    ids=lambda array: str(array.dtype),
)  # fmt: skip
def test_a_numpy_array_without_numbers_is_refused_by_name(array: Any) -> None:
    message = r"the argument `y\['image'\]` is a numpy array of dtype .*, which no device can hold; expected numbers"
    with pytest.raises(TypeError, match=message):
        take_apart(step, (1,), {"y": {"image": array}})


class HostTensor:
    """A tensor of another library, which numpy can read."""

    def __init__(self, rows: Any) -> None:
        self.rows = np.asarray(rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.rows, dtype)


class NarrowTensor:
    """A tensor with a dtype that its library's numpy arrays do not have, as torch's bfloat16."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **more: Any) -> Any:
        return jnp.ones(3, jnp.bfloat16).__dlpack__(**more)

    def __dlpack_device__(self) -> Any:
        return jnp.ones(3).__dlpack_device__()


def test_arrays_of_other_libraries_on_the_host_are_arrays_and_changed_in_place_they_give_the_new_rows(
    strategy2: mr.Strategy,
) -> None:
    one, other = HostTensor(np.ones(3)), HostTensor(np.arange(3))
    assert take_apart(step, (one,), {}).leaves == [ArrayLeaf((3,), jnp.dtype("float32"), False, False)]
    assert key(one) != key(other) and key(one) == key(HostTensor(np.zeros(3))) == key(np.zeros(3))
    assert take_apart(step, (NarrowTensor(),), {}).leaves == [ArrayLeaf((3,), jnp.dtype("bfloat16"), False, False)]
    for number in range(3):
        one.rows[:] = number
        assert float(strategy2.run(jnp.sum, args=(one,))) == 3 * number
    with pytest.raises(TypeError, match="`x` is a numpy array of dtype <U1"):
        take_apart(step, (HostTensor(["a"]),), {})
    with strategy2.scope():
        assert take_apart(step, (mr.Variable(1.0), HostTensor), {}).arrays == []


# -- equal and different programs


@pytest.mark.parametrize(
    ("args", "others"),
    [
        ((np.ones(2),), (np.zeros(2),)),
        ((np.ones(2),), (np.ones(2, "float32"),)),
        ((np.ones(2, "float32"),), (jnp.zeros(2),)),
        ((2.5, "relu"), (2.5, "relu")),
        ((1,), (2,)),
        ((0.0,), (float("nan"),)),
        ((1,), (jnp.asarray(2),)),
        (({"a": 1, "b": 2},), ({"b": 2, "a": 1},)),
        ((Config(3),), (Config(3),)),
        ((Color.RED,), (Color.RED,)),
        (("a" * 1000,), ("a" * 1000,)),
    ],
    ids=named,
)
def test_calls_that_share_a_program(args: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    assert same_key(key(*args), key(*others))


@pytest.mark.parametrize(
    ("args", "others"),
    [
        ((np.ones(2),), (np.ones(3),)),
        ((np.ones(2),), (np.ones((2, 1)),)),
        ((np.ones(2, "float32"),), (np.ones(2, "int32"),)),
        ((jnp.asarray(2.0),), (jnp.asarray(2.0, "float32"),)),
        ((np.ones(2),), ([np.ones(2)],)),
        (([np.ones(2)],), ((np.ones(2),),)),
        ((1,), (True,)),
        ((0,), (False,)),
        ((1,), (1.0,)),
        (("1",), (1,)),
        (("1",), (b"1",)),
        ((None,), (False,)),
        ((None,), ()),
        ((Config(3),), (Config(4),)),
        ((Color.RED,), (Color.BLUE,)),
        ((Color.RED,), (1,)),
        ((int,), (float,)),
        ((object(),), (object(),)),
        ((np.float32(1),), (1.0,)),
        (({"a": 1},), ({"b": 1},)),
    ],
    ids=named,
)
def test_calls_that_need_two_programs(args: tuple[Any, ...], others: tuple[Any, ...]) -> None:
    assert key(*args) != key(*others)


def test_positional_and_keyword_arguments_differ() -> None:
    assert key(1, 2) != key(1, y=2)
    assert same_key(key(1, y=2, flag=3), key(1, flag=3, y=2))


def test_mirrored_and_per_replica_arrays_differ(strategy2: mr.MirroredStrategy) -> None:
    one = strategy2.distribute_values_from_function(lambda ctx: np.ones(2, "float32"))
    assert key(one) != key(np.ones(2, "float32"))
    assert key(one) != key(np.ones((2, 2), "float32"))


def test_uneven_shapes_are_part_of_the_key(strategy2: mr.MirroredStrategy) -> None:
    def distributed(*sizes: int) -> mr.PerReplica:
        return strategy2.distribute_values_from_function(lambda ctx: np.ones(sizes[ctx.replica_id_in_sync_group]))

    assert key(distributed(1, 3)) != key(distributed(2, 3))
    assert key(distributed(1, 3)) == key(distributed(1, 3))


def test_unhashable_static_values_are_told_apart_by_identity() -> None:
    one, other = Unhashable(), Unhashable()
    assert key(one) == key(one)
    assert key(one) != key(other)


# -- functions


def adder(amount: Any, *, default: Any = 0.0) -> Callable[..., Any]:
    def add(x: Any, y: Any = default, *, z: Any = default) -> Any:
        return x + amount + y + z

    return add


def outer(inner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: inner(x)


def scaled(x: Any) -> Any:
    return x * SCALE  # noqa: F821


class Model:
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def step(self, x: Any) -> Any:
        return x * self.scale

    __call__ = step


ARRAY, MODEL = jnp.ones(2), Model()


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda x: x + 1,
        lambda: adder(2.0),
        lambda: adder("name"),
        lambda: adder(None),
        lambda: adder(float("nan")),
        lambda: adder(ARRAY),
        lambda: adder(1, default=ARRAY),
        lambda: adder(adder(3)),
        lambda: outer(outer(adder(2.0))),
        lambda: functools.partial(adder(1), y=2.0),
        lambda: functools.partial(step, ARRAY, flag=adder(1)),
        lambda: MODEL.step,
        lambda: functools.partial(MODEL.step),
        lambda: MODEL,
        lambda: jnp.tanh,
        lambda: Model,
    ],
)
def test_functions_made_again_are_the_same_program(make: Callable[[], Callable[..., Any]]) -> None:
    assert match(sight(make()), (make(),))
    one, other = take_apart(step, (make(),), {}), take_apart(step, (make(),), {})
    assert same_key(one.key, other.key) and match(one.sees().guards, other.functions)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x + 1, lambda x: x + 1),  # two places, so two lines in messages
        (adder(1), adder(2)),
        (adder(1), adder(1.0)),
        (adder(1), adder(True)),
        (adder(0.0), adder(-0.0)),
        (adder(jnp.ones(2)), adder(jnp.ones(2))),
        (adder([1]), adder([1])),
        (adder(1, default=1.0), adder(1, default=2.0)),
        (adder(adder(3)), adder(adder(4))),
        (outer(outer(adder(2))), outer(outer(adder(3)))),
        (functools.partial(adder(1), y=2.0), functools.partial(adder(1), y=3.0)),
        (functools.partial(adder(1), y=2.0), functools.partial(adder(1), z=2.0)),
        (functools.partial(adder(1), 2.0), functools.partial(adder(1), y=2.0)),
        (functools.partial(adder(1)), adder(1)),
        (Model().step, Model().step),
        (Model(), Model()),
        (types.FunctionType(scaled.__code__, {"SCALE": 1}), types.FunctionType(scaled.__code__, {"SCALE": 2})),
    ],
)
def test_functions_that_need_two_programs(one: Callable[..., Any], other: Callable[..., Any]) -> None:
    assert not match(sight(one), (other,)) and not match(sight(other), (one,))


def test_a_cell_that_is_still_empty_is_no_obstacle() -> None:
    def make() -> Callable[..., Any]:
        def add(x: Any) -> Any:
            return x + later

        empty = sight(add)
        assert match(empty, (add,))
        later = 1.0
        assert not match(empty, (add,))
        return add

    assert match(sight(make()), (make(),))


def test_a_function_that_captures_itself_ends() -> None:
    def make() -> Callable[..., Any]:
        def countdown(n: int) -> Any:
            return countdown(n - 1) if n else 0

        return countdown

    countdown = make()
    assert match(sight(countdown), (countdown,)) and match(sight(countdown), (make(),))
    assert take_apart(countdown, (), {}).sees().objects


# -- identity stays true


@pytest.mark.parametrize(
    "wrap",
    [
        lambda held: (adder(held), ()),
        lambda held: (adder(1, default=held), ()),
        lambda held: (outer(outer(adder(held))), ()),
        lambda held: (functools.partial(step, held), ()),
        lambda held: (functools.partial(step, flag=held), ()),
        lambda held: (held.method, ()),
        lambda held: (step, (held,)),
        lambda held: (step, (held.method,)),
        lambda held: (step, ([{"a": adder(held)}],)),
    ],
)
def test_a_key_says_what_it_identifies_by_identity_and_keeps_it_not_alive(wrap: Callable[[Any], Any]) -> None:
    class Held:
        def method(self) -> None: ...

    held = Held()
    alive = weakref.ref(held)
    function, args = wrap(held)
    call = take_apart(function, args, {})
    sight = call.sees()
    assert any(found is held for found in sight.objects)
    key, guards = call.key, sight.guards
    del held, function, args, call, sight
    gc.collect()
    assert key and guards and alive() is None


# -- names in messages


def test_arguments_are_named_as_the_user_wrote_them() -> None:
    call = take_apart(step, ({"image": ARRAY, "label": ["a", ARRAY]}, True, "more", ARRAY), {"flag": ARRAY, "k": ("c",)})
    assert leaf_names(call) == [
        "`x['image']`", "`x['label'][0]`", "`x['label'][1]`", "`y`", "`rest[0]`", "`rest[1]`", "`flag`", "`k[0]`",
    ]  # fmt: skip
    assert argument_names(call) == ["`x['image']`", "`x['label'][1]`", "`rest[1]`", "`flag`"]


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
def test_names_come_from_the_signature_where_there_is_one(function: Callable[..., Any], names: list[str]) -> None:
    assert argument_names(take_apart(function, (ARRAY, [ARRAY]), {})) == names


def test_the_key_of_a_static_value_is_hashable() -> None:
    for value in (True, "a", None, [1], {1: 2}, step, Unhashable(), MODEL.step):
        hash(static_key(value))


learning_rate = 1.0
loss = 0.0


def reads_globals(output: Any) -> Any:
    return learning_rate * output.loss


def test_a_rebound_global_that_the_function_names_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sight(reads_globals)
    monkeypatch.setitem(globals(), "loss", 5.0)  # an attribute of that name is not the global
    assert match(before, (reads_globals,))
    monkeypatch.setitem(globals(), "learning_rate", 2.0)
    assert not match(before, (reads_globals,))
    monkeypatch.delitem(globals(), "learning_rate")
    assert not match(before, (reads_globals,))


num_traces = 0


def test_a_step_that_counts_its_traces_is_compiled_once(strategy2: mr.Strategy) -> None:
    own = 0

    def step() -> None:
        global num_traces
        nonlocal own
        num_traces += 1
        own += 1

    for _ in range(3):
        strategy2.run(step)
    assert num_traces == own == 1


def test_a_lambda_in_a_loop_at_module_level_sees_the_rebound_name(strategy2: mr.Strategy) -> None:
    names: dict[str, Any] = {"mr": mr, "strategy": strategy2}
    code = """
with strategy.scope():
    v = mr.Variable(0.0)
seen = []
for k in (1.0, 2.0, 3.0):
    strategy.run(lambda: v.assign(k))
    seen.append(float(v))
old = v
with strategy.scope():
    v = mr.Variable(10.0)
strategy.run(lambda: v.assign(k))
"""
    exec(code, names)
    assert names["seen"] == [1.0, 2.0, 3.0] and float(names["v"]) == float(names["old"]) == 3.0


def test_each_change_of_what_a_function_is_made_of_changes_its_key() -> None:
    def make() -> Any:
        value, inner_value = 1, 1

        def inner(x: Any) -> Any:
            return x + inner_value

        def step(x: Any) -> Any:
            return inner(x) * value

        def rebind(new: Any) -> None:
            nonlocal value
            value = new

        def rebind_inner(new: Any) -> None:
            nonlocal inner_value
            inner_value = new

        return step, rebind, rebind_inner

    step, rebind, rebind_inner = make()
    changes = [
        lambda: rebind(3),
        lambda: rebind(3.0),
        lambda: rebind([]),
        lambda: rebind_inner(4),
        lambda: rebind_inner([]),
        lambda: setattr(step, "__defaults__", (1,)),
        lambda: setattr(step, "__defaults__", (2,)),
        lambda: setattr(step, "__defaults__", None),
        lambda: setattr(step, "__kwdefaults__", {"x": 1}),
        lambda: setattr(step, "__kwdefaults__", {"y": 1}),
        lambda: setattr(step, "__code__", make()[0].__code__.replace(co_name="other")),
    ]
    for number, change in enumerate(changes):
        before = sight(step)
        assert match(before, (step,))
        change()
        assert not match(before, (step,)), number
