"""The launcher starts, passes on, ends and restarts workers as it says, and leaves none behind; plain scripts, no jax."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

import mirrored
from mirrored import launch
from mirrored._command import group

SOURCE = Path(mirrored.__file__).parent
#: The launcher without the package's own imports: it needs no jax, and so this starts in a tenth of the time.
BOOT = f"""
import sys, types
package = types.ModuleType("mirrored")
package.__path__ = [{str(SOURCE)!r}]
sys.modules["mirrored"] = package
from mirrored._command import group, signals
from mirrored import launch
assert not {{"jax", "numpy"}} & set(sys.modules)
"""
HEAD = """
import os, signal, sys, time
INDEX = int(os.environ["JAX_PROCESS_ID"])
ATTEMPT = int(os.environ["MIRRORED_ATTEMPT"])
def say(*words): print(*words, flush=True)
"""
#: A worker that a signal does not end.
STUBBORN = "signal.signal(signal.SIGTERM, lambda *_: say('asked')); say('up')\nwhile True: signal.pause()\n"


def wait_until(condition: Callable[[], object], seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.005)


class Launcher:
    """Start launchers for one test, whose workers are known by a variable in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag = folder, uuid.uuid4().hex
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []

    def script(self, body: str, name: str = "worker.py") -> Path:
        path = self.folder / name
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    def start(
        self, body: str | Path, *options: object, arguments: tuple[str, ...] = (), patch: str = "",
        environment: Mapping[str, str] | None = None, **popen: object,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        script = body if isinstance(body, Path) else self.script(body)
        code = f"{BOOT}\n{patch}\nsys.exit(launch.main())"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        # As in a terminal, whoever runs the tests in the background.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code, "launch", *map(str, options), str(script), *arguments],
                env={**inherited, "TMPDIR": str(self.temporary), "MIRRORED_TEST": self.tag, **(environment or {})},
                **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **popen},
            )
        finally:
            signal.signal(signal.SIGINT, before)
        self.started.append(process)
        return process

    def run(self, *args: object, **kwargs: object) -> tuple[int, str, str]:
        return finish(self.start(*args, **kwargs))

    def alive(self) -> list[int]:
        """The processes that the launchers have started, themselves and zombies not counted."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and f"MIRRORED_TEST={self.tag}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return [pid for pid in found if pid not in {process.pid for process in self.started}]


def finish(process: subprocess.Popen[bytes], seconds: float = 30) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=seconds)
    out, err = ((text or b"").decode(errors="backslashreplace") for text in (stdout, stderr))
    return process.returncode, out, err


def read_until(process: subprocess.Popen[bytes], text: str, count: int = 1) -> str:
    """Read the launcher's stdout until a text has come so many times."""
    assert process.stdout is not None
    read = b""
    while read.count(text.encode()) < count:
        piece = os.read(process.stdout.fileno(), 65536)
        assert piece, read
        read += piece
    return read.decode()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    it = Launcher(tmp_path)
    yield it
    for process in it.started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
    wait_until(lambda: not it.alive(), 3)
    wait_until(lambda: not list(it.temporary.iterdir()), 3)


# Output


def test_lines_have_prefixes_and_keep_their_order_and_stream(launcher: Launcher) -> None:
    body = "for i in range(50):\n  print('out', i)\n  print('err', i, file=sys.stderr)\nprint('unended', end='')"
    code, out, err = launcher.run(body, "-n", 11)
    assert code == 0
    lines = out.splitlines()
    for index in range(11):
        prefix = f"[{index}]".ljust(5)
        own = [line for line in lines if line.startswith(prefix)]
        assert own == [*(f"{prefix}out {i}" for i in range(50)), f"{prefix}unended"]
        assert [line for line in err.splitlines() if line.startswith(prefix)] == [f"{prefix}err {i}" for i in range(50)]
    assert len(lines) == 11 * 51
    assert len(err.splitlines()) == 11 * 50  # a success is silent
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("no_color", "expected"), [("", [b"\x1b[32m[0]\x1b[0m 0", b"\x1b[33m[1]\x1b[0m 1"]), ("1", [b"[0] 0", b"[1] 1"])]
)
def test_prefixes_are_coloured_on_a_terminal(no_color: str, expected: list[bytes], launcher: Launcher) -> None:
    own, other = os.openpty()
    with open(own, "rb", buffering=0) as terminal:
        process = launcher.start("say(INDEX)", "-n", 2, stdout=other, environment={"NO_COLOR": no_color})
        os.close(other)
        assert process.wait(20) == 0
        assert sorted(terminal.read(65536).split(b"\r\n")) == [b"", *expected]


def test_ten_megabytes_pass_unchanged(launcher: Launcher) -> None:
    body = "line = f'{INDEX}' * 99\nfor i in range(50): print('\\n'.join([line] * 1000))"
    code, out, _ = launcher.run(body, "-n", 2)
    assert code == 0
    assert len(out) == 2 * 50_000 * 104
    assert set(out.splitlines()) == {"[0] " + "0" * 99, "[1] " + "1" * 99}


