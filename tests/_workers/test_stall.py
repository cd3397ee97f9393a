"""What a worker says of its place is read only up to a size that no place has."""

import dataclasses

from mirrored._workers import stall
from mirrored._workers.stall import Position, decode


def test_a_text_that_is_too_long_is_no_position() -> None:
    position = Position(1, 2, "step", "", "", waits=True, is_patient=False, has_ended=False, still=0.5)
    long = dataclasses.replace(position, program="x" * 100_000)  # as of a program with a long name
    assert (decode(position.encode()), decode(long.encode())) == (position, long)
    assert decode(position.encode() + " " * stall._MAX_TEXT) is None
