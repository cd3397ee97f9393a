"""Some of the tests that Keras and Optax have in their packages, with a strategy around them."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_spec = importlib.util.spec_from_file_location("foreign_run", Path(__file__).parent / "foreign" / "run.py")
assert _spec is not None and _spec.loader is not None
run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(run)


@pytest.mark.parametrize(
    ("library", "files", "chosen", "at_least"),
    [
        (
            "keras",
            [
                "layers/rnn/lstm_test.py",
                "layers/normalization/spectral_normalization_test.py",
                "layers/core/dense_test.py",
                "optimizers/optimizer_test.py",
                "trainers/trainer_test.py",
            ],
            "(correctness or stateful or apply or accumulation_with_weigth_decay1 or fit_flow) and not distributed",
            14,
        ),
        (
            "optax",
            ["transforms/_accumulation_test.py", "losses/_regression_test.py", "schedules/_inject_test.py"],
            "not mixed_precision",
            50,
        ),
    ],
)
def test_a_library_passes_its_own_tests(library: str, files: list[str], chosen: str, at_least: int) -> None:
    pytest.importorskip(library)
    command = run.command(library, files, ["-k", chosen])
    ended = subprocess.run(command, env=run.environment(), capture_output=True, text=True, check=False)
    [passed] = re.findall(r"(\d+) passed", ended.stdout) or ["0"]
    assert ended.returncode == 0 and int(passed) >= at_least, ended.stdout[-3000:] + ended.stderr[-1000:]
