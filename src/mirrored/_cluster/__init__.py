"""Who the workers are, before JAX starts. No jax here."""
