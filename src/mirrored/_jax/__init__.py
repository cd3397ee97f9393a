"""The parts of JAX that JAX does not promise: only this wing names `jax.extend` or private parts of JAX."""