def test_lines_stay_whole_when_both_streams_go_to_one_place(launcher: Launcher) -> None:
    body = "for i in range(300):\n  print('o' * 9000)\n  print('e' * 9000, file=sys.stderr)"
    code, out, _ = launcher.run(body, "-n", 2, stderr=subprocess.STDOUT)
    assert code == 0
    assert sorted(out.splitlines()) == sorted(f"[{i}] {c * 9000}" for i in (0, 1) for c in "oe" for _ in range(300))


def test_binary_garbage_passes_and_is_kept_in_the_log(launcher: Launcher, tmp_path: Path) -> None:
    body = "import random\nsys.stdout.buffer.write(random.Random(0).randbytes(1 << 20))"
    process = launcher.start(body, "--log-dir", tmp_path / "logs", stdout=subprocess.DEVNULL)
    assert process.wait(20) == 0
    assert (tmp_path / "logs/attempt-0/worker-0.log").read_bytes() == random.Random(0).randbytes(1 << 20)


def test_an_endless_line_is_cut_and_takes_no_memory(launcher: Launcher, tmp_path: Path) -> None:
    body = """
    for i in range(600): sys.stdout.write("x" * 100_000)
    while not os.path.exists(sys.argv[1]): time.sleep(0.005)
    """
    with (tmp_path / "out").open("wb") as file:
        process = launcher.start(body, arguments=(str(tmp_path / "go"),), stdout=file)
    wait_until(lambda: (tmp_path / "out").stat().st_size > 60_000_000 - 65536)
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())[0])
    assert peak < 45_000
    (tmp_path / "go").touch()
    assert process.wait(20) == 0
    lines = (tmp_path / "out").read_bytes().splitlines()
    assert {len(line) for line in lines[:-1]} == {65536 + 4}
    assert sum(len(line) - 4 for line in lines) == 60_000_000


def test_a_worker_may_close_its_streams(launcher: Launcher) -> None:
    body = """
    say("before", INDEX)
    if INDEX == 0: os.close(1), os.close(2), time.sleep(0.2)
    else: say("after")
    """
    code, out, err = launcher.run(body, "-n", 2)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == ["[0] before 0", "[1] after", "[1] before 1"]


def test_a_launcher_without_standard_streams_runs(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("say('here'); sys.exit(4)")
    code = BOOT.replace("\nimport sys, types", "\nimport os; os.closerange(0, 3)\nimport sys, types") + "sys.exit(launch.main())"
    options = ["launch", "--log-dir", str(tmp_path / "logs"), str(script)]
    result = subprocess.run([sys.executable, "-c", code, *options], env={"TMPDIR": str(launcher.temporary)}, timeout=20)
    assert result.returncode == 4
    assert (tmp_path / "logs/attempt-0/worker-0.log").read_text() == "here\n"


def test_who_stops_reading_does_not_stop_the_training(launcher: Launcher, tmp_path: Path) -> None:
    body = "for i in range(3000): print('x' * 1000)\nopen(sys.argv[1], 'w').close()"
    process = launcher.start(body, arguments=(str(tmp_path / "done"),))
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(20) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT])
def test_a_reader_that_is_stuck_holds_workers_back_but_not_the_launcher(stderr: int, launcher: Launcher) -> None:
    body = "while True: print('x' * 1000), print('x' * 1000, file=sys.stderr)"
    process = launcher.start(body, "--grace", 0.2, stderr=stderr, patch="signals.NOTICE_SECONDS = 0.0")
    wait_until(lambda: len(launcher.alive()) >= 2)

    def read_by(pid: int) -> int:
        return int(re.findall(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text())[0])

    def is_steady() -> bool:
        before = read_by(process.pid)
        time.sleep(0.1)
        return before > 1 << 20 and read_by(process.pid) == before

    wait_until(is_steady)
    assert read_by(process.pid) < 8 << 20
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: not launcher.alive(), 3)
    process.send_signal(signal.SIGTERM)  # once more, as nobody reads what it has to say
    assert process.wait(3) in (143, -signal.SIGTERM)  # the second may come when Python is ending already


# Environment


def test_workers_are_told_their_cluster_and_devices(launcher: Launcher) -> None:
    names = "JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID JAX_PLATFORMS JAX_NUM_CPU_DEVICES JAX_LOCAL_DEVICE_IDS"
    body = f"import json; say(json.dumps([os.environ.get(name) for name in {names.split()!r}]))"

    def told(*options: object) -> list[list[str | None]]:
        code, out, _ = launcher.run(body, *options)
        assert code == 0
        return sorted((json.loads(line.split(maxsplit=1)[1]) for line in out.splitlines()), key=lambda values: int(values[2]))

    (address, *rest), (address_1, *_) = told("-n", 2, "--cpu-devices", 3)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", str(address)) and address == address_1
    assert rest == ["2", "0", "cpu", "3", None]
    assert [values[1:] for values in told()] == [["1", "0", None, None, None]]
    assert [values[5] for values in told("-n", 3)] == ["0", "1", "2"]
    assert [values[5] for values in told("-n", 2, "--gpus-per-worker", 2)] == ["0,1", "2,3"]
    nodes = told("-n", 2, "--nnodes", 3, "--node-rank", 1, "--coordinator", "gpu-0:9000")
    assert [values[:3] for values in nodes] == [["gpu-0:9000", "6", "2"], ["gpu-0:9000", "6", "3"]]


