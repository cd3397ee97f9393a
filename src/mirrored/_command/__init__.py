"""The parts of the command `mirrored`. No jax here."""
