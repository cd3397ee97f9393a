"""Every example runs as a user runs it, and says what it should."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from parameters import nightly

EXAMPLES = Path(__file__).parent.parent / "examples"


def _run(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments]
    # Convolutions of many steps take six times as long without XLA's optimizations; Keras' short ones wait for the compiler.
    fast = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1" if name == "keras_digits" else "0"}
    return subprocess.run(command, cwd=cwd, env=fast, check=True, capture_output=True, text=True, timeout=100).stdout


def test_every_example_is_tested_here_and_says_how_to_run_it() -> None:
    text = Path(__file__).read_text() + (Path(__file__).parent / "parity" / "test_model_libraries.py").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.stem.removesuffix("_digits")}' in text, path
        assert f"python examples/{path.name}" in path.read_text().split('"""')[1], path
        is_of_four_documents = path.stem == "from_the_questions"
        assert len(path.read_text().splitlines()) <= (190 if is_of_four_documents else 120), path


def test_quickstart_is_the_loop_of_the_readme_and_finds_the_weights() -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    code = (EXAMPLES / "quickstart.py").read_text().split('"""\n\n', 1)[1]
    assert code in readme
    names = runpy.run_path(str(EXAMPLES / "quickstart.py"))
    np.testing.assert_allclose(names["w"].numpy(), [1, 2, 3], atol=0.005)


#: What the program says of each question, in this order.
ANSWERS = [
    "run on an array: (4, 8)", "run on a distributed batch, per replica: (4, 8)", "gathered: (8, 8)",
    "strategy.reduce('sum', x)", "strategy.gather(x, axis=0)", "strategy.local_results(x)",
    "as written, the first loss is 2.00 times too large", "FactorOfReplicasWarning: all 2 replicas",
    "the update is 2 times that of one device", "strategy.distribute_dataset(dataset)",
    "sum: [4.0, 6.0, 8.0, 10.0]", "sum over the batch: 28.0", "mean of the partial batch: 2.5",
    "(4,), (2,). Name the axis along which they differ: strategy.reduce(..., axis=0)", "global batches: [6, 22]",
    "example 1: copies [1.0, 1.0]; refused: ", "jnp.where", "All replicas run one program",
    "example 2: copies [1.0, 1.0]; refused: variable 'mirrored_var'", "`data`", "example 3: copies [-0.5, -0.5]\n",
]  # fmt: skip


def test_from_the_questions_answers_each(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "from_the_questions.py"))["main"]()
    output = capsys.readouterr().out
    rest = output
    for answer in ANSWERS:
        assert answer in rest, answer
        rest = rest.partition(answer)[2]
    losses = re.search(r"last loss ([\d.]+), on one device ([\d.]+)\n  largest difference of the weights ([\d.e-]+)\n", output)
    ours, alone, difference = map(float, losses.groups())
    assert ours == pytest.approx(alone, rel=1e-5) and difference < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("how", [["--loop"], *nightly([])], ids=["in a loop", "by fit"])
def test_keras_digits_reaches_97_percent(how: list[str], tmp_path: Path) -> None:
    pytest.importorskip("keras")
    output = _run("keras_digits", *how, cwd=tmp_path)
    accuracy, number = re.match(r"([\d.]+)% of the held-out images right, with (\d) rep", output).groups()
    assert float(accuracy) >= 97 and number == "4"


def _is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.slow
def test_char_transformer_learns(tmp_path: Path) -> None:
    output = _run("char_transformer", "--steps", "30", cwd=tmp_path)
    first, last = re.search(r"held-out loss ([\d.]+) at first, ([\d.]+) after 30 steps", output).groups()
    assert float(first) > 4 and float(last) < 2.9, output
    assert _is_picture(tmp_path / "out" / "char_transformer.png")


@pytest.mark.slow
def test_fine_tuning_from_four_replicas_on_three_is_better_than_from_nothing(tmp_path: Path) -> None:
    output = _run("fine_tune", cwd=tmp_path)
    before, tuned, anew = map(float, re.findall(r"([\d.]+)%", output))
    assert before > 93 and tuned > 78 and tuned > anew + 5, output
    assert _is_picture(tmp_path / "out" / "fine_tune.png")


@pytest.mark.slow
def test_two_hosts_by_the_two_commands_that_it_names(tmp_path: Path) -> None:
    """Two launchers, as on two hosts."""
    commands = re.findall(r"mirrored (launch --nnodes .*examples/two_hosts.py)  ", (EXAMPLES / "two_hosts.py").read_text())
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    python, rest = [sys.executable, "-m", "mirrored"], ["--epochs", "2", "--rows", "496", "--checkpoints", str(tmp_path)]
    hosts = [
        subprocess.Popen(
            [*python, *command.replace("gpu-0:9000", address).replace("examples", str(EXAMPLES)).split(), *rest],
            env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    outputs = [host.communicate(timeout=100)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], outputs
    assert "worker 0 of 2" in outputs[0] and "worker 1 of 2" in outputs[1]
    assert "steps 1 to 10 on 4 replicas of 2 workers" in outputs[0]


@pytest.mark.nightly("tests/multiprocess/test_chaos.py::test_kills_at_any_moment_leave_no_trace")
@pytest.mark.timeout(300)
def test_digits_reaches_97_percent_on_two_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    """As `make demo-cluster` runs it; `.ci/run` makes the demo, on one worker."""
    launch = ["-m", "mirrored", "launch", "-n", "2", "--cpu-devices", "2", "--max-restarts", "2", str(EXAMPLES / "digits.py")]
    command = [sys.executable, *launch, "--checkpoints", "checkpoints", "--kill-one"]
    ended = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=250)
    right = r"trained 240 steps on 4 replicas in \d+ s: (\d+) of 359 held-out images right .*, all copies bit-equal"
    assert int(re.search(right, ended.stdout)[1]) / 359 >= 0.97, ended.stdout + ended.stderr
    assert all(text in ended.stderr for text in ("failed first: SIGKILL", "done: 1 restart")), ended.stderr
    assert _is_picture(tmp_path / "out" / "digits.png")
