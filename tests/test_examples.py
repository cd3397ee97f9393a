"""Every example runs as a user runs it, and says what it should."""

import importlib.util
import os
import re
import runpy
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import mirrored as mr

EXAMPLES = Path(__file__).parent.parent / "examples"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(name: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *arguments]
    fast = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # convolutions of many steps take six times as long without
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


def test_from_the_questions_runs(capsys: pytest.CaptureFixture[str]) -> None:
    _load("from_the_questions").main()
    output = capsys.readouterr().out
    assert "FactorOfReplicasWarning" in output and "example 3: copies [-0.5, -0.5]" in output


def test_question_0_shapes_are_whole_and_a_misread_per_replica_names_the_remedy(strategy2: mr.Strategy) -> None:
    seen = _load("from_the_questions").question_0_shapes(strategy2)
    assert seen["run on an array"] == seen["run on a distributed batch, per replica"] == (4, 8)
    assert seen["gathered"] == (8, 8)
    assert all(verb in seen["misread"] for verb in ("strategy.reduce", "strategy.gather", "strategy.local_results"))


def test_question_1_distributed_equals_one_device_and_as_written_warns_once_of_the_factor() -> None:
    train = _load("from_the_questions").question_1_training
    one, two = mr.OneDeviceStrategy("cpu:0"), mr.MirroredStrategy(["cpu:0", "cpu:1"])
    expected, many = (train(strategy, is_distributed=True, num_steps=5) for strategy in (one, two))
    np.testing.assert_allclose(many[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(many[1], expected[1], atol=1e-6)
    assert many[0][-1] < many[0][0]
    for strategy, count in ((one, 1), (two, 2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses, _ = train(strategy, is_distributed=False, num_steps=3)
        assert losses[0] == pytest.approx(count * expected[0][0], rel=1e-5)
        factor = [str(w.message) for w in caught if w.category is mr.FactorOfReplicasWarning]
        assert len(factor) == 1
        expected_text = "distribute_dataset" if count > 1 else "nobody has said how the loss is divided"
        assert expected_text in factor[0] and (count == 1 or f"{count} times" in factor[0])


def test_question_2_numbers_come_out(strategy2: mr.Strategy) -> None:
    module = _load("from_the_questions")
    seen = module.question_2_reduce(strategy2)
    assert seen["sum"] == [4, 6, 8, 10] and seen["sum over the batch"] == 28
    assert seen["mean of the partial batch"] == 2.5
    assert "(4,), (2,)" in seen["partial without an axis"] and "axis=0" in seen["partial without an axis"]
    assert module.question_2_dataset(strategy2) == [6, 22]


def test_question_3_examples_1_and_2_are_refused_and_3_works(strategy2: mr.Strategy) -> None:
    module = _load("from_the_questions")
    message, copies = module.question_3_initialize(strategy2)
    assert "All replicas run one program" in message and "jnp.where" in message and copies == [1, 1]
    message, copies = module.question_3_train(strategy2, is_aggregated=False)
    assert "'mirrored_var'" in message and "`data`" in message and copies == [1, 1]
    assert module.question_3_train(strategy2, is_aggregated=True) == ("", [-0.5, -0.5])


@pytest.mark.slow
def test_keras_digits_reaches_97_percent_in_a_loop_and_runs_by_fit(tmp_path: Path) -> None:
    pytest.importorskip("keras")
    for arguments, least in ((["--loop"], 97), (["--epochs", "1"], 0)):
        output = _run("keras_digits", *arguments, cwd=tmp_path)
        accuracy, number = re.match(r"([\d.]+)% of the held-out images right, with (\d) rep", output).groups()
        assert float(accuracy) >= least and number == "4", arguments


def _is_picture(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


@pytest.mark.slow
def test_char_transformer_learns(tmp_path: Path) -> None:
    output = _run("char_transformer", "--steps", "80", cwd=tmp_path)
    first, last = re.search(r"held-out loss ([\d.]+) at first, ([\d.]+) after 80 steps", output).groups()
    assert float(first) > 4 and float(last) < 2.7, output
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
    python, rest = [sys.executable, "-m", "mirrored"], ["--checkpoints", str(tmp_path)]
    hosts = [
        subprocess.Popen(
            [*python, *command.replace("gpu-0:9000", address).replace("examples", str(EXAMPLES)).split(), "--epochs", "2", *rest],
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
    assert "steps 1 to 82 on 4 replicas of 2 workers" in outputs[0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_digits_reaches_97_percent_on_two_workers_of_which_one_is_killed(tmp_path: Path) -> None:
    """As `make demo-cluster` runs it, with 8 of its 20 epochs; `.ci/run` makes the demo alone."""
    launch = ["-m", "mirrored", "launch", "-n", "2", "--cpu-devices", "2", "--max-restarts", "2", str(EXAMPLES / "digits.py")]
    command = [sys.executable, *launch, "--epochs", "8", "--checkpoints", "checkpoints", "--kill-one"]
    ended = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=250)
    right = r"trained 96 steps on 4 replicas in \d+ s: (\d+) of 359 held-out images right .*, all copies bit-equal"
    assert int(re.search(right, ended.stdout)[1]) / 359 >= 0.97, ended.stdout + ended.stderr
    assert all(text in ended.stderr for text in ("failed first: SIGKILL", "done: 1 restart")), ended.stderr
    assert _is_picture(tmp_path / "out" / "digits.png")