OTHERS = {
    "TF_CONFIG": '{"cluster": {"worker": ["10.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}',
    "RANK": "5", "WORLD_SIZE": "7", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "SLURM_STEP_NODELIST": "n[1-9]", "SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "1(x9)", "SLURM_PROCID": "3",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "1", "PMI_SIZE": "4",
    "COORDINATOR_ADDRESS": "job-0", "COORDINATOR_PORT": "1", "NUM_PROCESSES": "8", "PROCESS_ID": "3", "JAX_COORDINATOR_PORT": "5",
}  # fmt: skip


@pytest.mark.parametrize("name", ["TF_CONFIG", ""])
def test_the_launcher_s_cluster_wins_over_other_launchers(name: str, launcher: Launcher) -> None:
    boot = BOOT.replace("from mirrored import launch", "from mirrored._cluster.resolvers import discover")
    body = boot + "say(discover()[1])\nsay('RANK' in os.environ, 'TF_CONFIG' in os.environ)\nsys.exit(1)"
    environment = {key: value for key, value in OTHERS.items() if name or key != "TF_CONFIG"}
    code, out, err = launcher.run(body, "-n", 2, "--max-restarts", 1, environment=environment)
    assert code == 1
    assert len(re.findall(r"^\[0\] worker 0 of 2 \(127\.0\.0\.1:\d+\), .*, from JAX_COORDINATOR_ADDRESS", out, re.M)) == 2
    assert out.count("True False") == 4  # what does not disturb is passed on
    assert err.count("TF_CONFIG") == bool(name)
    assert "10.0.0.1" not in err


def test_no_env_in_logs(launcher: Launcher, tmp_path: Path) -> None:
    secret = "hunter" + "2"
    environment = {"API_TOKEN": secret, "TF_CONFIG": secret}
    body = "assert os.environ['API_TOKEN']; sys.exit(1)"
    _, out, err = launcher.run(body, "-n", 2, "--max-restarts", 1, "--log-dir", tmp_path / "logs", environment=environment)
    logs = "".join(path.read_text() for path in tmp_path.glob("logs/*/*"))
    assert secret not in out + err + logs
    assert "API_TOKEN" not in out + err + logs


def test_shell_metachars(launcher: Launcher, tmp_path: Path) -> None:
    script = launcher.script("import json; say(json.dumps(sys.argv))", "a $(touch hacked); `touch hacked` 'b\" .py")
    arguments = ("$(touch hacked)", "; touch hacked", "a b", "", "*", "-n", "9", "--", "--log-dir", "\n", "-m", "é")
    _, out, _ = launcher.run(script, "-n", 1, arguments=arguments, cwd=tmp_path)
    assert json.loads(out.removeprefix("[0] ")) == [str(script), *arguments]
    assert not (tmp_path / "hacked").exists()


def test_path_is_not_searched_for_python(launcher: Launcher, tmp_path: Path) -> None:
    for name in ("python", "python3", Path(sys.executable).name):
        (tmp_path / name).write_text("#!/bin/sh\necho hijacked\n")
        (tmp_path / name).chmod(0o755)
    body = "say(sys.executable, os.path.isabs(sys.executable), sys.stdout.write_through)"
    _, out, _ = launcher.run(body, environment={"PATH": str(tmp_path)}, cwd=tmp_path)
    assert out == f"[0] {sys.executable} True True\n"


def test_a_module_and_a_script_with_a_leading_dash(launcher: Launcher, tmp_path: Path) -> None:
    launcher.script("say(__name__, sys.argv[1:], sys.stdin.read() == '')", "worker_module.py")
    launcher.script("say('dash', sys.argv[1:], sys.path[0])", "-n")
    _, out, _ = launcher.run(Path("worker_module"), "-n", 2, "-m", arguments=("-m", "-n", "3"), cwd=tmp_path)
    assert set(out.splitlines()) == {f"[{i}] __main__ ['-m', '-n', '3'] True" for i in range(2)}
    _, out, _ = launcher.run(Path("-n"), "--", arguments=("x",), cwd=tmp_path)
    assert out == f"[0] dash ['x'] {tmp_path}\n"


# Failures and restarts


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (["sys.exit(75)", "time.sleep(0.2); sys.exit(3)", "sys.exit(75)"], 3),
        (["sys.exit(75)", "os.kill(os.getpid(), signal.SIGKILL)"], 137),
        (["os.abort()", "sys.exit(75)"], 134),
        (["sys.exit(143)", "sys.exit(143)"], 143),
    ],
)
def test_the_exit_code_is_that_of_the_cause(ends: list[str], expected: int, launcher: Launcher) -> None:
    body = f"exec({ends!r}[INDEX])"
    code, _, err = launcher.run(body, "-n", len(ends))
    assert code == expected
    assert bool(err) == bool(code)
    if "75" in ends[0] and len(ends) > 1 and expected != 75:
        assert "worker 1 (pid " in err and "failed first" in err and "75, asks to be started again" in err


