"""What JAX complains about is told from its errors, also where it promises no class for it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mirrored as mr
from mirrored._jax import complaints

VARIABLE = mr.Variable(np.ones(2, np.float32), name="w")


def error_of(function: Callable[[Any], Any]) -> Exception:
    """Return what `function` raises while JAX traces it."""
    with pytest.raises(Exception) as caught:
        jax.make_jaxpr(function)(np.ones(2, np.float32))
    return caught.value


def test_jaxs_complaints_are_known() -> None:
    needs_a_value = (
        lambda x: bool(x[0]),
        np.asarray,
        lambda x: [1, 2][x[0].astype(int)],
        lambda x: float(x[0]),
        lambda x: x[x > 0],
    )
    for function in needs_a_value:
        assert isinstance(error_of(function), complaints.NEEDS_A_VALUE), function
    with pytest.raises(ValueError) as caught:
        jax.tree.map(jnp.add, [VARIABLE], [np.ones(2)])
    assert complaints.complaint_of(caught.value) == ("variable beside an array", "")
    known = {
        ("no axis", "batch"): lambda x: jax.lax.pmean(x, "batch"),
        ("no axis", "rows"): lambda x: jax.lax.axis_index("rows"),
        ("no attribute", "numpy"): lambda x: x.numpy(),
        ("variable is not converted", ""): lambda x: jax.lax.mul(x, VARIABLE),
        ("array is called", ""): lambda x: x(),
        ("array in a format", ""): lambda x: f"{x[0]:.3f}",
        ("function is unpacked", ""): lambda x: [None for a, b in [error_of]],
    }
    for complaint, function in known.items():
        assert complaints.complaint_of(error_of(function)) == complaint


def test_other_errors_are_none_of_them() -> None:
    others = [NameError("name 'x' is not defined"), ValueError("unbound axis name: x"), TypeError("a"), KeyError("numpy")]
    others += [error_of(lambda x: "text".numpy()), error_of(lambda x: jax.tree.map(jnp.add, [(x,)], [x]))]
    for error in others:
        assert complaints.complaint_of(error) == ("", "")
