"""The order of a backward pass on parts: what waits for what, so that gathers and sums overlap and little is alive at once.

Without it XLA gathers every weight of the backward pass at its begin, and makes weight gradients at its end.
docs/design/parts.md has the reasons and the measured gains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax

from .on_parts import Addend, Whole

#: Begins the sum of an addend.
Begin: TypeAlias = Callable[[Addend], object]
#: So many places to wait after it is begun, the backward pass waits for a sum.
LAG = 1


class Turns:
    """The gathers and sums of a backward pass, in order.

    A gather begins once the operand of the gather before is there: it runs meanwhile, and no earlier. An operation on a gathered
    array, or a product with a large whole weight, waits for the gradients before it, and for sums begun `LAG` such places before.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Whole, Addend | None]] = []  # gradients that nothing waits for yet
        self._begun: list[tuple[int, Addend]] = []  # sums, and the places since
        self._before: Any = None  # the operand of the gather before

    @property
    def has_waiting(self) -> bool:
        """Whether there are gradients or sums that nothing has waited for."""
        return bool(self._made or self._begun)

    def add(self, value: Whole, addend: Addend | None) -> None:
        """Note a gradient, or a term of one, that has just been made; the sum of a gradient begins at the next gather."""
        self._made.append((value, addend))

    def ready(self, parts: list[Any]) -> list[Any]:
        """Return parts that are to be gathered, available when the gather before has its operand."""
        if self._before is None or not parts:
            return parts
        parts, _ = jax.lax.optimization_barrier((parts, self._before))
        return parts

    def wait(self, operands: list[Any], begin: Begin) -> list[Any]:
        """Return the operands of an operation that waits, available after the gradients before it; `begin` begins their sums."""
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
        """Return the operands of what is computed again, parts first, available when it is its turn."""
        is_first = self._before is None
        ready, tied = self.ready(parts), self.wait(others, begin)
        if is_first:  # then no gather was before whose operand holds the parts
            return jax.lax.optimization_barrier([*ready, *tied])
        return [*ready, *tied]