def test_the_summary_says_who_how_when_and_where(launcher: Launcher, tmp_path: Path) -> None:
    body = """
    for i in range(30): say("step", i)
    if INDEX == 1: raise ValueError("the reason")
    sys.exit(75)
    """
    _, _, err = launcher.run(body, "-n", 4, "--max-restarts", 1, "--log-dir", tmp_path / "logs")
    start, *summary = [
        line.removeprefix("mirrored launch: ") for line in err.splitlines() if line.startswith("mirrored launch: ")
    ]
    first, head, *tail, others, total = summary
    failure = r"worker 1 \(pid \d+\) failed first: exit code 1, \d\.\d s after the start, at \d+-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(failure + r"; starting all again \(restart 1 of 1 without a checkpoint\)", start)
    assert re.fullmatch(failure, first)
    assert head == "its last lines:"
    assert tail[-1] == "  | ValueError: the reason" and len(tail) == 20 and "  | step 29" in tail
    assert others == "the others: workers 0, 2-3: exit code 75, asks to be started again"
    assert re.fullmatch(rf"1 restart, \d\.\d s in all, logs in {tmp_path}/logs/attempt-1", total)


def test_log_injection(launcher: Launcher) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\rmirrored launch: done\x00\x9b31m\u202e\u2028 tab\tend"
    _, _, err = launcher.run(f"print({evil!r} * 30, file=sys.stderr); print('x' * 9999, file=sys.stderr); sys.exit(1)")
    summary = err[err.index("mirrored launch: worker 0") :]
    assert re.search(r"\| mirrored launch: done\\x00\\x9b31m\\u202e\\u2028 tab\\tend\\x1b]0;title\\x07\\x1b\[2J\n", summary)
    assert not set(summary) & set("\x1b\x07\r\x00\x9b\u202e\u2028\t")
    assert all(line.startswith("mirrored launch: ") for line in summary.splitlines())
    assert len(summary) < 4096 + 21 * 20 + 300


def test_restarts_end_with_the_budget_and_use_fresh_ports_of_their_own_or_the_one_given(launcher: Launcher) -> None:
    body = "say(ATTEMPT, os.environ['JAX_COORDINATOR_ADDRESS']); sys.exit(5)"
    code, out, err = launcher.run(body, "-n", 2, "--max-restarts", 2)
    attempts = {tuple(line.split()[1:]) for line in out.splitlines()}
    assert code == 5
    assert sorted(attempt for attempt, _ in attempts) == ["0", "1", "2"]
    assert len({address for _, address in attempts}) == 3
    assert err.count("starting all again") == 2 and "2 restarts, " in err
    code, out, _ = launcher.run(body, "--max-restarts", 1, "--coordinator", "127.0.0.1:9000")
    assert out.splitlines() == ["[0] 0 127.0.0.1:9000", "[0] 1 127.0.0.1:9000"]


def test_a_port_that_the_kernel_gives_again_is_not_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = iter([5001, 5001, 5002, 5001, 5002, 5003])

    class Socket(contextlib.nullcontext):
        bind = staticmethod(lambda address: None)
        getsockname = staticmethod(lambda: ("127.0.0.1", next(ports)))

        def __enter__(self) -> "Socket":
            return self

    monkeypatch.setattr(launch, "socket", SimpleNamespace(socket=Socket))
    used: set[int] = set()
    addresses = [launch._free_address(used) for _ in range(3)]
    assert addresses == ["127.0.0.1:5001", "127.0.0.1:5002", "127.0.0.1:5003"]


def test_a_restart_that_succeeds_is_a_success(launcher: Launcher) -> None:
    code, out, err = launcher.run("say(ATTEMPT); sys.exit(75 if ATTEMPT < 2 else 0)", "--max-restarts", 3)
    assert (code, out.split()[1::2]) == (0, ["0", "1", "2"])
    assert re.fullmatch(r"mirrored launch: done: 2 restarts, \d\.\d s in all", err.splitlines()[-1])


@pytest.mark.parametrize(("code", "restarts"), [(0, 0), (1, 1), (75, 1), (76, 0), (143, 1)])
def test_which_codes_are_restarted(code: int, restarts: int, launcher: Launcher) -> None:
    body = f"say('start'); INDEX or sys.exit({code}); time.sleep(0.1); sys.exit({code} and 75)"
    got, out, _ = launcher.run(body, "-n", 2, "--max-restarts", 1)
    assert got == code
    assert out.count("[0] start") == restarts + 1


