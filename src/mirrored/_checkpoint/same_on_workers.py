"""Requires that all workers agree before a checkpoint is saved or restored. No jax here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from .._errors import CheckpointError
from .._text import escape_titled

#: The workers' reports to each other, in worker order.
Reports: TypeAlias = Sequence[dict[str, Any]]
#: The number of characters shown of another worker's text.
_MAX_TEXT = 4096


def require_no_error(reports: Reports, verb: str) -> None:
    """Raise the first worker's error on all workers."""
    for worker, report in enumerate(reports):
        if report.get("error") is not None:
            who = f" on worker {worker}" if len(reports) > 1 else ""
            raise CheckpointError(f"checkpoint.{verb} failed{who}, and nothing was done: {_shown(report['error'])}")


def require_same_kinds(every: Sequence[Mapping[str, str]]) -> None:
    """Require that all workers save the same leaves; each worker's mapping is path -> kind, in words."""
    for worker, kinds in enumerate(every):
        if kinds != every[0]:
            path = min(path for path in {*kinds, *every[0]} if kinds.get(path) != every[0].get(path))
            raise CheckpointError(
                f"the workers save different things: {path} is {kinds.get(path, 'not there')} on worker {worker}, and "
                f"{every[0].get(path, 'not there')} on worker 0. Give mr.Checkpoint the same on all workers."
            )


def require_shared(reports: Reports, field: str, describe: Callable[[Any], str]) -> None:
    """Require that a field is equal on all workers; the error names the directories (`where`) of two that differ."""
    first = reports[0]
    for worker, report in enumerate(reports):
        if report[field] != first[field]:
            raise CheckpointError(
                f"the workers do not see the same checkpoints: {_shown(first['where'])} (worker 0) {describe(first[field])}, and "
                f"{_shown(report['where'])} (worker {worker}) {describe(report[field])}. All workers need one directory that "
                "they share, such as one on NFS; nothing was restored."
            )


def refuse_unseen_mark(reports: Reports) -> NoReturn:
    """Raise an error that names the workers that do not see worker 0's mark, with their directories (`where`)."""
    blind = [f"worker {worker} ({_shown(report['where'])})" for worker, report in enumerate(reports) if not report["sees"]]
    raise CheckpointError(
        f"the workers do not share the directory of the checkpoint: what worker 0 writes to {_shown(reports[0]['where'])} is not "
        f"seen by {', '.join(blind)}. Worker 0 writes and all workers read, so give mr.Checkpoint one directory of a file "
        "system that all of them share, such as NFS; nothing was saved or restored."
    )


def require_fit(reports: Reports, step: str) -> None:
    """Raise an error that lists the workers' `problems` with a step, and suggests a partial restore if one fits."""
    problems = by_first_worker([report["problems"] for report in reports])
    if not problems:
        return
    listed = "\n".join(f"  {problem}" for problem in problems)
    way = "Give it the same objects as in the run that saved, or start anew in another directory."
    if any(report["partial_fits"] for report in reports):
        way += (
            "\nTo restore no more than what is named, and let the data start at its beginning:\n"
            "  mr.Checkpoint(directory, ...without the iterator...).restore_latest(partial=True)"
        )
    raise CheckpointError(f"{step} does not fit what mr.Checkpoint was given; nothing has changed:\n{listed}\n{way}")


def by_first_worker(texts: Sequence[Sequence[str]]) -> list[str]:
    """Return the workers' problems, each text once; with several workers, name the first worker that found it."""
    first = {text: worker for worker, found in reversed(list(enumerate(texts))) for text in found}
    if len(texts) == 1:
        return sorted(first)
    return [f"{_shown(text)} (worker {worker})" for text, worker in sorted(first.items())]


def require_same_call(calls: Sequence[str]) -> None:
    """Require that all workers make the same call, such as `save(3)`."""
    if len(set(calls)) > 1:
        listed = ", ".join(f"worker {worker} {_shown(call)}" for worker, call in enumerate(calls))
        raise CheckpointError(f"the workers have made different calls of a checkpoint: {listed}. All must make the same calls.")


def _shown(text: object) -> str:
    """Return another worker's text, escaped and cut."""
    title, _, rest = str(text).partition("\n")
    return escape_titled(title, rest, _MAX_TEXT)
