"""What JAX does not promise: the only wing that names `jax.extend` or a private part of JAX."""