def test_a_new_checkpoint_renews_the_budget(launcher: Launcher) -> None:
    body = """
    steps = ["10", "20", "15", "30"]
    with open(os.environ["MIRRORED_PROGRESS_FILE"] + ".new", "w") as file: file.write(steps[ATTEMPT])
    assert not os.path.exists(os.environ["MIRRORED_PROGRESS_FILE"])
    assert os.stat(os.path.dirname(file.name)).st_mode & 0o777 == 0o700
    os.replace(file.name, os.environ["MIRRORED_PROGRESS_FILE"])
    say(ATTEMPT)
    sys.exit(9)
    """
    code, out, err = launcher.run(body, "--max-restarts", 1)
    assert (code, out.split()[1::2]) == (9, ["0", "1", "2"])  # 15 is not beyond 20
    assert "(restart 1 of 1 since the checkpoint of step 20)" in err


def test_each_writer_of_checkpoints_may_have_a_file_of_its_own(launcher: Launcher) -> None:
    body = """
    file = os.environ["MIRRORED_PROGRESS_FILE"]
    with open(file, "w") as opened: opened.write("1000000")  # of a program that a worker starts
    with open(file + "-0a1b2c3d", "w") as opened: opened.write(str(min(ATTEMPT, 2)))
    with open(file + "-0a1b2c3d.77", "w") as opened: opened.write(str(ATTEMPT))  # not finished
    say(ATTEMPT)
    sys.exit(9)
    """
    code, out, err = launcher.run(body, "--max-restarts", 1)
    assert (code, out.split()[1::2]) == (9, ["0", "1", "2", "3"])
    assert "(restart 1 of 1 since the checkpoint of step 2)" in err


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("12", 12),
        ("0", 0),
        ("9" * 31, int("9" * 31)),
        ("9" * 32, None),
        ("9" * 99, None),
        ("", None),
        ("-1", None),
        ("1\n", None),
    ],
)
def test_what_is_no_step_counts_as_none(text: str, step: int | None, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert group._read_steps(path) == {}
    path.write_text(text)
    assert group._read_steps(path) == ({} if step is None else {"progress": step})


def test_others_that_do_not_leave_are_asked_and_then_killed(launcher: Launcher) -> None:
    body = """
    if INDEX == 0:
        while not all(os.path.exists(sys.argv[1] + str(i)) for i in (1, 2, 3)): time.sleep(0.005)
        sys.exit(3)
    signal.signal(signal.SIGTERM, lambda *_: say("asked") or INDEX == 2 or sys.exit(0))
    open(sys.argv[1] + str(INDEX), "w").close()
    if INDEX == 3: time.sleep(0.1); say("left"); sys.exit(75)
    while True: signal.pause()
    """
    patch = "group.FAREWELL_SECONDS = 0.5"
    code, out, err = launcher.run(body, "-n", 4, "--grace", 0.5, patch=patch, arguments=(str(launcher.folder / "up"),))
    assert code == 3
    assert sorted(out.splitlines()) == ["[1] asked", "[2] asked", "[3] left"]
    killed = "SIGKILL, did not leave and was killed by the launcher"
    assert f"the others: worker 1: exit code 0; worker 2: {killed}; worker 3: exit code 75" in err
    assert 1.0 < float(re.findall(r"([\d.]+) s in all", err)[0]) < 4


def test_a_worker_that_hangs_while_others_gave_up_is_no_cause_of_137(launcher: Launcher) -> None:
    body = "INDEX and sys.exit(75)\n" + STUBBORN
    code, _, err = launcher.run(body, "-n", 3, "--grace", 0.1, patch="group.FAREWELL_SECONDS = 0.2")
    assert code == 75
    assert "worker 0: SIGKILL, did not leave" in err


def test_who_saves_after_a_preemption_is_not_disturbed(launcher: Launcher) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: say("disturbed"))
    say("up")
    if INDEX:
        until = time.monotonic() + 0.5
        while time.monotonic() < until: time.sleep(0.01)
        say("saved")
    sys.exit(143)
    """
    code, out, _ = launcher.run(body, "-n", 2, "--grace", 5, patch="group.FAREWELL_SECONDS = 0.05")
    assert code == 143
    assert sorted(out.splitlines()) == ["[0] up", "[1] saved", "[1] up"]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_worker_that_cannot_be_started_ends_those_that_were(number: int, launcher: Launcher) -> None:
    patch = """
import subprocess
class Popen(subprocess.Popen):
    left = NUMBER
    def __init__(self, *args, **kwargs):
        Popen.left -= 1
        if Popen.left < 0: raise BlockingIOError(11, "Resource temporarily unavailable")
        super().__init__(*args, **kwargs)
group.subprocess.Popen = Popen
""".replace("NUMBER", str(number))
    code, _, err = launcher.run("time.sleep(600)", "-n", 3, patch=patch)
    assert code == 1
    assert err == "mirrored launch: cannot start the workers: [Errno 11] Resource temporarily unavailable\n"
    assert launcher.alive() == []


TRAINING = """
import mirrored as mr
strategy = mr.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = mr.Variable(0.0)
def step():
    total.assign_add(mr.get_replica_context().all_reduce("sum", 1.0))
for i in range(10):
    if i == 5 and ATTEMPT == 0 and not strategy.is_chief:
        exec(sys.argv[1])
    strategy.run(step)
