"""What a worker has done is compared with what others have done at the same number, wherever they are by now."""

import json

import pytest

from mirrored._workers.messages import read_all
from mirrored._workers.progress import SIZE, Entry, ProgramTrail
from mirrored._workers.same_program import parting


def trail(text: str) -> ProgramTrail:
    """One of a worker that has done what the letters are, of which each is a step."""
    made = ProgramTrail()
    for step, name in enumerate(text):
        made.add(name, name.encode(), step)
    return made


def told(*texts: str) -> dict[int, list[Entry]]:
    return {worker: read_all(Entry, trail(text).encode()) or [] for worker, text in enumerate(texts)}


def test_who_is_ahead_or_behind_contradicts_nobody_and_who_did_other_things_does() -> None:
    here = trail("abcde")
    for there in ("", "a", "abc", "abcde", "abcdef"):
        last = trail(there).last
        assert not here.contradicts(last.number, last.checksum) and not trail(there).contradicts(5, here.last.checksum)
    for there in ("b", "acb", "abcdd", "abdcee"[:5]):
        last = trail(there).last
        assert here.contradicts(last.number, last.checksum), there
    long = trail("a" * (SIZE + 2))
    assert [number for number in (0, 2, 3, SIZE + 2, SIZE + 3) if long.contradicts(number, 1)] == [3, SIZE + 2], (
        "nor what was long ago"
    )


def test_what_was_taken_back_contradicts_nobody() -> None:
    here, there = trail("ab"), trail("ab")
    for made, name in ((here, "c"), (there, "d")):
        before = made.last
        made.add(name, name.encode(), 2)
        made.take_back(before, is_refused=True)
    late = trail("abd").last
    here.add("e", b"e", 2)
    assert not here.contradicts(late.number, late.checksum), "others may still say where they were when all refused it"
    there.add("e", b"e", 2)
    assert here.last == there.last and here.last.number == 4
    before = there.last
    there.add("f", b"f", 3)
    there.take_back(before, is_refused=False)
    here.add("g", b"g", 3)
    assert there.last == before and not there.contradicts(here.last.number, here.last.checksum)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["abcd", "abdc"], "since step 3 (worker 0: c, then d; worker 1: d, then c)"),
        (["abcd", "abcd", "abd"], "since step 3 (workers 0, 1: c, then d; worker 2: d)"),
        (["abcdef", "abcd", "abcdfe"], "since step 5 (worker 0: e, then f; worker 1: nothing more; worker 2: f, then e)"),
        (["ab", ""], "since step 1 (worker 0: a, then b; worker 1: nothing more)"),
        (["ab", "ab"], "at a step that is not known any more"),
        (["a" * 600 + "b", "b" + "a" * 600], "before step 102"),
        (["x\n", "y"], "since step 1 (worker 0: x, then \\n; worker 1: y)"),
    ],
)
def test_it_is_told_since_when_workers_have_parted(texts: list[str], said: str) -> None:
    assert parting(told(*texts))[0] == said


def test_a_trail_survives_the_way_and_nothing_else_is_one() -> None:
    assert read_all(Entry, trail("ab").encode()) == [(1, trail("a").last.checksum, 0, "a", ""), trail("ab").last]
    assert read_all(Entry, ProgramTrail().encode()) == []
    too_long = json.dumps([[1, 2, 3, "a" * 1_000_000, ""]])
    for text in ("", "1", "[1]", "[[1, 2, 3]]", '[[1, 2, "3", "a", ""]]', "[" * 100_000, too_long):
        assert read_all(Entry, text) is None
