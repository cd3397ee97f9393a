"""Some of the tests that Keras and Optax have in their packages, with a strategy around them."""

import re
import subprocess

import pytest
from foreign import run

pytestmark = [
    pytest.mark.nightly("tests/parity/test_random_numbers.py::test_a_library_draws_what_it_draws_alone"),
    pytest.mark.timeout(600),
]
KERAS = """
    layers/rnn/lstm_test.py layers/normalization/spectral_normalization_test.py layers/core/dense_test.py
    optimizers/optimizer_test.py
"""
OF_KERAS = "(correctness or stateful or apply or accumulation_with_weigth_decay1) and not distributed"
OPTAX = "transforms/_accumulation_test.py schedules/_inject_test.py"


@pytest.mark.parametrize(
    ("library", "files", "chosen", "at_least"),
    [("keras", KERAS, OF_KERAS, 7), ("optax", OPTAX, "not mixed_precision", 30)],
    ids=["keras", "optax"],
)
def test_a_library_passes_its_own_tests(library: str, files: str, chosen: str, at_least: int) -> None:
    pytest.importorskip(library)
    command = run.command(library, files.split(), ["-k", chosen])
    ended = subprocess.run(command, env=run.environment(), capture_output=True, text=True, check=False)
    [passed] = re.findall(r"(\d+) passed", ended.stdout) or ["0"]
    assert ended.returncode == 0 and int(passed) >= at_least, ended.stdout[-3000:] + ended.stderr[-1000:]
