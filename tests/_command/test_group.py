"""The launcher starts, passes on, ends and restarts workers as it says, and leaves none behind; plain scripts, no jax."""

import contextlib
import errno
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from processes import free_port, wait_until

import mirrored
from mirrored import launch
from mirrored._cluster.resolvers import discover
from mirrored._command import group
from mirrored._command.ending import Attempt, Ending

SOURCE = Path(mirrored.__file__).parent
#: The launcher, which needs no jax.
BOOT = """
import sys
from mirrored._command import group, signals
import mirrored.launch as launch
assert not {"jax", "numpy"} & set(sys.modules)
"""
HEAD = """
import os, signal, sys, time
INDEX = int(os.environ["JAX_PROCESS_ID"])
ATTEMPT = int(os.environ["MIRRORED_ATTEMPT"])
def say(*words): print(*words, flush=True)
def wait_for(path):
    while not os.path.exists(path): time.sleep(0.005)
"""
#: A worker that a signal does not end.
STUBBORN = "signal.signal(signal.SIGTERM, lambda *_: say('asked')); say('up')\nwhile True: signal.pause()\n"


class Launcher:
    """Start launchers for one test, whose workers are known by a variable in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tag, self.temporary = folder, uuid.uuid4().hex, folder / "temporary"
        self.temporary.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []

    def script(self, body: str, name: str = "worker.py") -> Path:
        path = self.folder / name
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    def start(
        self, body: str | Path, *options: object, arguments: Sequence[object] = (), patch: str = "",
        environment: Mapping[str, str] | None = None, boot: str = BOOT, **popen: object,
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        script = body if isinstance(body, Path) else self.script(body)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        # As in a terminal, whoever runs the tests in the background.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", f"{boot}\n{patch}\nsys.exit(launch.main())", "launch"]
                + [str(word) for word in (*options, script, *arguments)],
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


def read_until(process: subprocess.Popen[bytes], text: str, count: int = 1) -> None:
    """Read the launcher's stdout until a text has come so many times."""
    assert process.stdout is not None
    read = b""
    while read.count(text.encode()) < count:
        piece = os.read(process.stdout.fileno(), 65536)
        assert piece, read
        read += piece


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    it = Launcher(tmp_path)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which somebody may run the tests, ignores it
    yield it
    signal.signal(signal.SIGHUP, before)
    for process in it.started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
    try:
        wait_until(lambda: not it.alive(), 3)
        wait_until(lambda: not list(it.temporary.iterdir()), 3)
    finally:
        for pid in it.alive():
            os.kill(pid, signal.SIGKILL)


Plan = Callable[..., tuple[int, list[SimpleNamespace], str]]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Plan:
    """Return what the launcher would start in each attempt, whose workers end with these codes; and its own code and words."""
    for name in [name for name in os.environ if name.startswith(("JAX_", "XLA_"))]:
        monkeypatch.delenv(name)

    def run(*options: object, ends: Sequence[Sequence[int]] = ((0,),)) -> tuple[int, list[SimpleNamespace], str]:
        attempts: list[SimpleNamespace] = []

        def start(command: object, environments: object, first_index: int, num_workers: int, **more: object) -> object:
            codes = ends[min(len(attempts), len(ends) - 1)]
            attempts.append(SimpleNamespace(environments=environments, first=first_index, num_workers=num_workers, **more))
            endings = [Ending(i, 100 + i, code, 9.0 * i, 0.0, False, []) for i, code in enumerate(codes)]
            return SimpleNamespace(watch=lambda: Attempt(endings, (), {}))

        monkeypatch.setattr(launch, "Group", start)
        code = launch.main(["launch", *map(str, options), __file__])
        return code, attempts, capfd.readouterr().err

    return run


# Output


def test_lines_have_prefixes_and_stay_whole_and_in_order_also_when_both_streams_go_to_one_place(launcher: Launcher) -> None:
    """Lines of gloo are left out."""
    body = """
    print('[Gloo] Rank 0 is connected to 1 peer ranks.')
    for i in range(900):
        print(INDEX, i, 'o' * 99)
        i % 30 or print('err', i, 'e' * 9000, file=sys.stderr)
    print('of the program: [Gloo] Rank 0', end='')
    """
    code, out, _ = launcher.run(body, "-n", 2, stderr=subprocess.STDOUT)
    assert code == 0 and "\x1b" not in out
    for index in range(2):
        own = [line for line in out.splitlines() if line.startswith(f"[{index}]")]
        lines = (f"[{index}] {index} {i} {'o' * 99}" for i in range(900))
        assert [line for line in own if " err " not in line] == [*lines, f"[{index}] of the program: [Gloo] Rank 0"]
        assert [line for line in own if " err " in line] == [f"[{index}] err {i} {'e' * 9000}" for i in range(0, 900, 30)]
    assert len(out.splitlines()) == 2 * (901 + 30), "a success is silent"


