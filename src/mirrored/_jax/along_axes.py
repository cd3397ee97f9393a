"""Primitives that work along axes, for arrays of which each device has a part. No proof rests on them."""

from __future__ import annotations

from math import inf

#: Reductions along axes, and the number that changes no result of theirs; -1 has all bits.
NEUTRAL = {"reduce_and": -1, "reduce_max": -inf, "reduce_min": inf, "reduce_or": 0, "reduce_prod": 1, "reduce_sum": 0}
#: Parts of their first operand, which begin at the other operands or at known places.
SLICES = frozenset({"dynamic_slice", "slice"})
CONCATENATIONS = frozenset({"concatenate"})
