"""XLA's compilations are heard, under JAX's names, until the block ends."""

import jax
import jax.numpy as jnp

from mirrored._jax.compilations import heard


def test_a_user_may_clear_all_listeners_meanwhile() -> None:
    """JAX has no public way to clear one kind only, so that a cleared one must not fail at the end."""
    found: list[str] = []
    with heard(found.append):
        jax.monitoring.clear_event_listeners()
    jax.jit(lambda x: x * 3)(jnp.ones(7))
    assert found == []
