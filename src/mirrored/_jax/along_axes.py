"""Primitives that work along axes, for arrays in parts. No proof rests on them."""

from __future__ import annotations

from math import inf

#: Reductions along axes, and their neutral elements; -1 has all bits set.
NEUTRAL = {"reduce_and": -1, "reduce_max": -inf, "reduce_min": inf, "reduce_or": 0, "reduce_prod": 1, "reduce_sum": 0}
#: Primitives that take a part of their first operand; the other operands or the parameters say where.
SLICES = frozenset({"dynamic_slice", "slice"})
CONCATENATIONS = frozenset({"concatenate"})
