"""XLA's compilations are heard, under JAX's names, until the block ends."""

import jax
import jax.numpy as jnp

from mirrored._jax.compilations import heard


def test_each_compilation_is_heard_once_inside_the_call_that_needs_it() -> None:
    found: list[str] = []
    is_inside = False

    def tell(name: str) -> None:
        assert is_inside
        found.append(name)

    @jax.jit
    def compiled_for_this_test(x: jax.Array) -> jax.Array:
        return jnp.sin(x) + 1

    three, four = jnp.ones(3), jnp.ones(4)
    with heard(tell):
        is_inside = True
        compiled_for_this_test(three)
        compiled_for_this_test(three)
        compiled_for_this_test(four)
        is_inside = False
    compiled_for_this_test(jnp.ones(5))
    assert found == ["compiled_for_this_test"] * 2


def test_a_user_may_clear_all_listeners_meanwhile() -> None:
    """JAX has no public way to clear one kind only, so that a cleared one must not fail at the end."""
    found: list[str] = []
    with heard(found.append):
        jax.monitoring.clear_event_listeners()
    jax.jit(lambda x: x * 3)(jnp.ones(7))
    assert found == []
