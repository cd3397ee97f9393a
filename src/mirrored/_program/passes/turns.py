"""The order of a backward pass on parts: what waits for what, so that gathers and sums overlap and little is alive at once.

Without this order XLA gathers all weights at the begin of the backward pass, and makes weight gradients at its end.
docs/design/parts.md has the reasons and the measured gains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from .on_parts import Addend, Whole

#: Begins the sum of an addend.
Begin: TypeAlias = Callable[[Addend], object]
#: The backward pass waits for a sum so many places after the one where the sum began.
LAG = 1


class Turns:
    """The gathers and sums of a backward pass, in order.

    A gather begins when the operation on the array gathered before it has its operand: so both run at once. Such an operation, a
    loop, or a product with a large whole weight waits for the gradients before it, and for sums begun `LAG` such places before.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Whole, Addend | None]] = []  # gradients that nothing waits for yet
        self._begun: list[tuple[int, Addend]] = []  # sums, and the places since
        self._before: Any = None  # the operand of the operation on the array gathered last

    @property
    def has_waiting(self) -> bool:
        """Whether there are gradients or sums that nothing has waited for."""
        return bool(self._made or self._begun)

    def add(self, value: Whole, addend: Addend | None) -> None:
        """Note a gradient, or a term of one, that has just been made; the sum of a gradient begins at the next gather."""
        self._made.append((value, addend))

    def ready(self, parts: list[Any]) -> list[Any]:
        """Return parts to gather, delayed until the operation on the parts gathered last has its operand."""
        if self._before is None or not parts:
            return parts
        parts, _ = jax.lax.optimization_barrier((parts, self._before))
        return parts

    def wait(self, operands: list[Any], begin: Begin) -> list[Any]:
        """Return an operation's operands, available after the gradients noted before; `begin` begins the gradients' sums."""
        if not operands:
            return operands
        ended = [addend for age, addend in self._begun if age >= LAG]
        self._begun = [(age + 1, addend) for age, addend in self._begun if age < LAG]
        made, self._made = self._made, []
        waits = operands, [addend.total for addend in ended], [value.array for value, _ in made]
        operands, totals, arrays = jax.lax.optimization_barrier(waits)
        for addend, total in zip(ended, totals, strict=True):
            addend.total = total
        for (value, addend), array in zip(made, arrays, strict=True):
            value.array = array
            if addend is not None and addend.total is None:
                begin(addend)
                self._begun.append((1, addend))
        self._before = operands[0]
        return operands

    def hold(self, parts: list[Any], others: list[Any], begin: Begin) -> list[Any]:
        """Return the operands of a recomputation, parts first, available when its turn comes."""
        is_first = self._before is None
        ready, tied = self.ready(parts), self.wait(others, begin)
        if is_first:  # no gather came before, so nothing holds the parts yet
            return jax.lax.optimization_barrier([*ready, *tied])
        return [*ready, *tied]
