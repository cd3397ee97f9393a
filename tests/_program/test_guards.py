"""What a step's own code names is seen when it changes, whatever it is; what its callees read is read when it is traced."""

import enum
import functools
import types
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from parameters import nightly

import mirrored as mr
from mirrored import testing
from mirrored._program import dispatch
from mirrored._program.own_code import look_at

pytestmark = pytest.mark.usefixtures("in_numpy")

ONE = np.ones(2, np.float32)
SCALE = 2.0


class Mode(enum.Enum):
    SLOW = 1
    FAST = 2


class Trainer:
    default = 2.0

    def __init__(self):
        self.lr = 2.0
        self.cfg = {"lr": 2.0, "inner": [types.SimpleNamespace(lr=2.0)]}
        self.pairs = {("a", None): 2.0, 0.5: 1.0}

    @property
    def twice(self):
        return 2 * self.lr

    def step(self, x):
        def loss(y):
            return next(row * self.lr for row in (y,))

        return loss(jnp.sum(x))

    __call__ = step


def set_lr(t, number):
    t.lr = number


#: Each: makes a step of a trainer; sets the number in it.
WAYS = {
    "attribute": (lambda t: lambda x: jnp.sum(x) * t.lr, set_lr),
    "method": (lambda t: t.step, set_lr),
    "callable object": (lambda t: t, set_lr),
    "default in a class": (lambda t: lambda x: jnp.sum(x) * t.default, lambda t, n: setattr(t, "default", n)),
    "property": (lambda t: lambda x: jnp.sum(x) * t.twice / 2, set_lr),
    "item": (lambda t: (lambda cfg: lambda x: jnp.sum(x) * cfg["lr"])(t.cfg), lambda t, n: t.cfg.update(lr=n)),
    "item by a tuple": (
        lambda t: (lambda cfg: lambda x: jnp.sum(x) * cfg["a", None] * cfg[0.5])(t.pairs),
        lambda t, n: t.pairs.update({("a", None): n}),
    ),
    "items and dots": (lambda t: lambda x: jnp.sum(x) * t.cfg["inner"][0].lr, lambda t, n: set_lr(t.cfg["inner"][0], n)),
    "another object": (
        lambda t: lambda x: jnp.sum(x) * t.cfg["inner"][0].lr,
        lambda t, n: t.cfg["inner"].__setitem__(0, types.SimpleNamespace(lr=n)),
    ),
    "partial": (lambda t: functools.partial(lambda lr, x: jnp.sum(x) * lr, t.lr), set_lr),
    "partial of an object": (lambda t: functools.partial(lambda t, x: jnp.sum(x) * t.lr, t), set_lr),
    "default of an argument": (lambda t: lambda x, lr=t.lr: jnp.sum(x) * lr, set_lr),
    "inner function": (lambda t: lambda x: (lambda y: sum(row * t.lr for row in (y,)))(jnp.sum(x)), set_lr),
    "function that it closes over": (lambda t: (lambda inner: lambda x: inner(jnp.sum(x)))(lambda y: y * t.lr), set_lr),
    "jit": (lambda t: jax.jit(lambda x: jnp.sum(x) * t.lr), set_lr),
    "decorator": (lambda t: functools.wraps(print)((lambda f: lambda *args: f(*args))(lambda x: jnp.sum(x) * t.lr)), set_lr),
    "global": (lambda t: lambda x: jnp.sum(x) * SCALE, lambda t, n: globals().update(SCALE=n)),
}


SOME = ["attribute", "method", "property", "item by a tuple", "items and dots", "partial of an object", "decorator", "global"]


