"""Facts in files, one of each worker, and the command `mirrored report` that makes one page of them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._replicas.device_time import DeviceTime
from .._text import describe, escape
from .._variables.equal_copies import CopiesCompared
from .facts import Compiled, Exchange, Facts, Replica, Split, StateEntry
from .page import page
from .replacing import replace

_VERSION = 2
_NO_FACTS = 1


def file_of(path: Path, worker: int, num_workers: int) -> Path:
    """Return the name of a worker's own file: `run/report.json`, and `run/report.2.json` of worker 2 of several."""
    return path if num_workers == 1 else path.with_suffix(f".{worker}{path.suffix}")


def save(facts: Facts, path: Path) -> None:
    """Write facts as JSON."""
    replace(path, json.dumps({"mirrored_report": _VERSION, **dataclasses.asdict(facts)}, indent=1))


def load(path: Path) -> Facts | None:
    """Read what `save` wrote; None for any other file.

    Raises:
        ValueError: when it was written by another version, or is damaged.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    if not isinstance(data, dict) or "mirrored_report" not in data:
        return None
    version = data.pop("mirrored_report")
    if version != _VERSION:
        raise ValueError(f"{path} has version {describe(version)} of the facts of a report; this mirrored reads {_VERSION}")
    try:
        return _facts(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _facts(data: dict[str, Any]) -> Facts:
    programs = [
        Compiled(name, num_written, num_read, cause, tuple(Exchange(*exchange) for exchange in exchanges))
        for name, num_written, num_read, cause, exchanges in data.pop("programs")
    ]
    comparison: list[Any] | None = data.pop("comparison")
    profiled: dict[str, Any] | None = data.pop("profiled")
    return Facts(
        replicas=tuple(Replica(*row) for row in data.pop("replicas")),
        datasets=tuple(Split(*row) for row in data.pop("datasets")),
        programs=tuple(programs),
        variables=tuple(StateEntry(name, tuple(shape), *rest) for name, shape, *rest in data.pop("variables")),
        profiled=None if profiled is None else DeviceTime(seconds=dict(profiled.pop("seconds")), **profiled),
        comparison=None if comparison is None else CopiesCompared(*comparison),
        warnings=tuple((str(message), int(count)) for message, count in data.pop("warnings")),
        **data,
    )


def joined(every: Sequence[Facts]) -> Facts:
    """Join the facts of several workers: of each device what its own worker knows, and the warnings of all."""
    first, by_worker = every[0], {facts.worker: facts for facts in every}
    warnings: Counter[str] = Counter()
    for facts in every:
        warnings.update(dict(facts.warnings))
    replicas = [by_worker.get(replica.worker, first).replicas[i] for i, replica in enumerate(first.replicas)]
    return dataclasses.replace(first, replicas=tuple(replicas), warnings=tuple(warnings.items()))


def main(argv: Sequence[str]) -> int:
    """Run `mirrored report`: make one page of the files of a run."""
    parser = argparse.ArgumentParser(
        "mirrored report",
        description="Write one page about a run, of the files that each worker has written by "
        'mr.report(strategy, "RUN/report.json").',
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of these files, or one of them")
    parser.add_argument("-o", "--output", type=Path, help="the page; default: report.html in the folder")
    options = parser.parse_args(argv)
    run: Path = options.run
    try:
        files = sorted(run.glob("*.json")) if run.is_dir() else [run]
        every = sorted((facts for facts in map(load, files) if facts is not None), key=lambda facts: facts.worker)
        if len({facts.worker for facts in every}) < len(every) or len({len(facts.replicas) for facts in every}) > 1:
            raise ValueError(f"{run} has the files of several runs; name one of them, or give each run a folder of its own")
        if not every:
            raise ValueError(
                f"{run} has no facts of a run. Write them on each worker at the end of the training: "
                'mr.report(strategy, "RUN/report.json")'
            )
        output: Path = options.output or (run if run.is_dir() else run.parent) / "report.html"
        replace(output, page(joined(every), every))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"mirrored report: {escape(str(error), 1000)}\n")
        return _NO_FACTS
    missing = sorted({replica.worker for replica in every[0].replicas} - {facts.worker for facts in every})
    note = f"; without workers {', '.join(map(str, missing))}, whose files are not there" if missing else ""
    sys.stdout.write(f"{output}{note}\n")
    return 0
