"""Transformations of functions: `mr.function`, loops, gradients."""
