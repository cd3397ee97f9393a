"""Ids of parametrized cases: the same in each process, so that several processes can share the tests."""

import re


def named(value: object) -> str:
    """Return the text of a value without addresses in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
