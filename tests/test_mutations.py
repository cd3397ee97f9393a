"""Damages are made to the lines that a change has touched, and to nothing that is not executed."""

import ast

import pytest
from mutations import mirror_of, mutations

SOURCE = '''"""Text."""
def first(n: int = 3) -> bool:
    """Say 1 == 2."""
    if n == 1 and not n > 2:
        raise ValueError("x == 1")
    n += 1
    return n <= 4
'''


@pytest.mark.parametrize(
    ("line", "damages"),
    [
        (1, []),
        (2, ["def first(n: int = 4) -> bool:"]),
        (3, []),
        (4, [f"if {test}:" for test in ("(n == 1 or not n > 2)", "(n != 1) and not n > 2", "n == 2 and not n > 2",
             "n == 1 and (n > 2)", "n == 1 and not (n >= 2)", "n == 1 and not n > 3")]),
        (5, ["pass"]),
        (6, ["pass", "n += 2"]),
        (7, ["return None", "return (n < 4)", "return n <= 5"]),
    ],
)  # fmt: skip
def test_each_kind_of_line_is_damaged_in_its_ways(line: int, damages: list[str]) -> None:
    found = [text for number, text in mutations(SOURCE, {line}) if ast.parse(text) and number == line]
    assert [text.splitlines()[line - 1].strip() for text in found] == damages


def test_a_file_has_mirror_of_its_own_or_those_of_its_wing() -> None:
    files = ("_program/steps.py", "_public.py", "_program/surely_not_there.py")
    assert [*map(mirror_of, files)] == ["tests/_program/test_steps.py", "tests/test_public.py", "tests/_program"]
