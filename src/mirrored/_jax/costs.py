"""Counts a compiled program's operations, and the bytes it reads and writes; JAX promises no function for GPUs' programs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jaxlib import _jax as _xla

from .jaxprs import Jaxpr, inner_jaxprs
from .primitives import CONVOLUTIONS, DOT_PRODUCTS


def costs_of(compiled: Any) -> dict[str, float]:
    """Return a compiled program's `flops` and `bytes accessed` on each device."""
    counted = compiled.cost_analysis()
    if not counted:  # without a GPU, the GPU's compiler counts nothing: let the CPU's client count its program
        [module] = compiled.runtime_executable().hlo_modules()
        counted = _xla.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return {"flops": float(counted.get("flops", 0.0)), "bytes accessed": float(counted.get("bytes accessed", 0.0))}


class Products(NamedTuple):
    """The operations of a function's matrix products and convolutions; XLA does not count those in a GPU's libraries."""

    dots: float
    convolutions: float


def products_in(jaxpr: Jaxpr) -> Products:
    """Count the operations of products: in a `scan` for each round, in a `while` once, and in the costliest branch."""
    dots = convolutions = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        size = sum(math.prod(getattr(result.aval, "shape", ())) for result in equation.outvars)
        shapes: list[Any] = [getattr(operand.aval, "shape", ()) for operand in equation.invars]
        if name in DOT_PRODUCTS and "dimension_numbers" in equation.params:
            (contracted, _), _ = equation.params["dimension_numbers"]
            dots += 2.0 * size * math.prod(shapes[0][axis] for axis in contracted)
        elif name in CONVOLUTIONS:
            kernel, features = shapes[1], equation.params["dimension_numbers"].rhs_spec[0]
            convolutions += 2.0 * size * math.prod(kernel) / kernel[features]
        inner = [products_in(closed.jaxpr) for closed in inner_jaxprs(equation)]
        if name == "cond":
            inner = [max(inner, key=sum)]
        times = equation.params["length"] if name == "scan" else 1
        dots += times * sum(each.dots for each in inner)
        convolutions += times * sum(each.convolutions for each in inner)
    return Products(dots, convolutions)


def repeats_in(jaxpr: Jaxpr) -> float:
    """Return by which factor a function makes more elements than XLA counts, which counts the body of each `scan` once."""
    made, once = _elements_in(jaxpr)
    return made / once if once else 1.0


def _elements_in(jaxpr: Jaxpr) -> tuple[float, float]:
    made = once = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = [_elements_in(closed.jaxpr) for closed in inner_jaxprs(equation)]
        if not inner:
            size = sum(math.prod(getattr(result.aval, "shape", ())) for result in equation.outvars)
            inner = [(size, size)]
        elif name == "cond":
            inner = [max(inner)]
        times = equation.params["length"] if name == "scan" else 1
        made += times * sum(its for its, _ in inner)
        once += sum(its for _, its in inner)
    return made, once