def test_a_progress_bar_moves_in_one_line_of_a_terminal_and_is_a_line_now_and_then_elsewhere(launcher: Launcher) -> None:
    """On a terminal prefixes have colours."""
    body = "for i in range(50): sys.stderr.write(f'\\r{i}%')\nsys.stderr.write('\\n'); say('end')"
    _, out, err = launcher.run(body, "-n", 2)
    assert sorted(err.splitlines()) == ["[0] 0%", "[0] 49%", "[1] 0%", "[1] 49%"]
    assert sorted(out.splitlines()) == ["[0] end", "[1] end"], "each stream to its own"
    own, other = os.openpty()
    with open(own, "rb", buffering=0) as terminal:
        process = launcher.start(body, "-n", 2, stderr=other, environment={"NO_COLOR": ""})
        os.close(other)
        assert process.wait(20) == 0
        shown = [piece for piece in re.split(rb"\r\x1b\[K|\r\n", terminal.read(65536)) if piece]
    first, second = (b"\x1b[32m[0]\x1b[0m ", b"\x1b[33m[1]\x1b[0m ")
    assert [piece for piece in shown if piece.startswith(first)] == [first + b"%d%%" % i for i in range(50)]
    assert [piece for piece in shown if not piece.startswith(first)] == [second + b"49%"]


def test_streams_that_are_closed_stop_nobody(launcher: Launcher, tmp_path: Path) -> None:
    body = "say('before', INDEX)\nif INDEX == 0: os.close(1), os.close(2), time.sleep(0.1)\nelse: say('after')"
    code, out, err = launcher.run(body, "-n", 2)
    assert (code, err, sorted(out.splitlines())) == (0, "", ["[0] before 0", "[1] after", "[1] before 1"])
    body = "for i in range(300): print('x' * 1000)\nopen(sys.argv[1], 'w').close()"
    process = launcher.start(body, arguments=(tmp_path / "done",))
    assert process.stdout is not None and process.stdout.read(10)
    process.stdout.close()
    assert process.wait(20) == 0 and (tmp_path / "done").exists()


def test_a_launcher_without_standard_streams_runs(launcher: Launcher, tmp_path: Path) -> None:
    boot = f"import os; os.closerange(0, 3)\n{BOOT}"
    assert launcher.run("say('here'); sys.exit(4)", "--log-dir", tmp_path / "logs", boot=boot)[0] == 4
    assert (tmp_path / "logs/attempt-0/worker-0.log").read_text() == "here\n"


def test_a_reader_that_is_stuck_holds_workers_back_but_not_the_launcher(launcher: Launcher) -> None:
    body = "while True: print('x' * 1000), print('x' * 1000, file=sys.stderr)"
    process = launcher.start(body, "--grace", 0.2, patch="signals.NOTICE_SECONDS = 0.0")
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
    wait_until(lambda: not launcher.alive(), 10)
    process.send_signal(signal.SIGTERM)  # once more, as nobody reads what it has to say
    assert process.wait(10) in (143, -signal.SIGTERM)  # the second may come when Python is ending already


# Environment


