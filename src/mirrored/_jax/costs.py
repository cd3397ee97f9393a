"""Counts a compiled program's operations, and the bytes it reads and writes; JAX promises no function for GPUs' programs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jaxlib import _jax as _xla

from .jaxprs import Equation, Jaxpr, inner_jaxprs
from .primitives import CONVOLUTIONS, DOT_PRODUCTS


def costs_of(compiled: Any) -> dict[str, float]:
    """Return a compiled program's `flops` and `bytes accessed` on each device."""
    counted = compiled.cost_analysis()
    if not counted:  # without a GPU, the GPU's compiler counts nothing: let the CPU's client count its program
        [module] = compiled.runtime_executable().hlo_modules()
        counted = _xla.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return {"flops": float(counted.get("flops", 0.0)), "bytes accessed": float(counted.get("bytes accessed", 0.0))}


class Work(NamedTuple):
    """The work of a function: operations of its matrix products and convolutions, and the elements of all its results.

    XLA does not count the products in a GPU's libraries, and counts the body of each loop once.
    """

    dots: float
    convolutions: float
    elements: float
    elements_once: float  # where the body of each `scan` runs once

    @property
    def repeats(self) -> float:
        """The factor by which the function makes more elements than XLA counts."""
        return self.elements / self.elements_once if self.elements_once else 1.0


def work_in(jaxpr: Jaxpr) -> Work:
    """Add up the work of equations: of a `scan` each round, of a `while` one, of a `cond` the costliest branch."""
    counts = [0.0, 0.0, 0.0, 0.0]
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        parts = [work_in(closed.jaxpr) for closed in inner_jaxprs(equation)] or [_work_of(equation)]
        if name == "cond":
            flops, elements = max((part[:2] for part in parts), key=sum), max(part[2:] for part in parts)
            parts = [Work(*flops, *elements)]
        times = equation.params["length"] if name == "scan" else 1
        repeated = (times, times, times, 1)
        counts = [n + k * sum(column) for n, k, column in zip(counts, repeated, zip(*parts, strict=True), strict=True)]
    return Work(*counts)


def _work_of(equation: Equation) -> Work:
    name, dots, convolutions = equation.primitive.name, 0.0, 0.0
    size = sum(math.prod(getattr(result.aval, "shape", ())) for result in equation.outvars)
    shapes: list[Any] = [getattr(operand.aval, "shape", ()) for operand in equation.invars]
    if name in DOT_PRODUCTS and "dimension_numbers" in equation.params:
        (contracted, _), _ = equation.params["dimension_numbers"]
        dots = 2.0 * size * math.prod(shapes[0][axis] for axis in contracted)
    elif name in CONVOLUTIONS:
        kernel, features = shapes[1], equation.params["dimension_numbers"].rhs_spec[0]
        convolutions = 2.0 * size * math.prod(kernel) / kernel[features]
    return Work(dots, convolutions, size, size)
