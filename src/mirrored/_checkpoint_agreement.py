"""What all workers must agree on before a checkpoint is saved or restored. No jax here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from ._errors import CheckpointError

#: What each worker has told the others, in worker order.
Reports: TypeAlias = Sequence[dict[str, Any]]


def require_no_error(reports: Reports, verb: str) -> None:
    """Raise on all workers what went wrong on one of them."""
    for worker, report in enumerate(reports):
        if report.get("error") is not None:
            who = f" on worker {worker}" if len(reports) > 1 else ""
            raise CheckpointError(f"checkpoint.{verb} failed{who}, and nothing was done: {report['error']}")


def require_same_step(reports: Reports) -> None:
    """See that all workers save the same step."""
    if len(steps := {report["step"] for report in reports}) > 1:
        raise CheckpointError(f"the workers save different steps: {sorted(steps)}. All must save the same step.")


def require_same_kinds(every: Sequence[Mapping[str, str]]) -> None:
    """See that all workers save the same things, given in words by path."""
    for worker, kinds in enumerate(every):
        if kinds != every[0]:
            path = min(path for path in {*kinds, *every[0]} if kinds.get(path) != every[0].get(path))
            raise CheckpointError(
                f"the workers save different things: {path} is {kinds.get(path, 'not there')} on worker {worker}, and "
                f"{every[0].get(path, 'not there')} on worker 0. Give mr.Checkpoint the same on all workers."
            )


def require_shared(reports: Reports, field: str, describe: Callable[[Any], str]) -> None:
    """See that all workers look at the same directory: `where`, and a field that is then equal for all."""
    first = reports[0]
    for worker, report in enumerate(reports):
        if report[field] != first[field]:
            raise CheckpointError(
                f"the workers do not see the same checkpoints: {first['where']} (worker 0) {describe(first[field])}, and "
                f"{report['where']} (worker {worker}) {describe(report[field])}. All workers need one directory that they "
                "share, such as one on NFS; nothing was restored."
            )


def by_first_worker(texts: Sequence[Sequence[str]]) -> list[str]:
    """Join what the workers found wrong, each text once, with the first worker that found it when there are several."""
    first = {text: worker for worker, own in reversed(list(enumerate(texts))) for text in own}
    return [f"{text} (worker {worker})" if len(texts) > 1 else text for text, worker in sorted(first.items())]
