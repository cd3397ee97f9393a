"""Functions of functions: `mr.function`, loops, gradients."""
