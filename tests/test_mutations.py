"""Damages are made to the lines that a change has touched, and to nothing that is not executed."""

import ast

from mutations import mirror_of, mutations

SOURCE = '''"""Text."""
def first(n: int = 3) -> bool:
    """Say 1 == 2."""
    print(f"{n == 1}")
    if n == 1 and not n > 2:
        raise ValueError("x == 1")
    n += 1
    return n <= 4
'''


def changed(line: int) -> list[str]:
    found = [text for number, text in mutations(SOURCE, {line}) if ast.parse(text) and number == line]
    assert all(text.splitlines()[: line - 1] == SOURCE.splitlines()[: line - 1] for text in found)
    return [text.splitlines()[line - 1].strip() for text in found]


def test_each_kind_of_line_is_damaged_in_its_ways() -> None:
    assert changed(2) == ["def first(n: int = 4) -> bool:"]
    assert changed(1) == changed(3) == []
    assert changed(4) == ["pass"]
    assert changed(5) == [
        "if (n == 1 or not n > 2):",
        "if (n != 1) and not n > 2:",
        "if n == 2 and not n > 2:",
        "if n == 1 and (n > 2):",
        "if n == 1 and not (n >= 2):",
        "if n == 1 and not n > 3:",
    ]
    assert changed(6) == ["pass"]
    assert changed(7) == ["pass", "n += 2"]
    assert changed(8) == ["return None", "return (n < 4)", "return n <= 5"]


def test_a_file_has_mirror_of_its_own_or_those_of_its_wing() -> None:
    assert mirror_of("_program/steps.py") == "tests/_program/test_steps.py"
    assert mirror_of("_public.py") == "tests/test_public.py"
    assert mirror_of("_program/surely_not_there.py") == "tests/_program"
