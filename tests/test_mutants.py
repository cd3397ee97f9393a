"""Each mutant damages a text that is there, and names a test that is there."""

import re
from pathlib import Path

from mutants import SOURCE, TESTS, mutants


def test_each_damages_one_text_and_names_a_test() -> None:
    texts = {path.relative_to(SOURCE).as_posix(): path.read_text() for path in SOURCE.rglob("*.py")}
    wrong = [mutant for mutant in mutants() if texts.get(mutant.file, "").count(mutant.old) != 1 or mutant.old == mutant.new]
    missing = []
    for mutant in mutants():
        file, _, test = mutant.test.partition("::")
        path = TESTS.parent / Path(file)
        name = re.match(r"\w*", test)
        if not path.is_file() or (name and name[0] and f"def {name[0]}(" not in path.read_text()):
            missing.append(mutant.test)
    assert (wrong, missing) == ([], [])
