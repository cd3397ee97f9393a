"""docs/troubleshooting.md has the messages that `python tests/troubleshooting.py` writes, and each public error and warning."""

import re
from pathlib import Path

import pytest
from troubleshooting import BLOCK, MESSAGES, PAGE, Message, raised

import mirrored as mr

TEXT = PAGE.read_text()
PRINTED = BLOCK.findall(TEXT)
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=\n## |\Z)", TEXT, re.DOTALL | re.MULTILINE))
PUBLIC = {
    thing.__name__: thing
    for thing in (*vars(mr).values(), mr.data.TFRecordError)
    if isinstance(thing, type) and issubclass(thing, Exception)
}
AGAIN = "write the page anew: python tests/troubleshooting.py"


def test_the_page_has_the_messages_of_the_table_in_their_order() -> None:
    assert len(PRINTED) == len(MESSAGES), AGAIN
    assert all(text in SECTIONS[message.error] for message, text in zip(MESSAGES, PRINTED, strict=True)), AGAIN


@pytest.mark.parametrize("number", range(len(MESSAGES)), ids=[f"{message.error}, {message.what}" for message in MESSAGES])
def test_a_message_is_on_the_page_as_it_is_printed(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert raised(MESSAGES[number], monkeypatch, tmp_path) == PRINTED[number], AGAIN


def test_each_error_has_a_cause_and_a_cure() -> None:
    assert [name for name in PUBLIC if not {"**Cause**", "**Cure**"} <= set(re.findall(r"\*\*\w+\*\*", SECTIONS[name]))] == []
    assert [
        name for name, error in PUBLIC.items() if f"Troubleshooting of the documentation, under {name}." not in error.__doc__
    ] == []


def test_a_message_that_has_changed_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = Message("PlanError", "another name", lambda _: mr.topology("v9"))
    assert raised(changed, monkeypatch, tmp_path) not in PRINTED
