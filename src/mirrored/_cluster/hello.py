"""Messages between workers before jax starts: lines of JSON, of limited size and checked, as the sender may be anybody."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import ClusterConfigError, ClusterStartError
from .._text import describe
from .spec import MAX_WORKERS, Cluster

#: The protocol and its version.
MAGIC = "mirrored-preflight-1"
MAX_LINE = 8192
#: Characters of a message for a person, and of all addresses together; both fit a line with room to spare.
MAX_TEXT = 3000
_MAX_WORD, _MAX_VERSIONS = 300, 16
#: Answers of worker 0: others are missing; all are there. And the answer of jax's service.
WAITING, GO, RUNNING = "waiting", "go", "running"
#: The settings of HTTP/2, which gRPC and so jax's service sends first, from the fourth byte on.
_GRPC = b"\x04\x00\x00\x00\x00\x00"
_ERRORS = {"config": ClusterConfigError, "start": ClusterStartError}


@dataclasses.dataclass
class Hello:
    """The line of JSON in which a worker introduces itself to worker 0."""

    index: int
    num_workers: int
    digest: str  # of its description of the cluster
    workers: Sequence[str]  # the addresses in that description, to show a difference; only the chief's if they are too long
    versions: Mapping[str, str]
    process: str  # its host and process number, for a person
    token: str  # tells a process that connects again from another process with the same index
    is_late: bool = False  # whether it has found a job running at the address: then different clusters may be two jobs

    def encode(self) -> bytes:
        """Return the line that `parse_hello` takes."""
        return encode(dataclasses.asdict(self))


def introduce(cluster: Cluster, versions: Mapping[str, str], process: str, token: str) -> Hello:
    """Make the hello of this worker."""
    workers = tuple(address or "" for address in cluster.workers)
    if sum(map(len, workers)) + 4 * len(workers) > MAX_TEXT:
        workers = workers[:1]
    return Hello(cluster.worker_index, cluster.num_workers, cluster.digest(), workers, dict(versions), process, token)


def encode(message: Mapping[str, Any]) -> bytes:
    """Write a message as one line."""
    return json.dumps({"magic": MAGIC, **message}).encode() + b"\n"


def parse_hello(line: bytes) -> Hello | None:
    """Read a hello; return None for any other line."""
    message = _decode(line)
    if not message or message.keys() != {field.name for field in dataclasses.fields(Hello)}:
        return None
    hello = Hello(**message)
    if not isinstance(hello.workers, list) or not isinstance(hello.versions, dict) or len(hello.versions) > _MAX_VERSIONS:
        return None
    numbers = (hello.index, hello.num_workers)
    words = (*hello.workers, *hello.versions, *hello.versions.values(), hello.digest, hello.process, hello.token)
    are_numbers = all(type(number) is int and 0 <= number <= MAX_WORKERS for number in numbers)
    are_words = all(isinstance(word, str) and len(word) <= _MAX_WORD for word in words)
    if not (are_numbers and are_words and isinstance(hello.is_late, bool)):
        return None
    return hello


def encode_answer(answer: str | Exception) -> bytes:
    """Return the line that `parse_answer` takes."""
    if isinstance(answer, str):
        return encode({"state": answer})
    kind = "config" if isinstance(answer, ClusterConfigError) else "start"
    return encode({"state": "error", "kind": kind, "text": str(answer)[:MAX_TEXT]})


def parse_answer(line: bytes) -> str | Exception | None:
    """Read an answer: WAITING, GO or an error from worker 0, or RUNNING if jax's service answers; None for another line."""
    if line[3:].startswith(_GRPC):
        return RUNNING
    message = _decode(line)
    if message and message in ({"state": WAITING}, {"state": GO}):
        return message["state"]
    if not message or message.keys() != {"state", "kind", "text"} or message["state"] != "error":
        return None
    kind, text = message["kind"], message["text"]
    if kind not in ("config", "start") or not isinstance(text, str) or not 0 < len(text) <= MAX_TEXT:
        return None
    return _ERRORS[kind]("".join(c if c.isascii() and c.isprintable() else ascii(c)[1:-1] for c in text))


def may_be_ours(line: bytes) -> bool:
    """Tell whether a line that is not yet complete begins like ours."""
    start = encode({})[:-2]
    return line[: len(start)] == start[: len(line)]


def first_difference(they: str, theirs: Hello, me: str, mine: Hello) -> str:
    """Say why two workers cannot train together; "" when they can."""
    if theirs.num_workers != mine.num_workers:
        numbers = f"{they} was told of {theirs.num_workers} workers, {me} of {mine.num_workers}"
        return f"{numbers}; give both the same cluster, or start all again if it has just changed"
    if theirs.digest != mine.digest:
        both = enumerate(zip(theirs.workers, mine.workers, strict=False))
        where = [f": worker {i} is at {describe(a)} for the one, at {describe(b)} for the other" for i, (a, b) in both if a != b]
        return f"{they} was given another cluster than {me}{''.join(where[:1])}; give both the same"
    if theirs.index >= mine.num_workers:
        return f"{they} has an index that is not below {mine.num_workers}, the number of workers"
    for name in sorted({*theirs.versions, *mine.versions}):
        my_version, their_version = mine.versions.get(name, "none"), theirs.versions.get(name, "none")
        if my_version != their_version:
            what = f"{describe(name)[1:-1]} {describe(their_version)}"
            return f"{they} runs {what}, {me} runs {describe(my_version)}; install the same version on both"
    return ""


def _decode(line: bytes) -> dict[str, Any] | None:
    if len(line) > MAX_LINE:
        return None
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.pop("magic", None) != MAGIC:
        return None
    return message
