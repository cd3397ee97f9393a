"""The record of a saved step: JSON with a checksum of its own. No jax here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any


def encode(record: Mapping[str, Any]) -> bytes:
    """Write a record as JSON, with its own checksum."""
    return json.dumps({"crc32": digest(record), "record": record}, indent=1, sort_keys=True).encode()


def decode(data: bytes) -> dict[str, Any]:
    """Read a record, or raise ValueError when it is not what `encode` wrote."""
    try:
        outer = json.loads(data)
        record, recorded = outer["record"], outer["crc32"]
        computed = digest(record)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"it is not a record: {type(error).__name__}: {error}") from error
    if computed != recorded or not isinstance(record, dict):
        raise ValueError(f"its checksum is {computed}, was {recorded!r} when it was written")
    return record


def digest(record: object) -> str:
    """Return the CRC-32 of a record, independent of its order and spaces."""
    return f"{zlib.crc32(json.dumps(record, sort_keys=True, separators=(',', ':')).encode()):08x}"
