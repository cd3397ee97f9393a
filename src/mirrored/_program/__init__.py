"""From a step function to a compiled program."""
