"""Why does a job end? The message of the first worker to know, and the errors that mean a loss. No jax here."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

from .._errors import FAILED, INTERRUPTED, RESTART, WorkerLostError
from .._text import escape, escape_titled
from .messages import parse

#: Characters of each text that are sent and shown.
MAX_TEXT = 4096


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The reason why a job ends."""

    title: str  # one line
    detail: str = ""
    lost: tuple[int, ...] = ()  # workers that cannot read it
    wants_stacks: bool = False  # whether the stacks of all threads of all workers help
    code: int = RESTART  # the exit code of workers without an error of their own

    def encode(self) -> str:
        """Return the text that `decode` takes."""
        return json.dumps({**dataclasses.asdict(self), "title": self.title[:MAX_TEXT], "detail": self.detail[-MAX_TEXT:]})

    @staticmethod
    def decode(text: str) -> Verdict:
        """Read a published verdict; a malformed text becomes the reason."""
        try:
            fields = parse(text)
            lost = tuple(int(worker) for worker in fields["lost"])
            code = FAILED if fields.get("code") == FAILED else RESTART
            return Verdict(str(fields["title"]), str(fields["detail"]), lost, fields["wants_stacks"] is True, code)
        except (ValueError, TypeError, KeyError):
            return Verdict(f"another process has written {text[:200]!r} where the workers tell each other why they end")

    def __str__(self) -> str:
        return escape_titled(self.title, self.detail, MAX_TEXT)


#: XLA's errors after another worker's death: a status, and the part that reports it. Their class does not tell: JaxRuntimeError,
#: RuntimeError or ValueError. An error of the program itself that names a timeout or NCCL has no status.
_LOSS = re.compile(
    r"\b(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): "
    r".*(Gloo|NCCL|coordination_service|Getting local topologies failed|GetKeyValue\(\) timed out)",
    re.DOTALL,
)
#: The beginning of a host callback's exception, in the text of XLA's error.
_OF_CALLBACK = "Traceback (most recent call last)"
#: In the texts of errors of a coordination service that is gone.
_SIGNS_OF_SERVICE_LOSS = ("UNAVAILABLE", "Socket closed", "Connection reset by peer", "Connection refused")


def last_error() -> BaseException | None:
    """Return the error that has ended the main thread: Python notes it before it calls any exception hook."""
    error = getattr(sys, "last_value", None)
    trace = getattr(error, "__traceback__", None)
    if trace is None or trace.tb_frame.f_back is not None:  # somebody has caught it
        return None
    return error


def tells_of_loss(error: BaseException) -> bool:
    """Tell whether an error follows from another worker's death."""
    return isinstance(error, WorkerLostError) or bool(_LOSS.search(_text_of(error).partition(_OF_CALLBACK)[0]))


def tells_of_lost_service(error: BaseException) -> bool:
    """Tell whether an error of a call into the coordination service says that the service is gone."""
    return any(sign in _text_of(error) for sign in _SIGNS_OF_SERVICE_LOSS)


def title_of(error: BaseException) -> str:
    """Return the class and the first line of an error, as one line for the log."""
    return escape(": ".join(filter(None, (type(error).__name__, _text_of(error).partition("\n")[0]))), MAX_TEXT // 2)


def exit_code_of(error: BaseException) -> int:
    """Return the program's exit code: that of the error, if it has a code of failure."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    code = getattr(error, "exit_code", FAILED)
    if type(code) is not int or not 0 < code < 256:
        return FAILED
    return code


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # of the user's class
        return "(which has no text)"