say("total", float(total))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "how"), [("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"), ("raise ValueError('the reason')", "exit code 1")]
)
def test_a_training_that_failed_is_done_after_a_restart(fault: str, how: str, launcher: Launcher) -> None:
    options = ("-n", 2, "--cpu-devices", 1, "--max-restarts", 1)
    code, out, err = finish(launcher.start(TRAINING, *options, arguments=(fault,)), 100)
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if "total" in line) == ["[0] total 20.0", "[1] total 20.0"]
    assert re.search(rf"worker 1 \(pid \d+\) failed first: {how}, .*; starting all again \(restart 1 of 1", err)
    assert "worker 0 leaves with code 75: " in err
    assert float(re.findall(r"done: 1 restart, ([\d.]+) s in all", err)[0]) < 40


#: Two hosts of one worker each: the launchers need not count attempts alike.
HOSTS = """
import mirrored as mr
if INDEX == 1 and ATTEMPT == 0 and sys.argv[1] == "fail":
    say("fails"); sys.exit(1)  # before it has met anybody
strategy = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(timeout_seconds=20))
say("met", ATTEMPT)
while sys.argv[1] == "stay" and not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
strategy.reduce("sum", 1.0)
say("done")
"""


def of_host(launcher: Launcher, port: int, rank: int, *arguments: str) -> subprocess.Popen[bytes]:
    options = ("--cpu-devices", 1, "--nnodes", 2, "--node-rank", rank, "--coordinator", f"127.0.0.1:{port}", "--max-restarts", 1)
    return launcher.start(HOSTS, *options, arguments=arguments)


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.slow
def test_a_host_whose_worker_fails_before_the_meeting_finds_the_others_again(launcher: Launcher) -> None:
    port = unused_port()
    first, second = [finish(process, 60) for process in [of_host(launcher, port, rank, "fail") for rank in range(2)]]
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "[0] met 0" in first[1] and "[1] met 1" in second[1]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_is_replaced_finds_the_others_again(rank: int, launcher: Launcher, tmp_path: Path) -> None:
    port, go = unused_port(), tmp_path / "go"
    hosts = [of_host(launcher, port, index, "stay", str(go)) for index in range(2)]
    for index, host in enumerate(hosts):
        read_until(host, f"[{index}] met 0")
    hosts[rank].kill()
    new = of_host(launcher, port, rank, "stay", str(go))  # its attempt 0 meets the other's attempt 1
    read_until(hosts[1 - rank], f"[{1 - rank}] met 1")
    read_until(new, f"[{rank}] met 0")
    go.touch()
    for process in (hosts[1 - rank], new):
        code, out, err = finish(process, 60)
        assert code == 0 and "done" in out, err


# Signals to the launcher


@pytest.mark.parametrize(
    ("number", "seen", "expected"), [("SIGTERM", "SIGTERM", 143), ("SIGINT", "SIGINT", 130), ("SIGHUP", "SIGTERM", 129)]
)
def test_signals_are_passed_on_once(number: str, seen: str, expected: int, launcher: Launcher) -> None:
    body = """
    got = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, lambda number, _: got.append(number))
    assert os.getpgid(0) == os.getsid(0) == os.getpid()
    say("up")
    while not got: time.sleep(0.005)
    time.sleep(0.1)
    say(*(signal.Signals(number).name for number in got))
    sys.exit(143)
    """
    process = launcher.start(body, "-n", 3, "--max-restarts", 5)
    read_until(process, "up", 3)
    process.send_signal(signal.Signals[number])
    code, out, err = finish(process)
    assert code == expected
    assert sorted(out.splitlines()) == [f"[{i}] {seen}" for i in range(3)]
    assert "starting all again" not in err
    assert f"ended by {number}: workers 0-2: exit code 143, preempted" in err


@pytest.mark.parametrize(
    ("ends", "number", "expected"),
    [
        (["0", "0"], "SIGTERM", 0),
        (["0", "143"], "SIGTERM", 143),
        (["143", "4"], "SIGTERM", 4),
        (["1", "75"], "SIGINT", 130),
        (["default", "default"], "SIGTERM", 143),
        (["default", "default"], "SIGINT", 130),
    ],
)
def test_exit_codes_after_a_signal(ends: list[str], number: str, expected: int, launcher: Launcher) -> None:
    body = f"""
    code = {ends!r}[INDEX]
    if code != "default": signal.signal(signal.{number}, lambda *_: sys.exit(int(code)))
    say("up")
    while True: signal.pause()
    """
    process = launcher.start(body, "-n", 2)
    read_until(process, "up", 2)
    process.send_signal(signal.Signals[number])
    assert finish(process)[0] == expected


def test_who_does_not_leave_within_the_grace_is_killed(launcher: Launcher) -> None:
    process = launcher.start(STUBBORN, "-n", 2, "--grace", 1.0)
    read_until(process, "up", 2)
    process.send_signal(signal.SIGTERM)
    start = time.monotonic()
    code, out, err = finish(process)
    assert code == 137
    assert out.count("asked") == 2
    assert 1.0 <= time.monotonic() - start < 3
    assert "workers 0-1: SIGKILL, did not leave and was killed by the launcher" in err


