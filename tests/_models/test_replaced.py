"""What is replaced in Keras and Equinox is a table; it is in place inside scopes and traces, and undone after the last."""

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import mirrored as mr

keras = pytest.importorskip("keras")
equinox = pytest.importorskip("equinox")

from mirrored import _process  # noqa: E402
from mirrored._models import replaced  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("in_numpy"),
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]

X, Y = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32), np.arange(12, dtype=np.float32)[:, None]


def methods() -> list[Any]:
    """Return what stands at each place of the table, and whether the class itself has it."""
    return [(getattr(owner, name), name in vars(owner)) for owner, name, _ in replaced.table()]


def model(*more: Any) -> Any:
    keras.utils.set_random_seed(3)
    kinds = keras.layers
    made = keras.Sequential([keras.Input((3,)), kinds.Dense(1, use_bias=False), kinds.BatchNormalization(), *more])
    made.compile(keras.optimizers.SGD(0.1), "mse")
    return made


def trained(model: Any) -> list[np.ndarray]:
    """Train a model, and return its weights."""
    keras.utils.set_random_seed(4)
    model.fit(X, Y, batch_size=6, epochs=2, verbose=0)
    return model.get_weights()


@functools.cache
def trained_alone() -> list[np.ndarray]:
    return trained(model())


def require_same_bits(own: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert [a.tobytes() for a in own] == [b.tobytes() for b in expected]


def test_the_table_is_in_place_inside_scopes_and_steps_and_undone_after_the_last(strategy2, strategy3: mr.Strategy) -> None:
    before = methods()
    assert len(before) == 14 and _process.replaced == {}
    assert not any("mirrored" in inspect.getsourcefile(method) for method, _ in before), "the import replaces nothing"

    def in_step() -> None:
        assert all(now[0] is not old[0] for now, old in zip(methods(), before, strict=True))

    with strategy2.scope():
        in_step()
        with strategy2.scope():
            in_step()
        in_step()
        strategy2.run(in_step)
        in_step()
    assert methods() == before
    strategy3.run(in_step)
    assert methods() == before
    mr.function(in_step)()
    assert methods() == before
    with pytest.raises(KeyError), strategy2.scope():
        raise KeyError
    with mr.eager():
        strategy2.run(in_step)
    assert methods() == before and _process.replaced == {}


def beside(enter: Callable[[], contextlib.AbstractContextManager[Any]], work: Callable[[], Any]) -> Any:
    """Do some work in a thread while this one is in a scope."""
    found = []
    with enter():
        thread = threading.Thread(target=lambda: found.append(work()))
        thread.start()
        thread.join()
    return found[0]


def test_a_model_of_no_strategy_is_trained_to_the_same_bits_beside_a_scope_and_after_it(strategy2: mr.Strategy) -> None:
    found = beside(strategy2.scope, lambda: trained(model(keras.layers.Dropout(0.5, seed=1))))
    plain = model(keras.layers.Dropout(0.5, seed=1))
    require_same_bits(found, trained(plain))
    assert {len(variable.value.devices()) for variable in plain.variables} == {1}
    assert not any(name in vars(plain) for name in ("fit", "evaluate", "predict")) and plain not in _process.library_models
    layer, state = equinox.nn.make_with_state(equinox.nn.BatchNorm)(3, "batch", mode="batch")
    call = equinox.filter_vmap(layer, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    require_same_bits([beside(strategy2.scope, lambda: np.asarray(call(X, state)[0]))], [np.asarray(call(X, state)[0])])


def test_a_model_of_no_scope_that_a_step_has_taken_over_is_fitted_outside_with_a_warning(strategy2: mr.Strategy) -> None:
    made = model()
    strategy2.run(lambda: made(X[:2]))
    with pytest.warns(UserWarning, match="its steps have taken over.*each replica computes the whole batch.*or fit it there"):
        own = trained(made)
    for a, b in zip(own, trained_alone(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    with strategy2.scope():
        made.fit(X, Y, batch_size=6, verbose=0)
    made.fit(X, Y, batch_size=6, verbose=0)  # without a warning: the model knows its strategy from now on
    strategy2.assert_mirrored()


def test_who_replaces_ours_in_a_scope_stays_and_ours_does_its_work_once(strategy2: mr.Strategy, monkeypatch) -> None:
    generator = keras.random.SeedGenerator
    plain = generator.next
    with strategy2.scope():
        first, second = generator(1), generator(1)
        expected = strategy2.run(lambda: first.next())
        ours = generator.next
        monkeypatch.setattr(generator, "next", lambda self, *args, **kwargs: ours(self, *args, **kwargs))
        theirs = generator.next
    assert generator.next is theirs
    again = strategy2.run(lambda: second.next())
    for key, other in zip(strategy2.local_results(again), strategy2.local_results(expected), strict=True):
        np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(other))
    assert generator.next is theirs
    monkeypatch.undo()
    assert generator.next is ours
    with strategy2.scope():
        pass
    assert generator.next is plain and _process.replaced == {}
