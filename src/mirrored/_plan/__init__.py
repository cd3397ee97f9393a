"""Compiles training steps for machines that are not here, and says what they would do there."""
