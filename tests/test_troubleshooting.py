"""docs/troubleshooting.md is what `python tests/troubleshooting.py` writes, and each public error and warning is there."""

import re
from pathlib import Path

import pytest
from troubleshooting import MESSAGES, PAGE, Message, page, raised

import mirrored as mr

TEXT = PAGE.read_text()
PRINTED = re.findall(r"```text\n(mirrored\..*?)\n```", TEXT, re.DOTALL)
PUBLIC = {
    thing.__name__: thing
    for thing in (*vars(mr).values(), mr.data.TFRecordError)
    if isinstance(thing, type) and issubclass(thing, Exception)
}
AGAIN = "write the page anew: python tests/troubleshooting.py"


def test_the_page_is_written_from_the_table() -> None:
    assert len(PRINTED) == len(MESSAGES), AGAIN
    assert page(PRINTED) == TEXT, AGAIN


@pytest.mark.parametrize("number", range(len(MESSAGES)), ids=[f"{message.error}, {message.what}" for message in MESSAGES])
def test_a_message_is_on_the_page_as_it_is_printed(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert raised(MESSAGES[number], monkeypatch, tmp_path) == PRINTED[number], AGAIN


@pytest.mark.parametrize("name", PUBLIC)
def test_each_error_has_a_cause_and_a_cure(name: str) -> None:
    below = "".join(message.text for message in MESSAGES if message.error == name)
    assert "**Cause**" in below and "**Cure**" in below
    assert f"the page Troubleshooting of the documentation, under {name}." in PUBLIC[name].__doc__


def test_a_message_that_has_changed_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = Message("PlanError", "another name", lambda _: mr.topology("v9"))
    assert raised(changed, monkeypatch, tmp_path) not in PRINTED