@pytest.mark.parametrize(("second", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(second: signal.Signals, expected: int, launcher: Launcher) -> None:
    process = launcher.start(STUBBORN, "-n", 2, "--grace", 60, patch="signals.NOTICE_SECONDS = 0.0")
    read_until(process, "up", 2)
    process.send_signal(signal.SIGTERM)
    read_until(process, "asked", 2)
    start = time.monotonic()
    process.send_signal(second)
    assert finish(process)[0] == expected
    assert time.monotonic() - start < 1.5


def test_sigterms_of_one_notice_are_one(launcher: Launcher) -> None:
    body = """
    def save(*_):
        say('asked')
        time.sleep(0.5)
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    say('up')
    while True: signal.pause()
    """
    process = launcher.start(body, "--grace", 60)
    read_until(process, "up", 1)
    process.send_signal(signal.SIGTERM)
    read_until(process, "asked", 1)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 143 and "exit code 143, preempted" in err


def test_nohup_holds(launcher: Launcher, tmp_path: Path) -> None:
    body = "say('up')\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.005)"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launcher.start(body, arguments=(str(tmp_path / "go"),))
    finally:
        signal.signal(signal.SIGHUP, before)
    read_until(process, "up")
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert finish(process)[0] == 0


# Nobody is left behind


FAMILY = """
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; print('child', flush=True); time.sleep(600)"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


def test_no_orphans_when_the_launcher_is_killed(launcher: Launcher) -> None:
    process = launcher.start(FAMILY + "signal.pause()", "-n", 2)
    read_until(process, "child", 2)
    assert len(launcher.alive()) == 5  # two workers, two children, and the keeper
    process.kill()
    start = time.monotonic()
    wait_until(lambda: not launcher.alive(), 5)
    assert time.monotonic() - start < 2


def test_no_orphans_at_whichever_moment_of_the_start_it_is_killed(launcher: Launcher) -> None:
    for delay in range(6):
        process = launcher.start("time.sleep(600)", "-n", 3)
        wait_until(launcher.alive)
        time.sleep(delay * 0.006)  # another moment each time
        process.kill()
        process.wait()
        wait_until(lambda: not launcher.alive(), 2)
    assert list(launcher.temporary.iterdir()) == []


def test_nothing_is_left_when_the_keeper_is_killed(launcher: Launcher) -> None:
    process = launcher.start("say('up'); sys.stdout.flush(); time.sleep(0.3)", "-n", 2)
    read_until(process, "up", 2)
    [keeper] = [pid for pid in launcher.alive() if b"\0keep\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(keeper, signal.SIGKILL)
    assert finish(process)[0] == 0
    assert list(launcher.temporary.iterdir()) == []


def test_what_a_worker_has_started_ends_with_it(launcher: Launcher) -> None:
    start = time.monotonic()
    code, out, _ = launcher.run(FAMILY + "time.sleep(0.2)", patch="group.LEFTOVER_SECONDS = 0.3")
    assert (code, out) == (0, "[0] child\n")
    assert time.monotonic() - start < 4
    wait_until(lambda: not launcher.alive(), 1)


def test_a_daemon_that_holds_the_output_does_not_hold_the_launcher(launcher: Launcher) -> None:
    body = "import subprocess; say(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    code, out, _ = launcher.run(body, patch="group.LEFTOVER_SECONDS = 0.3")
    assert code == 0
    os.kill(int(out.split()[1]), signal.SIGKILL)  # it left the group by its own wish


# Logs


def test_logs_are_private_and_runs_do_not_overwrite_each_other(launcher: Launcher, tmp_path: Path) -> None:
    logs = tmp_path / "a" / "logs"
    body = r"""
    sys.stdout.buffer.write(b"\x1b[1m\r\n\xff%d" % ATTEMPT)
    sys.stdout.flush()
    print("err", file=sys.stderr)
    sys.exit(2)
    """
    before = os.umask(0)
    try:
        for _ in range(2):
            _, _, err = launcher.run(body, "-n", 2, "--max-restarts", 1, "--log-dir", logs)
    finally:
        os.umask(before)
    folders = sorted(logs.iterdir())
    assert [folder.name for folder in folders] == ["attempt-0", "attempt-1", "attempt-2", "attempt-3"]
    assert f"logs in {logs}/attempt-3" in err
    assert {path.stat().st_mode & 0o777 for path in (logs, *folders)} == {0o700}
    files = [path for folder in folders for path in sorted(folder.iterdir())]
    assert [path.name for path in files] == ["worker-0.log", "worker-1.log"] * 4
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert [sorted(path.read_bytes().splitlines()) for path in files[::2]] == [
        sorted([b"\x1b[1m", b"\xff%derr" % (i % 2)]) for i in range(4)
    ]


def test_logs_of_hosts_in_one_folder(launcher: Launcher, tmp_path: Path) -> None:
    for rank in (0, 1):
        nodes = ("--nnodes", 2, "--node-rank", rank, "--coordinator", "127.0.0.1:9000")
        launcher.run("say(INDEX)", "-n", 2, *nodes, "--log-dir", tmp_path / "logs")
    found = {str(path.relative_to(tmp_path / "logs")): path.read_text() for path in tmp_path.glob("logs/*/*")}
    assert found == {f"attempt-0-node-{i // 2}/worker-{i}.log": f"{i}\n" for i in range(4)}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_training(launcher: Launcher, tmp_path: Path) -> None:
    patch = """
from mirrored._command import output
class Full(output.LogFile):
    def __init__(self, path): self.path, self._fd = path, __import__("os").open("/dev/full", 1)
group.LogFile = Full
"""
    code, out, err = launcher.run("say(1); say(2)", "--log-dir", tmp_path / "logs", patch=patch)
    assert (code, out) == (0, "[0] 1\n[0] 2\n")
    assert err.count("any more: No space left on device") == 1


# What is wrong on the command line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no script was given. Write for example: mirrored launch -n 2 train.py"),
        (["-n", "2"], "no script was given"),
        (["-n", "2", "-m"], "no module was given after -m"),
        (["-n", "0", "SCRIPT"], "argument -n: '0' is no whole number from 1 to 65536"),
        (["-n", "-1", "SCRIPT"], "argument -n: "),
        (["-n", "two", "SCRIPT"], "argument -n: 'two' is no whole number"),
        (["-n"], "argument -n: expected one argument"),
        (["-n", "1\x1b[1m", "SCRIPT"], r"argument -n: '1\x1b[1m' is no"),
        (["-n", "99999999999", "SCRIPT"], "argument -n: "),
        (["absent.py"], "there is no file 'absent.py'"),
        (["--gpu", "1", "SCRIPT"], "unrecognized arguments: --gpu"),
        (["--cpu-devices", "2", "--gpus-per-worker", "1", "SCRIPT"], "a worker runs on the CPU or on GPUs"),
        (["--nnodes", "2", "SCRIPT"], "--nnodes needs --coordinator"),
        (["--nnodes", "2", "--coordinator", "a:1", "SCRIPT"], "--nnodes needs --node-rank: 0 on the first host, 1 on the last"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--coordinator", "a:1", "SCRIPT"],
            "--node-rank is 2; with --nnodes 2 give 0",
        ),
        (["--node-rank", "1", "SCRIPT"], "--node-rank is 1; with --nnodes 1 give 0"),
        (["--coordinator", "host", "SCRIPT"], "--coordinator is 'host', which has no port"),
        (["--coordinator", "host:0", "SCRIPT"], "--coordinator is 'host:0', whose port is '0'"),
        (["--nnodes", "60000", "--node-rank", "1", "-n", "2", "--coordinator", "a:1", "SCRIPT"], "are more than 65536 workers"),
        (["--max-restarts", "-1", "SCRIPT"], "argument --max-restarts: "),
        (["--grace", "nan", "SCRIPT"], "argument --grace: 'nan' is no number of seconds"),
        (["--grace", "-1", "SCRIPT"], "argument --grace: "),
        (["--log-dir", "SCRIPT", "SCRIPT"], "cannot make the folder "),
    ],
)
def test_usage_errors_are_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(launch, "Group", None)  # nothing is started
    start = time.monotonic()
    with pytest.raises(SystemExit) as info:
        launch.main(["launch", *(str(script) if option == "SCRIPT" else option for option in options)])
    assert info.value.code == 2
    assert time.monotonic() - start < 0.5
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert message in err and ". Write for example: mirrored launch -n " in err
    shown = err.partition("Write for example: ")[2]
    assert ("--nnodes" in shown) == ("node" in message or "coordinator" in message or "65536 workers" in message)
    assert ("--log-dir" in shown) == ("folder" in message)
    assert err.startswith("mirrored launch: ")


def test_the_last_port_is_right(launcher: Launcher) -> None:
    assert launcher.run("pass", "--coordinator", "a:65535", "--max-restarts", 1)[0] == 0


@pytest.mark.parametrize("argv", [[], ["lunch"], ["\x1b"]])
def test_commands_that_are_not_there(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "there are launch, check and env" in err and "\x1b" not in err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--version"]) == 0
    assert capsys.readouterr().out == f"mirrored {mirrored.__version__}\n"
    assert launch.main(["--help"]) == 0
    assert "mirrored launch -n N [options] script.py" in capsys.readouterr().out
    with pytest.raises(SystemExit) as info:
        launch.main(["launch", "--help"])
    assert info.value.code == 0
    assert "--max-restarts R" in capsys.readouterr().out


def test_the_command_and_the_module_are_the_same(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('here'); sys.exit(7)")
    command = [sys.executable, "-m", "mirrored", "launch", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (7, "[0] here\n")
    project = (SOURCE.parent.parent / "pyproject.toml").read_text()
    assert 'mirrored = "mirrored.launch:main"' in project
