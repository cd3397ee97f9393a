"""Why does a job end? What the first worker to know tells all the others, and how it is shown. No jax here."""

from __future__ import annotations

import dataclasses
import json

from ._text import escape_titled

#: Characters of each text that are sent and shown.
MAX_TEXT = 4096


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Say why a job ends.

    Attributes:
        title: one line.
        detail: more lines.
        lost: workers that are known not to hear it.
        wants_stacks: whether the stacks of all threads of all workers help.
    """

    title: str
    detail: str = ""
    lost: tuple[int, ...] = ()
    wants_stacks: bool = False

    def encode(self) -> str:
        """Return it as what `decode` takes."""
        return json.dumps({**dataclasses.asdict(self), "title": self.title[:MAX_TEXT], "detail": self.detail[-MAX_TEXT:]})

    @staticmethod
    def decode(text: str) -> Verdict:
        """Read what a worker has published; whatever it is, it is a verdict."""
        try:
            fields = json.loads(text[: 16 * MAX_TEXT])
            lost = tuple(int(worker) for worker in fields["lost"])
            return Verdict(str(fields["title"]), str(fields["detail"]), lost, fields["wants_stacks"] is True)
        except (ValueError, TypeError, KeyError, RecursionError):
            return Verdict(f"another process has written {text[:200]!r} where the workers tell each other why they end")

    def __str__(self) -> str:
        return escape_titled(self.title, self.detail, MAX_TEXT)
