"""Compare several ways of doing the same work: in turns, losses checked against each other, ratios inside a round."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import _results

#: How many turns of the fastest contender a turn of another may take.
LONGEST = 10
#: What the file that runs was called with; `parse` sets it.
_options = argparse.Namespace(record="")


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way of doing the work.

    Attributes:
        name: for the table.
        run: does so many steps, and returns the last one's loss when everything it started is done.
    """

    name: str
    run: Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Times:
    """Hold the seconds a step took, by contender, one entry for each round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, reference: str) -> list[float]:
        """Return a contender's time over the reference's in the same round: a slow minute slows both."""
        return [a / b for a, b in zip(self.seconds[name], self.seconds[reference], strict=True)]


@dataclasses.dataclass(frozen=True)
class Row:
    """Hold one line of a table.

    Attributes:
        what: what was measured.
        value: the measured value, as text.
        samples: the figure that the goal is about, one for each round.
        goal: the largest median of `samples` that passes; None when there is no goal.
        unit: of the figure: "x" for a ratio.
        seconds: the measured value, where it is a time.
    """

    what: str
    value: str
    samples: Sequence[float] = ()
    goal: float | None = None
    unit: str = "x"
    seconds: float | None = None

    def cells(self) -> list[str]:
        figure = statistics.median(self.samples) if self.samples else None
        return [
            self.what,
            self.value,
            self._show(figure),
            " to ".join(self._show(quartile) for quartile in quartiles(self.samples)),
            self._show(self.goal),
            "" if figure is None or self.goal is None else "pass" if figure <= self.goal else "FAIL",
        ]

    def _show(self, figure: float | None) -> str:
        if figure is None:
            return ""
        return f"{figure:.2f}" if self.unit == "x" else f"{figure:.0f} {self.unit}"


def quartiles(samples: Sequence[float]) -> tuple[float, ...]:
    """Return the first and third quartile, or nothing when there are too few samples for them."""
    if len(samples) < 4:
        return ()
    first, _, third = statistics.quantiles(samples, n=4)
    return first, third


def parse(description: str | None, **options: object) -> argparse.Namespace:
    """Parse `--quick`, `--record` and a file's own options, given by name and default."""
    global _options
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few seconds; its numbers mean nothing")
    parser.add_argument("--record", default="", metavar="FILE", help="add the tables to this file, for tables.py")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, type=type(default), help=f"default: {default}")
    _options = parser.parse_args()
    if _options.quick and _options.record:
        parser.error("--quick measures nothing that is worth a record: leave out one of --quick and --record")
    return _options


def check_losses(contenders: Sequence[Contender], num_steps: int, tolerance: float) -> None:
    """Take some steps with each contender, and refuse to time programs that do not compute the same."""
    losses = {c.name: [c.run(1) for _ in range(num_steps)] for c in contenders}
    expected = losses[contenders[0].name]
    for name, found in losses.items():
        if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, expected, strict=True)):
            raise AssertionError(f"{name} computes other losses than {contenders[0].name}: {found} instead of {expected}")


def interleave(contenders: Sequence[Contender], num_rounds: int, turn: float) -> Times:
    """Let the contenders take turns in rotating order: of about `turn` seconds for the fastest, or of one step if it is 0.

    The others take as many steps in a turn, but none works longer than for `LONGEST` turns of the fastest.
    """
    expected = {c.name: _seconds_a_step(c, 5) for c in contenders} if turn else {}
    shortest = min(expected.values(), default=1.0)
    num_steps = {c.name: max(1, round(turn / max(shortest, expected.get(c.name, 1.0) / LONGEST))) for c in contenders}
    seconds: dict[str, list[float]] = {c.name: [] for c in contenders}
    for position in range(num_rounds):
        start = position % len(contenders)
        for contender in (*contenders[start:], *contenders[:start]):
            seconds[contender.name].append(_seconds_a_step(contender, num_steps[contender.name]))
    return Times(seconds)


def _seconds_a_step(contender: Contender, num_steps: int) -> float:
    start = time.perf_counter()
    contender.run(num_steps)
    return (time.perf_counter() - start) / num_steps


def print_table(title: str, rows: Sequence[Row], **about: object) -> None:
    """Print rows as a Markdown table; `figure` is what the goal is about, `middle half` its quartiles; and record it.

    Args:
        title: what all rows have in common.
        rows: of the table.
        about: what a picture of several tables needs, as the number of replicas.
    """
    table = [["", "median", "figure", "middle half", "goal", ""], *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in table]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"\n{title} ({load})\n\n" + "\n".join(lines), flush=True)
    if _options.record:
        data = [dataclasses.asdict(row) | {"cells": row.cells()} for row in rows]
        _results.append(
            Path(_options.record), {"benchmark": Path(sys.argv[0]).stem, "title": title, "about": about, "rows": data}
        )


def show_seconds(seconds: float) -> str:
    """Write a time with its unit and three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
