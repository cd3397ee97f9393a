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
    assert complaints.unbound_axis(error_of(lambda x: jax.lax.pmean(x, "batch"))) == "batch"
    assert complaints.unbound_axis(error_of(lambda x: jax.lax.axis_index("rows"))) == "rows"
    assert complaints.is_unconverted(error_of(lambda x: jax.lax.mul(x, VARIABLE)))
    with pytest.raises(ValueError) as caught:
        jax.tree.map(jnp.add, [VARIABLE], [np.ones(2)])
    assert complaints.is_tree_against_leaf(caught.value, mr.Variable)
    assert complaints.is_call_of_array(error_of(lambda x: x()))
    assert complaints.is_formatted(error_of(lambda x: f"{x[0]:.3f}"))
    assert complaints.is_unpacked_function(error_of(lambda x: [None for a, b in [error_of]]))
    assert complaints.missing_attribute(error_of(lambda x: x.numpy())) == "numpy"
    assert complaints.missing_attribute(error_of(lambda x: "text".numpy())) is None


def test_other_errors_are_none_of_them() -> None:
    for error in (NameError("name 'x' is not defined"), ValueError("unbound axis name: x"), TypeError("a"), KeyError("numpy")):
        assert complaints.unbound_axis(error) is None and complaints.missing_attribute(error) is None
        assert not (complaints.is_unconverted(error) or complaints.is_tree_against_leaf(error, mr.Variable))
        assert not (complaints.is_call_of_array(error) or complaints.is_formatted(error))
    other = error_of(lambda x: jax.tree.map(jnp.add, [(x,)], [x]))
    assert not complaints.is_tree_against_leaf(other, mr.Variable)
