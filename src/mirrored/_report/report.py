"""Writes one page about a run: of this process, or with `mirrored report` from the files of several workers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from .._errors import ContextError
from .._replicas import frames
from .._strategy.strategy import Strategy, coordination_of
from .._text import escape, shown
from .facts import facts_of, file_of, join_facts, load, replace, save
from .page import page

_NO_FACTS = 1


def report(strategy: Strategy, path: str | os.PathLike[str] = "mirrored-report.html") -> Path | None:
    """Write the facts of a strategy's run as one HTML page that needs no other file.

    The page shows the devices, how each dataset is split, the programs and why each was compiled, how a step spends its time,
    the collectives and their bytes, the memory of each device, the last comparison of copies, and the warnings. Writing it
    needs no communication and runs no program, so you may call this at any time, even while another thread trains.

    Args:
        strategy: the strategy that ran.
        path: the file to write. An old file is replaced in one step, and a missing folder is made. For a name that ends in
            `.json` each worker writes its facts as data, to `report.0.json`, `report.1.json`, ..., and the command
            `mirrored report FOLDER` makes one page of them, which shows the parts of each worker's time.

    Returns:
        The path of the file; None on workers other than the chief, which write no page.

    Raises:
        TypeError: for a wrong argument.
        IsADirectoryError: when the path is a folder.
        ContextError: (a RuntimeError) inside a step or an `mr.function`.

    >>> import tempfile
    >>> _ = strategy.run(lambda: mr.get_replica_context().all_reduce("sum", jnp.ones(256)))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = mr.report(strategy, f"{folder}/run.html").read_text()
    >>> "all-reduce" in text, "1.0 KiB" in text
    (True, True)
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(f"mr.report got {shown(strategy)}; expected a strategy: mr.report(strategy, 'run.html').")
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes) or not os.fspath(path):
        raise TypeError(f"mr.report: path is {shown(path)}; expected the file to write: mr.report(strategy, 'run.html').")
    if frames.is_traced():
        raise ContextError(
            "mr.report was called inside a step or an mr.function, which is traced once and then run many times. Call "
            "mr.report(strategy) outside, after it."
        )
    file = Path(path)
    if file.suffix == ".json":
        file = file_of(file, coordination_of(strategy).worker, strategy.num_workers)
    elif not strategy.is_chief:
        return None
    if file.is_dir():
        raise IsADirectoryError(f"mr.report: {str(file)!r} is a folder; write the name of a file: {str(file / 'run.html')!r}.")
    facts = facts_of(strategy)
    if file.suffix == ".json":
        save(facts, file)
    else:
        replace(file, page(facts))
    return file


def main(argv: Sequence[str]) -> int:
    """Run `mirrored report`: make one page from the files of a run."""
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
        replace(output, page(join_facts(every), every))
    except (OSError, ValueError) as error:
        sys.stderr.write(f"mirrored report: {escape(str(error), 1000)}\n")
        return _NO_FACTS
    missing = sorted({replica.worker for replica in every[0].replicas} - {facts.worker for facts in every})
    note = f"; without workers {', '.join(map(str, missing))}, whose files are not there" if missing else ""
    sys.stdout.write(f"{output}{note}\n")
    return 0