def test_workers_are_told_their_cluster_and_devices(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    names = "JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID JAX_PLATFORMS JAX_NUM_CPU_DEVICES JAX_LOCAL_DEVICE_IDS "
    names += "MIRRORED_GPUS"

    def told(*options: object) -> list[list[str | None]]:
        return [[environment.get(name) for name in names.split()] for environment in plan(*options)[1][0].environments]

    (address, *rest), (address_1, *_) = told("-n", 2, "--cpu-devices", 3)
    assert re.fullmatch(r"127\.0\.0\.1:\d+", str(address)) and address == address_1
    assert rest == ["2", "0", "cpu", "3", None, None]
    assert [values[1:] for values in told()] == [["1", "0", None, None, None, None]]
    assert [values[5:] for values in told("-n", 3)] == [["0", "0"], ["1", "0"], ["2", "0"]], "each has a GPU, if there are any"
    assert [values[5:] for values in told("-n", 2, "--gpus-per-worker", 2)] == [["0,1", "2"], ["2,3", "2"]]
    nodes = ("-n", 2, "--nnodes", 3, "--node-rank", 1, "--coordinator", "gpu-0:9000", "--log-dir", tmp_path / "logs")
    assert [values[:3] for values in told(*nodes)] == [["gpu-0:9000", "6", "2"], ["gpu-0:9000", "6", "3"]]
    _, [attempt], _ = plan(*nodes)
    assert attempt.logs == tmp_path / "logs/attempt-1-node-1" and attempt.logs.is_dir()
    assert (attempt.first, attempt.num_workers) == (2, 6), "which name the files"


OTHERS = {
    "TF_CONFIG": '{"cluster": {"worker": ["10.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}',
    "RANK": "5", "WORLD_SIZE": "7", "MASTER_ADDR": "node0", "MASTER_PORT": "29500",
    "SLURM_STEP_NODELIST": "n[1-9]", "SLURM_STEP_NUM_TASKS": "9", "SLURM_STEP_TASKS_PER_NODE": "1(x9)", "SLURM_PROCID": "3",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "1", "PMI_SIZE": "4",
    "COORDINATOR_ADDRESS": "job-0", "COORDINATOR_PORT": "1", "NUM_PROCESSES": "8", "PROCESS_ID": "3", "JAX_COORDINATOR_PORT": "5",
}  # fmt: skip


def test_the_launcher_s_cluster_wins_over_other_launchers(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    for is_there in (True, False):
        for name, value in OTHERS.items():
            monkeypatch.setenv(name, value)
        if not is_there:
            monkeypatch.delenv("TF_CONFIG")
        _, [attempt], err = plan("-n", 2)
        for index, environment in enumerate(attempt.environments):
            assert re.match(rf"worker {index} of 2.*, from JAX_COORDINATOR_ADDRESS", discover(environment=environment)[1])
            assert "RANK" in environment and "TF_CONFIG" not in environment, "what does not disturb is passed on"
        assert err.count("TF_CONFIG") == is_there and "10.0.0.1" not in err


def test_no_shell_reads_the_command_and_path_is_not_searched_for_python(launcher: Launcher, tmp_path: Path) -> None:
    """Also where the script's name begins with a dash."""
    for name in ("python", "python3", Path(sys.executable).name):
        (tmp_path / name).write_text("#!/bin/sh\necho hijacked\n")
        (tmp_path / name).chmod(0o755)
    body = "import json; say(json.dumps([sys.executable, sys.stdout.write_through, sys.path[0], *sys.argv]))"
    script = launcher.script(body, "-n $(touch hacked); `touch hacked` 'b\" .py").relative_to(tmp_path)
    arguments = ("$(touch hacked)", "; touch hacked", "a b", "", "*", "-n", "9", "--", "--log-dir", "\n", "-m", "é")
    _, out, _ = launcher.run(script, "--", arguments=arguments, cwd=tmp_path, environment={"PATH": str(tmp_path)})
    assert json.loads(out.removeprefix("[0] ")) == [sys.executable, True, str(tmp_path), f"./{script}", *arguments]
    assert not (tmp_path / "hacked").exists()


# Failures and restarts


def test_the_summary_says_who_how_when_and_where_and_nothing_that_acts_on_a_terminal(launcher: Launcher, tmp_path: Path) -> None:
    """And no value of the environment."""
    evil = "\x1b]0;title\x07\x1b[2J\rmirrored launch: done\x00\x9b31m\u202e\u2028 tab\tend"
    body = f"""
    if INDEX == 3: time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)
    assert os.environ["API_TOKEN"]
    if INDEX != 1: sys.exit(75)
    for i in range(30): print("step", i, file=sys.stderr)
    print({evil!r} * 30, file=sys.stderr)
    print('x' * 9999, file=sys.stderr)
    raise ValueError("the reason")
    """
    secret = "hunter" + "2"
    options = ("-n", 4, "--log-dir", tmp_path / "logs")
    code, out, err = launcher.run(body, *options, environment={"API_TOKEN": secret, "TF_CONFIG": secret})
    logs = "".join(path.read_text() for path in tmp_path.glob("logs/*/*"))
    assert not any(word in out + err + logs for word in (secret, "API_TOKEN"))
    summary = err[err.index("mirrored launch: worker 1") :]
    first, head, *tail, others, total = [line.removeprefix("mirrored launch: ") for line in summary.splitlines()]
    failure = r"worker 1 \(pid \d+\) failed first: exit code 1, \d\.\d s after the start, at \d+-\d\d-\d\d \d\d:\d\d:\d\d"
    assert code == 1 and re.fullmatch(failure, first)
    assert head == "its last lines:"
    assert tail[-1] == "  | ValueError: the reason" and len(tail) <= 20
    assert others == "the others: workers 0, 2: exit code 75, asks to be started again; worker 3: SIGKILL"
    assert re.fullmatch(rf"0 restarts, \d\.\d s in all, logs in {tmp_path}/logs/attempt-0", total)
    assert re.search(r"\| mirrored launch: done\\x00\\x9b31m\\u202e\\u2028 tab\\tend\\x1b]0;title\\x07\\x1b\[2J\n", summary)
    assert not set(summary) & set("\x1b\x07\r\x00\x9b\u202e\u2028\t")
    assert all(line.startswith("mirrored launch: ") for line in summary.splitlines())
    assert len(summary) < 4096 + 25 * 20 + 500


def test_restarts_end_with_the_budget_and_use_fresh_ports_of_their_own_or_the_one_given(plan: Plan) -> None:
    for first, num_attempts in {0: 1, 1: 3, 75: 3, 76: 1, 143: 3}.items():
        code, attempts, err = plan("-n", 2, "--max-restarts", 2, ends=[[first, first and 75]])
        assert (code, len(attempts), err.count("starting all again")) == (first, num_attempts, num_attempts - 1)
        assert [attempt.environments[0]["MIRRORED_ATTEMPT"] for attempt in attempts] == ["0", "1", "2"][:num_attempts]
        assert len({attempt.environments[0]["JAX_COORDINATOR_ADDRESS"] for attempt in attempts}) == num_attempts
    assert "(restart 2 of 2 without a checkpoint)" in err and "2 restarts, " in err
    _, attempts, _ = plan("--max-restarts", 1, "--coordinator", "127.0.0.1:65535", ends=[[5]])
    assert [attempt.environments[0]["JAX_COORDINATOR_ADDRESS"] for attempt in attempts] == ["127.0.0.1:65535"] * 2


def test_ports_are_not_taken_again_also_on_a_host_without_ipv4(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    ports, refused = iter([5001, 5001, 5002, 5001, 5002, 5003, 5004]), set[str]()

    class Socket(contextlib.nullcontext):
        getsockname = staticmethod(lambda: ("", next(ports)))

        def __enter__(self) -> "Socket":
            return self

        def bind(self, address: tuple[str, int]) -> None:
            if address[0] in refused:
                raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(launch, "socket", SimpleNamespace(socket=Socket, AF_INET=4, AF_INET6=6))
    for expected in (["127.0.0.1:5001", "127.0.0.1:5002", "127.0.0.1:5003"], ["[::1]:5004"]):
        _, attempts, _ = plan("--max-restarts", len(expected) - 1, ends=[[1]])
        assert [attempt.environments[0]["JAX_COORDINATOR_ADDRESS"] for attempt in attempts] == expected
        refused.add("127.0.0.1")


def test_each_writer_of_checkpoints_may_have_a_file_of_its_own(launcher: Launcher) -> None:
    body = """
    file = os.environ["MIRRORED_PROGRESS_FILE"]
    assert not os.path.exists(file) and os.stat(os.path.dirname(file)).st_mode & 0o777 == 0o700
    with open(file, "w") as opened: opened.write("1000000")  # of a program that a worker starts
    with open(file + "-0a1b2c3d", "w") as opened: opened.write(str(min(ATTEMPT, 2)))
    with open(file + "-0a1b2c3d.77", "w") as opened: opened.write(str(ATTEMPT))  # not finished
    say(ATTEMPT)
    sys.exit(9)
    """
    code, out, err = launcher.run(body, "--max-restarts", 1)
    assert (code, out.split()[1::2]) == (9, ["0", "1", "2", "3"])
    assert "(restart 1 of 1 since the checkpoint of step 2)" in err


def test_what_is_no_step_counts_as_none(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    assert group._read_steps(path) == {}
    for text, is_step in {"12": 1, "0": 1, "9" * 31: 1, "9" * 32: 0, "9" * 99: 0, "": 0, "-1": 0, "1\n": 0}.items():
        path.write_text(text)
        assert group._read_steps(path) == ({"progress": int(text)} if is_step else {}), text


def test_who_hangs_while_others_gave_up_is_asked_then_killed_and_no_cause(launcher: Launcher) -> None:
    body = """
    if INDEX == 0:
        for i in (1, 2, 3): wait_for(sys.argv[1] + str(i))
        sys.exit(75)
    signal.signal(signal.SIGTERM, lambda *_: say("asked") or INDEX == 2 or sys.exit(0))
    open(sys.argv[1] + str(INDEX), "w").close()
    if INDEX == 3: time.sleep(0.1); say("left"); sys.exit(75)
    while True: signal.pause()
    """
    patch = "group.FAREWELL_SECONDS = 0.2"
    code, out, err = launcher.run(body, "-n", 4, "--grace", 0.2, patch=patch, arguments=(launcher.folder / "up",))
    assert code == 75, "not the 137 of the one that was killed"
    assert sorted(out.splitlines()) == ["[1] asked", "[2] asked", "[3] left"]
    killed = "SIGKILL, did not leave and was killed by the launcher"
    assert f"the others: worker 1: exit code 0; worker 2: {killed}; worker 3: exit code 75" in err


def test_a_stopped_worker_is_not_waited_for_until_it_is_killed(launcher: Launcher) -> None:
    body = """
    if INDEX == 1: open(sys.argv[1], "w").close(); os.kill(os.getpid(), signal.SIGSTOP)
    wait_for(sys.argv[1]); time.sleep(0.1); sys.exit(75)
    """
    code, _, err = launcher.run(body, "-n", 2, "--grace", 30, arguments=(launcher.folder / "up",))
    assert code == 75 and "worker 1: SIGTERM" in err, err
    assert "worker 1 had been stopped, as by SIGSTOP, so that the others waited in vain" in err
    assert float(re.findall(r"([\d.]+) s in all", err)[0]) < 5  # the farewell


def test_who_saves_after_a_preemption_is_not_disturbed(launcher: Launcher) -> None:
    body = """
    signal.signal(signal.SIGTERM, lambda *_: say("disturbed"))
    if INDEX:
        until = time.monotonic() + 0.2
        while time.monotonic() < until: time.sleep(0.01)
        say("saved")
    sys.exit(143)
    """
    code, out, _ = launcher.run(body, "-n", 2, "--grace", 20, patch="group.FAREWELL_SECONDS = 0.05")
    assert (code, out) == (143, "[1] saved\n")


def test_a_worker_that_cannot_be_started_ends_those_that_were(launcher: Launcher) -> None:
    for number in (0, 3):  # neither the keeper, nor the last worker
        patch = f"""
import subprocess
class Popen(subprocess.Popen):
    left = {number}
    def __init__(self, *args, **kwargs):
        Popen.left -= 1
        if Popen.left < 0: raise BlockingIOError(11, "Resource temporarily unavailable")
        super().__init__(*args, **kwargs)
group.subprocess.Popen = Popen
"""
        code, _, err = launcher.run("time.sleep(600)", "-n", 3, patch=patch)
        assert (code, launcher.alive()) == (1, [])
        assert err == "mirrored launch: cannot start the workers: [Errno 11] Resource temporarily unavailable\n"


#: Two hosts of one worker each.
HOSTS = """
import mirrored as mr
strategy = mr.MultiWorkerMirroredStrategy(communication_options=mr.CommunicationOptions(timeout_seconds=20))
say("met", ATTEMPT)
wait_for(sys.argv[1])
strategy.reduce("sum", 1.0)
say("done")
"""


@pytest.mark.slow
def test_a_host_that_is_replaced_finds_the_others_again(launcher: Launcher, tmp_path: Path) -> None:
    """The launchers need not count attempts alike."""
    port, go = free_port(), tmp_path / "go"

    def of_host(rank: int) -> subprocess.Popen[bytes]:
        nodes = ("--nnodes", 2, "--node-rank", rank, "--coordinator", f"127.0.0.1:{port}")
        return launcher.start(HOSTS, "--cpu-devices", 1, *nodes, "--max-restarts", 1, arguments=[go])

    replaced, other = of_host(0), of_host(1)
    for process, line in ((replaced, "[0] met 0"), (other, "[1] met 0")):
        read_until(process, line)
    replaced.kill()
    new = of_host(0)
    for process, line in ((other, "[1] met 1"), (new, "[0] met 0")):
        read_until(process, line)
    go.touch()
    for process in (other, new):
        code, out, err = finish(process, 60)
        assert code == 0 and "done" in out, err


# Signals to the launcher


def test_signals_are_passed_on_once(launcher: Launcher) -> None:
    body = """
    got = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, lambda number, _: got.append(number))
    assert os.getpgid(0) == os.getsid(0) == os.getpid()
    say("up")
    while not got: time.sleep(0.005)
    say("asked")
    time.sleep(0.1)
    say(*(signal.Signals(number).name for number in got))
    sys.exit(143)
    """
    # Two of one notice are one, as from systemd or Slurm to all processes.
    cases = [("SIGTERM", 2, "SIGTERM", 143), ("SIGINT", 1, "SIGINT", 130), ("SIGHUP", 1, "SIGTERM", 129)]
    started = [launcher.start(body, "--max-restarts", 5, patch="signals.NOTICE_SECONDS = 60.0") for _ in cases]
    for process, (number, times, _, _) in zip(started, cases, strict=True):
        for said in ("up", "asked")[:times]:
            read_until(process, said)
            process.send_signal(signal.Signals[number])
    for process, (number, _, seen, expected) in zip(started, cases, strict=True):
        code, out, err = finish(process)
        assert code == expected and out.splitlines()[-1] == f"[0] {seen}"
        assert f"ended by {number}: worker 0: exit code 143, preempted" in err and "starting all again" not in err


def test_signals_that_are_the_workers_own_are_passed_on_each_time_and_end_nothing(launcher: Launcher) -> None:
    body = """
    got = []
    for number in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, lambda number, _: got.append(number))
    for said in ("up", "once", "twice"):
        say(said)
        while len(got) < ("up", "once", "twice").index(said) + 1: time.sleep(0.005)
    say(*(signal.Signals(number).name for number in got))
    """
    process = launcher.start(body)
    for said, name in {"up": "SIGUSR1", "once": "SIGUSR2", "twice": "SIGUSR1"}.items():
        read_until(process, said)
        process.send_signal(signal.Signals[name])
    code, out, err = finish(process)
    assert (code, out.splitlines()[-1]) == (0, "[0] SIGUSR1 SIGUSR2 SIGUSR1"), err


def test_who_does_not_leave_within_the_grace_or_before_a_second_signal_is_killed(launcher: Launcher) -> None:
    for grace, second, expected in ((0.2, None, 137), (600, signal.SIGINT, 130)):
        process = launcher.start(STUBBORN, "--grace", grace, patch="signals.NOTICE_SECONDS = 0.0")
        read_until(process, "up")
        start = time.monotonic()
        process.send_signal(signal.SIGTERM)
        read_until(process, "asked")
        if second is not None:
            process.send_signal(second)
        code, _, err = finish(process)
        assert code == expected and (second or time.monotonic() - start >= grace)
        assert "worker 0: SIGKILL, did not leave and was killed by the launcher" in err


# Nobody is left behind


def keeper_of(launcher: Launcher) -> int:
    [keeper] = [pid for pid in launcher.alive() if b"\0keep\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return keeper


FAMILY = """
import subprocess
read, write = os.pipe()
code = f"import os, time; print('child', flush=True); os.write({write}, b'.'); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], pass_fds=(write,))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.read(read, 1)
"""


def test_no_orphans_when_the_launcher_is_killed(launcher: Launcher) -> None:
    process = launcher.start(FAMILY + "signal.pause()", "-n", 2)
    read_until(process, "child", 2)
    assert len(launcher.alive()) == 5  # two workers, two children, and the keeper
    process.kill()  # and the fixture waits until nobody and nothing is left


def test_no_orphans_when_the_launcher_is_killed_while_it_starts_them(launcher: Launcher) -> None:
    process = launcher.start("time.sleep(600)", "-n", 2)
    wait_until(launcher.alive)
    process.kill()


def test_nothing_is_left_when_the_launcher_is_killed_at_its_end(launcher: Launcher) -> None:
    patch = """
import os, subprocess
kill = subprocess.Popen.kill
def kill_both(keeper): kill(keeper); os.kill(os.getpid(), 9)
subprocess.Popen.kill = kill_both
"""
    assert launcher.run("say('done')", patch=patch)[0] == -signal.SIGKILL


def test_nothing_is_left_when_the_keeper_is_killed_and_nohup_holds(launcher: Launcher, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launcher.start("say('up')\nwait_for(sys.argv[1])", "-n", 2, arguments=(tmp_path / "go",))
    finally:
        signal.signal(signal.SIGHUP, before)
    read_until(process, "up", 2)
    os.kill(keeper_of(launcher), signal.SIGKILL)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert finish(process)[0] == 0
    assert list(launcher.temporary.iterdir()) == []


def test_what_a_worker_has_started_ends_with_it(launcher: Launcher) -> None:
    body = FAMILY + "say(subprocess.Popen(['sleep', '600'], start_new_session=True).pid)"
    code, out, _ = launcher.run(body, patch="group.LEFTOVER_SECONDS = 0.1")
    child, daemon = out.splitlines()
    os.kill(int(daemon.split()[1]), signal.SIGKILL)  # it left the group by its own wish, and does not hold the launcher
    assert (code, child) == (0, "[0] child")
    wait_until(lambda: not launcher.alive(), 3)


# Logs


def test_logs_are_whole_and_private_and_runs_do_not_overwrite_each_other(launcher: Launcher, tmp_path: Path) -> None:
    logs = tmp_path / "a" / "logs"
    body = "if INDEX: sys.stdout.buffer.write(bytes(range(256)) * 999 + b'%d' % ATTEMPT)\nelse: print('err', file=sys.stderr)"
    (logs / "attempt-0").mkdir(0o700, parents=True)
    logs.chmod(0o700)
    before = os.umask(0)
    try:
        _, _, err = launcher.run(body + "\nsys.exit(2)", "-n", 2, "--max-restarts", 1, "--log-dir", logs)
    finally:
        os.umask(before)
    _, *folders = sorted(logs.iterdir())
    assert [folder.name for folder in folders] == ["attempt-1", "attempt-2"]
    assert f"logs in {logs}/attempt-2" in err
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    files = [path for folder in folders for path in sorted(folder.iterdir())]
    assert [path.name for path in files] == ["worker-0.log", "worker-1.log"] * 2
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    wrote = [b"err\n", bytes(range(256)) * 999 + b"0", b"err\n", bytes(range(256)) * 999 + b"1"]
    assert [path.read_bytes() for path in files] == wrote


def test_a_folder_of_logs_that_is_gone_or_cannot_be_made_does_not_end_the_restarts(launcher: Launcher, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    body = f"""
    import shutil
    say(ATTEMPT, os.listdir({str(logs)!r}) if ATTEMPT < 2 else "")
    shutil.rmtree({str(logs)!r}, ignore_errors=True)
    if ATTEMPT == 1: open({str(logs)!r}, 'w').close()
    sys.exit(ATTEMPT < 2)
    """
    code, out, err = launcher.run(body, "--max-restarts", 2, "--log-dir", logs)
    assert (code, out) == (0, "[0] 0 ['attempt-0']\n[0] 1 ['attempt-1']\n[0] 2 \n")
    assert "cannot keep the output of attempt 2 in " in err and "File exists" in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_training(launcher: Launcher, tmp_path: Path) -> None:
    patch = """
from mirrored._command import output
class Full(output.LogFile):
    def __init__(self, path): output.io.FileIO.__init__(self, "/dev/full", "w")
group.LogFile = Full
"""
    code, out, err = launcher.run("say(1); say(2)", "--log-dir", tmp_path / "logs", patch=patch)
    assert (code, out) == (0, "[0] 1\n[0] 2\n")
    assert err.count("any more: No space left on device") == 1


# What is wrong on the command line


USAGE_ERRORS = {
    "": "no script was given. Write for example: mirrored launch -n 2 train.py",
    "-n 2": "no script was given",
    "-n 2 -m": "no module was given after -m",
    "-n 0 SCRIPT": "argument -n: '0' is no whole number from 1 to 65536",
    "-n -1 SCRIPT": "argument -n: ",
    "-n two SCRIPT": "argument -n: 'two' is no whole number",
    "-n": "argument -n: expected one argument",
    "-n 1\x1b[1m SCRIPT": r"argument -n: '1\x1b[1m' is no",
    "-n 99999999999 SCRIPT": "argument -n: ",
    "absent.py": "there is no file 'absent.py'",
    "-n 2 /dev/null": "'/dev/null' is no file that a worker could read: each worker reads the program",
    "-n 2 /dev/stdin": "'/dev/stdin' is no file that a worker could read",
    "/proc/self/fd/0": "standard input is empty. Write it into a file. Write for example",
    "--gpu 1 SCRIPT": "unrecognized arguments: --gpu",
    "--cpu-devices 2 --gpus-per-worker 1 SCRIPT": "--cpu-devices and --gpus-per-worker were both given; a worker runs on the CPU",
    "--gpus-per-worker 1 SCRIPT": "JAX_PLATFORMS=cpu and --gpus-per-worker were both given; a worker runs on the CPU or on GPUs",
    "--nnodes 2 SCRIPT": "--nnodes needs --coordinator",
    "--nnodes 2 --coordinator a:1 SCRIPT": "--nnodes needs --node-rank: 0 on the first host, 1 on the last",
    "--nnodes 2 --node-rank 2 --coordinator a:1 SCRIPT": "--node-rank is 2; with --nnodes 2 give 0",
    "--node-rank 1 SCRIPT": "--node-rank is 1; with --nnodes 1 give 0",
    "--coordinator host SCRIPT": "--coordinator is 'host', which has no port",
    "--coordinator host:0 SCRIPT": "--coordinator is 'host:0', whose port is '0'",
    "--nnodes 60000 --node-rank 1 -n 2 --coordinator a:1 SCRIPT": "are more than 65536 workers",
    "--max-restarts -1 SCRIPT": "argument --max-restarts: ",
    "--grace nan SCRIPT": "argument --grace: 'nan' is no number of seconds",
    "--grace -1 SCRIPT": "argument --grace: ",
    "--log-dir SCRIPT SCRIPT": "cannot make the folder ",
}


def test_usage_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(launch, "Group", None)  # nothing is started
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    for options, message in USAGE_ERRORS.items():
        with pytest.raises(SystemExit) as info:
            launch.main(["launch", *options.replace("SCRIPT", str(script)).split(" " if options else None)])
        out, err = capsys.readouterr()
        assert (info.value.code, out, err.count("\n")) == (2, "", 1), options
        assert err.startswith("mirrored launch: ") and message in err and ". Write for example: mirrored launch -n " in err, (
            options
        )
        shown = err.partition("Write for example: ")[2]
        assert ("--nnodes" in shown) == ("node" in message or "coordinator" in message or "65536 workers" in message), options
        assert ("--log-dir" in shown) == ("folder" in message), options


def test_more_gpus_than_there_are_are_refused_before_anything_starts(
    tmp_path: Path, plan: Plan, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By CUDA_VISIBLE_DEVICES, else by the files of NVIDIA's driver; where neither is there, nothing is compared."""
    four, one, none = ["nvidia0", "nvidia1", "nvidia2", "nvidia10", "nvidiactl", "nvidia-uvm", "null"], ["nvidia0"], ["null"]
    refused = [  # -n, GPUs of each, CUDA_VISIBLE_DEVICES, /dev; what is said, and offered
        (2, 1, None, one, "needs 2 GPUs, and this host has 1", "-n 1 --gpus-per-worker 1"),
        (3, 2, None, four, "needs 6 GPUs, and this host has 4", "-n 2 --gpus-per-worker 2"),
        (1, 8, None, four, "needs 8 GPUs, and this host has 4", "-n 1 --gpus-per-worker 4"),
        (3, 1, "0, 1", four, "CUDA_VISIBLE_DEVICES, which is '0, 1', has 2", "-n 2 --gpus-per-worker 1"),
        (2, 1, "0,-1,1", four, "has 1", "-n 1 --gpus-per-worker 1"),
        (2, 1, "", four, "CUDA_VISIBLE_DEVICES, which is '', has 0", "-n 2 --cpu-devices 1"),
        (1, 1, "-1", four, "has 0", "-n 1 --cpu-devices 1"),
        (1, 1, "NoDevFiles", four, "has 0", "-n 1 --cpu-devices 1"),
    ]
    runs = [(4, 1, None, four), (2, 2, "GPU-a,GPU-b,GPU-c,GPU-d", one), (8, 2, None, none), (1, 1, "3", one)]

    def see(visible: str | None, files: list[str]) -> None:
        monkeypatch.setattr(launch.os, "listdir", lambda folder: files)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    for n, each, visible, files, says, offers in refused:
        see(visible, files)
        with pytest.raises(SystemExit, match="2"):
            launch.main(["launch", "-n", str(n), "--gpus-per-worker", str(each), __file__])
        err = capfd.readouterr().err
        assert says in err and f"Write for example: mirrored launch {offers} train.py\n" in err, err
        assert plan(*offers.split())[0] == 0, "what is offered starts"
    for n, each, visible, files in runs:
        see(visible, files)
        assert plan("-n", n, "--gpus-per-worker", each)[0] == 0
    see("0", one)
    assert plan("-n", 2)[0] == plan("-n", 2, "--cpu-devices", 1)[0] == 0, "without the option, nothing is compared"


#: Tells what is loaded at the first process that is started, and ends.
AT_FIRST_PROCESS = """
import os, sys
def tell(event, _):
    if event == "subprocess.Popen":
        os.write(1, " ".join(sys.modules).encode())
        os._exit(0)
sys.addaudithook(tell)
"""


def test_workers_are_started_before_jax_could_be_imported() -> None:
    """As by `python -m mirrored`; all else that a public name brings would take a second."""
    start = "import runpy; runpy.run_module('mirrored', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", AT_FIRST_PROCESS + start, "launch", "-n", "2", __file__]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    assert "mirrored._command.group" in loaded
    assert not {"jax", "numpy", "optax", "tqdm", "mirrored._public"} & set(loaded)
    assert len(loaded) < 250, len(loaded)


def test_commands_help_and_version(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ([], ["lunch"], ["\x1b"]):
        assert launch.main(argv) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "there are launch, check, env, plan and report" in err and "\x1b" not in err
    assert launch.main(["--help"]) == 0
    assert "mirrored launch -n N [options] script.py" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        launch.main(["launch", "--help"])
    assert "--max-restarts R" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["mirrored", "--version"])
    monkeypatch.delitem(sys.modules, "mirrored.__main__", raising=False)  # of the tests of docstrings
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("mirrored", run_name="__main__")
    assert capsys.readouterr().out == f"mirrored {mirrored.__version__}\n"
    assert 'mirrored = "mirrored.launch:main"' in (SOURCE.parent.parent / "pyproject.toml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_stopped_keeper_holds_nobody(ends: bool, launcher: Launcher, tmp_path: Path) -> None:
    process = launcher.start("say('up')\nwait_for(sys.argv[1])", "-n", 2, arguments=(tmp_path / "go",))
    read_until(process, "up", 2)
    os.kill(keeper_of(launcher), signal.SIGSTOP)
    if ends:
        (tmp_path / "go").touch()
    else:
        process.send_signal(signal.SIGTERM)
    assert finish(process, 5)[0] == (0 if ends else 143)
    assert list(launcher.temporary.iterdir()) == []


# Shared memory

#: Has shared memory, a semaphore, and a child that keeps their tracker waiting, and does not leave.
SHARES = """
import multiprocessing, multiprocessing.shared_memory
memory = multiprocessing.shared_memory.SharedMemory(create=True, size=1 << 20)
semaphore = multiprocessing.get_context("spawn").Semaphore()
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
if not os.fork(): time.sleep(600)
say("shared", memory.name, "sem." + semaphore._semlock.name.lstrip("/"))
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/shm"), reason="needs /dev/shm")
@pytest.mark.parametrize("how", ["worker", "grace", "launcher"])
def test_nothing_is_left_in_shared_memory_whoever_is_killed(how: str, launcher: Launcher) -> None:
    end = "os.kill(os.getpid(), signal.SIGKILL)" if how == "worker" else "signal.pause(); time.sleep(600)"
    process = launcher.start(SHARES + end, "-n", 2, "--grace", 0.1)
    assert process.stdout is not None
    names = [name for _ in range(2) for name in process.stdout.readline().decode().split()[2:]]
    assert len(names) == 4
    if how == "grace":
        assert all(Path("/dev/shm", name).exists() for name in names)
        process.send_signal(signal.SIGTERM)
    elif how == "launcher":
        process.kill()
    wait_until(lambda: not any(Path("/dev/shm", name).exists() for name in names), 8)
    wait_until(lambda: not launcher.alive(), 5)