@pytest.mark.by_xla
@pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")
@pytest.mark.parametrize("name", [*SOME, *nightly(*(name for name in WAYS if name not in SOME))])
def test_a_changed_name_is_seen_and_goes_to_and_fro_between_two_programs(name, strategy2, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    make, change = WAYS[name]
    trainer = Trainer()
    step = make(trainer)
    anew = name == "partial" or "default of" in name  # the number is in the function
    function = mr.function(lambda x: strategy2.run(step, args=(x,)))
    x = strategy2.distribute_values_from_function(lambda ctx: ONE)
    with testing.count_programs() as programs:
        for number in (2.0, 3.0, 2.0, 3.0):
            change(trainer, number)
            for _ in range(3):
                step = make(trainer) if anew or name == "function that it closes over" else step
                strategy2.run(step, args=(x,))
            with monkeypatch.context() as fast:
                fast.delattr(dispatch, "key_of")  # a fast path needs none
                assert float(strategy2.run(step, args=(x,)).values[0]) == 2 * number
    assert programs.count == 2, programs.describe()
    numbers = [2.0, 3.0, 2.0]
    if name in ("attribute", "global"):
        numbers += [jnp.asarray(2.0), jnp.asarray(3.0), np.full(2, 5.0, np.float32)[:1], 4, 4.0]  # of another kind, too
    for number in numbers:
        change(trainer, number)
        step = make(trainer) if anew else step
        for found in (strategy2.run(step, args=(ONE,)), function(ONE)):
            assert float(jnp.sum(found)) == 2 * float(jnp.sum(number))


def weigh(x):
    return jnp.sum(x) * 2


def test_strings_sets_flags_functions_and_objects_are_seen_too(strategy2):
    t = types.SimpleNamespace()
    x = strategy2.distribute_values_from_function(lambda ctx: ONE)

    def result(value, step):
        t.value = value
        for _ in range(3):  # the third takes the fast path
            found = strategy2.run(step, args=(x,))
        return float(strategy2.reduce("mean", found))

    by_name = lambda x: {"sum": jnp.sum, "max": jnp.max}[t.value](x)  # noqa: E731
    assert [result(name, by_name) for name in ("sum", "max", "sum")] == [2, 1, 2]
    by_set = lambda x: jnp.sum(x) if "sum" in t.value else jnp.max(x)  # noqa: E731
    names = set()
    assert result(names, by_set) == 1
    names.add("sum")  # in place
    assert result(names, by_set) == 2
    by_type = lambda x: jnp.sum(x) if isinstance(t.value, set) else jnp.max(x)  # noqa: E731
    assert [result(value, by_type) for value in ({1}, frozenset({1}), {1})] == [2, 1, 2]
    by_function = lambda x: t.value(x)  # noqa: E731
    assert [result(f, by_function) for f in (weigh, jnp.max, weigh)] == [4, 1, 4]
    by_mode = lambda x: jnp.sum(x) if t.value is Mode.FAST else jnp.max(x)  # noqa: E731
    assert [result(mode, by_mode) for mode in (Mode.FAST, Mode.SLOW)] == [2, 1]
    by_tuple = lambda x: x * t.value[0] + t.value[1]  # noqa: E731
    assert [result(value, lambda x: jnp.sum(by_tuple(x))) for value in ((1.0, 2.0), (2.0, 2.0))] == [6, 8]


def test_another_variable_or_optimizer_at_a_name_is_updated(strategy2):
    """As in k-fold, where the models are kept for an ensemble."""
    t = types.SimpleNamespace()

    def step(x):
        gradients = mr.grad(lambda: mr.losses.compute_average_loss(x * t.w), t.w)()
        t.opt.apply_gradients(gradients)

    [batch] = strategy2.distribute_dataset([np.ones(4, np.float32)])
    models = []
    for fold in range(3):
        with strategy2.scope():
            t.w = mr.Variable(np.float32(fold))
            t.opt = mr.Optimizer(optax.sgd(1.0), t.w)
        models.append((t.w, t.opt))
        for _ in range(3):
            strategy2.run(step, args=(batch,))
    assert [float(w) for w, _ in models] == [-3, -2, -1]
    t.w, t.opt = models[0]
    strategy2.run(step, args=(batch,))
    assert [float(w) for w, _ in models] == [-4, -2, -1]


@pytest.mark.by_xla
def test_what_is_not_named_and_what_is_made_anew_each_time_compiles_nothing(strategy2):
    class Lists(Trainer):
        @property
        def rows(self):
            return [self.lr]

        def scaled(self, x):
            return x * 2

    t, items = Lists(), defaultdict(int, a=1)

    def step(x):
        return jnp.sum(t.scaled(x)) + len(t.rows) + items["a"] + (items["b"] if len(items) > 1 else 1) + jnp.linalg.norm(x) * 0

    with testing.assert_compiles(1):
        for number in range(4):
            t.other, t.lr = number, float(number)
            assert float(strategy2.run(step, args=(ONE,))) == 7
    assert dict(items) == {"a": 1}


@pytest.mark.by_xla
def test_functions_that_differ_in_their_bound_arguments_are_each_looked_at(strategy2):
    """As two layers of one class."""

    def both(f, g):
        return lambda x: f(x) + g(x)

    layers = [Trainer() for _ in range(3)]
    for number, layer in enumerate(layers, 1):
        layer.lr = float(number)
    of_methods = [both(layers[0].step, layer.step) for layer in layers[1:]]
    of_partials = [both(functools.partial(Trainer.step, layers[0]), functools.partial(Trainer.step, t)) for t in layers[1:]]
    for one, other in (of_methods, of_partials):
        with testing.assert_compiles(2):
            assert [float(strategy2.run(step, args=(ONE,))) for step in (one, other, one)] == [6, 8, 6]


@pytest.mark.by_xla
def test_an_object_among_the_arguments_is_looked_at_as_a_bound_one_is(strategy2):
    """As in a method that is an `mr.function`, and for `strategy.run(step, args=(trainer, x))`."""

    class Training(Trainer):
        def weigh(self, x):
            return jnp.sum(x) * self.inner.lr

        @mr.function
        def train(self, x):
            return strategy2.run(self.weigh, args=(x,))

        @mr.function
        def named(self, x):
            return strategy2.run(lambda x: jnp.sum(x) * self.inner.lr, args=(x,))

    t = Training()
    t.inner = types.SimpleNamespace(lr=2.0, other=0)
    ways = [
        t.train,
        t.named,
        lambda x: strategy2.run(lambda t, x: jnp.sum(x) * t.inner.lr, args=(t, x)),
        lambda x: strategy2.run(lambda x, *, t: jnp.sum(x) * t.inner.lr, args=(x,), kwargs={"t": t}),
        lambda x: strategy2.run(Training.weigh, args=(t, x)),
    ]
    for way in ways:
        with testing.count_programs() as programs:
            for number in (2.0, 3.0, 2.0):
                t.inner.lr, t.inner.other = number, t.inner.other + 1
                assert float(way(ONE)) == 2 * number
        assert programs.count == 2, programs.describe()


def test_what_is_not_there_yet_is_seen_when_it_comes_and_when_it_goes_and_is_not_made(strategy2):
    t, items = Trainer(), defaultdict(int)
    x = strategy2.distribute_values_from_function(lambda ctx: ONE)

    def step(x):
        scale = t.scale if hasattr(t, "scale") else len((1,))  # a global that is no name of the module
        return jnp.sum(x) * scale * (items["b"] if len(items) else 1)

    def result():
        for _ in range(3):  # the third takes the fast path, where there is one
            found = strategy2.run(step, args=(x,))
        return float(strategy2.reduce("mean", found))

    assert (result(), dict(items)) == (2, {})
    t.scale = 3.0
    assert result() == 6
    items["b"] = 2
    assert result() == 12
    del t.scale
    assert result() == 4


def test_paths_are_named_as_they_are_written():
    t = Trainer()

    def step(self, x, k=t):
        return [self.cfg["lr"], k.cfg["inner"][0].lr, t.lr, SCALE, jnp.sum(x), (lambda: self.lr)()]

    sight = look_at((functools.partial(step, t),))
    expected = dict.fromkeys(("self.cfg['lr']", "k.cfg['inner'][0].lr", "t.lr", "SCALE", "self.lr"), 2.0)
    assert {name: sight.named[name] for name in expected} == expected
    assert jnp in sight.objects and not any(each is jnp.sum for each in sight.objects)
