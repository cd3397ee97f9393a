"""Write the tables of a results file as Markdown, and the picture of a step's time by the number of replicas.

    python benchmarks/tables.py benchmarks/results/2026-11-23.jsonl

writes the .md and the .svg beside it. A test looks that those in the repository are of the results in the repository.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import _results

#: The lines of the picture: the contenders' names in the table, and their classes in the style below.
LINES = {
    "by hand": "hand",
    "mirrored": "ours",
    "TensorFlow MirroredStrategy": "tensorflow",
    "PyTorch DDP, one process each": "torch",
}
WORKLOADS = {"W1": "W1 linear", "W2": "W2 MLP", "W3": "W3 convolutions", "W4": "W4 transformer"}
#: Pixels of one workload's part with its margins, of its axes, and of the space to the left of them and above them.
WIDTH, HEIGHT, LEFT, TOP = 370, 270, 52, 90
AXES = (290, 190)
STYLE = """
  .card { fill: #fff }
  text { font: 12px system-ui, sans-serif; fill: #333 }
  .title { font-weight: 600 }
  .small { font-size: 10px; fill: #777 }
  .grid { stroke: #ddd }
  polyline { fill: none; stroke-width: 2 }
  .hand { stroke: #888; stroke-dasharray: 5 3 } .ours { stroke: #1769aa; stroke-width: 3 }
  .tensorflow { stroke: #e07b00 } .torch { stroke: #b3261e }
  circle { stroke: none } circle.hand { fill: #888 } circle.ours { fill: #1769aa }
  circle.tensorflow { fill: #e07b00 } circle.torch { fill: #b3261e }
  @media (prefers-color-scheme: dark) {
    .card { fill: #1d2125 }
    text { fill: #ddd } .small { fill: #999 } .grid { stroke: #444 }
    .ours { stroke: #64b5f6 } circle.ours { fill: #64b5f6 } .torch { stroke: #ef8a80 } circle.torch { fill: #ef8a80 }
  }
"""

#: Seconds of a step: by workload, contender and number of replicas.
Times = Mapping[str, Mapping[str, Mapping[int, float]]]


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        tables = _results.read(path)
        path.with_suffix(".md").write_text(markdown(tables))
        path.with_suffix(".svg").write_text(picture(times_of(tables)))


def markdown(tables: Sequence[Mapping[str, Any]]) -> str:
    """Return all tables, each with when, where and beside which load it was measured."""
    parts = ["# Measured: written by `tables.py` from the `.jsonl` beside it"]
    for benchmark in dict.fromkeys(table["benchmark"] for table in tables):
        parts.append(f"## {benchmark}.py")
        for table in tables:
            if table["benchmark"] == benchmark:
                parts += [f"### {table['title']}", _conditions(table), "\n".join(_lines_of(table))]
    return "\n\n".join(parts) + "\n"


def _conditions(table: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in table["versions"].items())
    return f"{table['date']} UTC, {table['machine']}, load average {table['load']}; {versions}"


def _lines_of(table: Mapping[str, Any]) -> Iterator[str]:
    yield "| | median | figure | middle half | goal | |"
    yield "|---|---|---|---|---|---|"
    for row in table["rows"]:
        yield f"| {' | '.join(row['cells'])} |"


def times_of(tables: Sequence[Mapping[str, Any]]) -> Times:
    """Return the seconds of a step of all tables of step_time.py; of two that measured the same, those of the later one."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    for table in tables:
        if table["benchmark"] == "step_time":
            of_workload = times.setdefault(table["about"]["workload"], {})
            for row in table["rows"]:
                if (name := row["cells"][0]) in LINES:
                    of_workload.setdefault(name, {})[table["about"]["num_replicas"]] = row["seconds"]
    return times


def picture(times: Times) -> str:
    """Draw a step's time by the number of replicas, a part for each workload, both axes logarithmic."""
    columns = [name for name in WORKLOADS if name in times]
    size = f"{2 * WIDTH} {TOP + (len(columns) + 1) // 2 * HEIGHT - 20}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">']
    parts += ["<title>Time of a training step by the number of replicas</title>", f"<style>{STYLE}</style>"]
    parts.append('<rect class="card" width="100%" height="100%" rx="8"/>')
    for position, (name, style) in enumerate(LINES.items()):
        x, y = LEFT + position % 2 * 225, 20 + position // 2 * 20
        parts += [f'<polyline class="{style}" points="{x},{y} {x + 26},{y}"/>', f'<text x="{x + 32}" y="{y + 4}">{name}</text>']
    for position, name in enumerate(columns):
        parts += _part(WORKLOADS[name], times[name], LEFT + position % 2 * WIDTH, TOP + position // 2 * HEIGHT)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _part(title: str, times: Mapping[str, Mapping[int, float]], left: int, top: int) -> Iterator[str]:
    sizes = sorted({size for line in times.values() for size in line})
    largest, smallest = (choose(t for line in times.values() for t in line.values()) for choose in (max, min))
    ticks = _ticks(smallest, largest)
    low, high = math.log(min(smallest, ticks[0]) * 0.9), math.log(max(largest, ticks[-1]) * 1.1)
    width, height = AXES
    across = lambda size: left + 16 + (width - 32) * sizes.index(size) / max(1, len(sizes) - 1)  # noqa: E731
    up = lambda seconds: top + height * (high - math.log(seconds)) / (high - low)  # noqa: E731
    yield f'<text x="{left}" y="{top - 12}" class="title">{title}</text>'
    for tick in ticks:
        yield f'<line class="grid" x1="{left}" x2="{left + width}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
        yield f'<text class="small" x="{left - 4}" y="{up(tick) + 3:.1f}" text-anchor="end">{_shown(tick)}</text>'
    for size in sizes:
        yield f'<text class="small" x="{across(size):.1f}" y="{top + height + 18}" text-anchor="middle">R = {size}</text>'
    for name, style in LINES.items():
        points = [(across(size), up(seconds)) for size, seconds in sorted(times.get(name, {}).items())]
        yield f'<polyline class="{style}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        for x, y in points:
            yield f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'


def _ticks(smallest: float, largest: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten between two times, and one on each side if there is none."""
    powers = range(math.floor(math.log10(smallest)) - 1, math.ceil(math.log10(largest)) + 1)
    round_times = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [t for t in round_times if smallest * 0.6 < t < largest * 1.6]


def _shown(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 0.999 else f"{seconds * 1e3:g} ms"


if __name__ == "__main__":
    main()
