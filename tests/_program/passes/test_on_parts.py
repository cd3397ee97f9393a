"""Each operation gives on parts what it gives on whole arrays, and no padding gets into a result."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from parameters import nightly
from strategies import strategy_of

import mirrored as mr
from mirrored._program.passes import parted
from mirrored._program.passes.on_parts import run_on_parts
from mirrored._replicas import division

pytestmark = pytest.mark.usefixtures("in_numpy")

#: Name -> a function of an array whose axis of length 10 is divided, and whether it runs on parts.
FUNCTIONS = {
    "elementwise": (lambda a: jnp.where(a > 0, 1 / a, jnp.exp(a)) * 2 + a.astype(jnp.int8), True),
    "a number everywhere": (lambda a: a * jnp.full(a.shape, 3.0) + jnp.zeros_like(a), True),
    "log of the padding": (lambda a: jnp.log(a + 4).sum(), True),
    "sum": (lambda a: a.sum(), True),
    "sum of one axis": (lambda a: a.sum(0) + a.sum(1).max(), True),
    "max of negatives": (lambda a: (a - 9).max() + (a + 9).min(), True),
    "max of ints": (lambda a: (a.astype(int) - 9).max() + (a.astype(int) + 9).min(), True),
    "product": (lambda a: jnp.prod(1 + a / 100), True),
    "all and any": (lambda a: (jnp.isfinite(1 / (a + 5)).all(), (a > 100).any(), (a < 100).all()), True),
    "norm": (lambda a: jnp.linalg.norm(a), True),
    "transpose": (lambda a: a.T * 2, True),
    "reshape": (lambda a: a.reshape(1, 10, 2, 2) + a[None].reshape(10, 2, 2), True),
    "broadcast": (lambda a: a[:, None] + jnp.ones((10, 2, 4)), True),
    "slice": (lambda a: a[:, 1:4:2] - jax.lax.dynamic_slice(a, (3, 2), (10, 2)), True),
    "concatenate": (lambda a: jnp.concatenate([a, 2 * a], 1), True),
    "concatenate parts": (lambda a: jnp.concatenate([a, 2 * a], 0), False),
    "slice of parts": (lambda a: a[3:7], False),
    "argmax": (lambda a: a.argmax(0), False),
    "cumsum": (lambda a: a.cumsum(0), False),
    "sort": (lambda a: jnp.sort(a, 0), False),
    "flat": (lambda a: a.reshape(-1) * 2, False),
    "product of matrices": (lambda a: a.T @ a, False),
}


@pytest.mark.filterwarnings("ignore::mirrored.RecompilationWarning")
@pytest.mark.parametrize("num_parts", [3, *nightly(5)])
def test_operations_on_parts(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "LEAST_BYTES", 128)
    whole_for: set[str] = set()

    def noted(device: Any, equation: Any, values: Any) -> Any:
        results = run_on_parts(device, equation, values)
        whole_for.update(current if results is None else ())
        return results

    monkeypatch.setattr(parted, "run_on_parts", noted)
    given = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
    one, strategy = strategy_of(1), strategy_of(num_parts, storage="parts")
    with strategy.scope():
        w = mr.Variable(given, name="w")
    current: list[str] = []
    for name, (function, is_on_parts) in FUNCTIONS.items():
        current[:] = [name]
        got, expected = strategy.run(lambda function=function: function(w.value)), one.run(function, args=(given,))
        for found, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6, err_msg=name)
        is_flat_on_parts = name == "flat" and len(given) % num_parts == 0
        assert (name not in whole_for) == (is_on_parts or is_flat_on_parts), name
