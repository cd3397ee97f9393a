"""The command `mirrored`, above all `mirrored launch`: it starts a host's workers, and restarts them after a failure."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import math
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from . import _env
from ._cluster.spec import LOOPBACK, MAX_WORKERS, check_address, join_address
from ._command.ending import Budget, describe_failure, summarize
from ._command.group import Group
from ._command.output import Outlet, make_log_folder
from ._command.signals import Signals
from ._errors import ClusterConfigError
from ._text import counted, describe, escape

USAGE_ERROR = 2
#: Paths of this process's own open files; for a worker the same paths mean other files.
_OF_THIS_PROCESS = ("/dev/stdin", "/dev/fd/", "/proc/self/")

_HELP = """usage: mirrored launch -n N [options] script.py args...   start N workers, and start them again after a failure
       mirrored check                                     is this machine, or cluster, ready for a first training?
       mirrored env                                       what a bug report needs: versions, devices, cluster
       mirrored report RUN                                one page about a run that has ended, or that goes on
       mirrored plan --topology v5e:16x16 train.py        compile a program for machines that are not here, and what it needs
       mirrored --version

  mirrored launch --help         the options
  mirrored launch -n 2 --cpu-devices 1 -m mirrored check
"""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line, with an example of a correct command."""

    right = "mirrored launch -n 2 train.py"

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}. Write for example: {self.right}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `mirrored`.

    Args:
        argv: the arguments; by default those of this process.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command, *rest = arguments or [""]
    _open_standard_streams()  # some may be closed, as by `mirrored env >&-`
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    if command == "launch":
        return _launch(rest)
    if command in ("check", "env", "plan", "report"):  # these need jax
        _show_all_characters()
        name = {"report": "._report.report", "plan": "._plan.command"}.get(command, f"._command.{command}")
        if command == "plan":
            _env.JAX_PLATFORMS.set_default("cpu")  # before JAX reads it: a plan needs no accelerator
        work = importlib.import_module(name, __package__).main
        return work(rest) if command == "check" else _until_nobody_reads(work, rest)
    if command in ("--version", "-h", "--help"):
        text = _HELP
        if command == "--version":
            text = f"mirrored {importlib.import_module(__package__ or 'mirrored').__version__}\n"
        return _until_nobody_reads(lambda _: sys.stdout.write(text) and 0, [])
    given = f"there is no command {describe(command)}" if command else "no command was given"
    sys.stderr.write(f"mirrored: {given}; there are launch, check, env, plan and report. Write for example: {_Parser.right}\n")
    return USAGE_ERROR


def _show_all_characters() -> None:
    """Escape characters that the output's encoding lacks, such as those in a path, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _until_nobody_reads(work: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """Run a command that prints; if its reader is gone, as in `mirrored env | head`, end like a process killed by SIGPIPE."""
    try:
        code = work(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "wb") as nowhere:  # Python itself writes once more at its end
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _launch(argv: Sequence[str]) -> int:
    options = _parse(argv)
    out = Outlet(1)
    errors = out if os.path.sameopenfile(1, 2) else Outlet(2)
    outlets = out, errors
    with Signals() as signals:
        try:
            return _run(options, outlets, signals)
        except OSError as error:
            _say(errors, f"cannot start the workers: {error}")
            return 1
        finally:
            for outlet in outlets:
                outlet.end()
            _flush(outlets, signals)


def _run(options: argparse.Namespace, outlets: tuple[Outlet, Outlet], signals: Signals) -> int:
    """Start the workers, restart them after each failure that allows it, and return the exit code."""
    inherited = dict(_env.current())
    if inherited.pop(_env.TF_CONFIG.name, ""):  # a worker would prefer it to JAX_*
        _say(outlets[1], f"not passed on to the workers, which get their cluster from here: {_env.TF_CONFIG.name}")
    budget, start, logs, used_ports = Budget(options.max_restarts), time.monotonic(), None, set[int]()
    for number in itertools.count():
        if options.log_dir:
            logs = _log_folder(options, number, outlets[1])
        address = options.coordinator or _free_address(used_ports)
        attempt = Group(
            options.command,
            [inherited | _variables(options, address, number, i) for i in range(options.n)],
            options.node_rank * options.n,
            options.nnodes * options.n,
            grace=options.grace,
            logs=logs,
            outlets=outlets,
            signals=signals,
        ).watch()
        code = attempt.exit_code()
        if code == 0 or not budget.allows(attempt):
            break
        _say(outlets[1], f"{describe_failure(attempt)}; starting all again ({budget})")
    where = escape(str(logs), 400) if logs else None
    for line in summarize(attempt, number, time.monotonic() - start, where):
        _say(outlets[1], line)
    return code


def _log_folder(options: argparse.Namespace, attempt: int, errors: Outlet) -> Path | None:
    """Make the log folder of an attempt; if that fails, print why and return None: training goes on without logs."""
    try:
        return make_log_folder(options.log_dir, attempt, f"-node-{options.node_rank}" * (options.nnodes > 1))
    except OSError as error:
        _say(errors, f"cannot keep the output of attempt {attempt} in {escape(str(options.log_dir), 400)}: {error.strerror}")
        return None


def _free_address(used: set[int]) -> str:
    """Return an address for worker 0, with a port that no earlier attempt used."""
    while True:
        try:
            host, port = LOOPBACK, _free_port(socket.AF_INET, LOOPBACK)
        except OSError:  # the host has only IPv6
            host, port = "::1", _free_port(socket.AF_INET6, "::1")
        if port not in used:
            used.add(port)
            return join_address(host, port)


def _free_port(family: socket.AddressFamily, host: str) -> int:
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        return sock.getsockname()[1]


def _variables(options: argparse.Namespace, address: str, attempt: int, i: int) -> dict[str, str]:
    """Return the environment variables that tell a worker its cluster and its devices."""
    variables = {
        _env.JAX_COORDINATOR_ADDRESS: address,
        _env.JAX_NUM_PROCESSES: options.n * options.nnodes,
        _env.JAX_PROCESS_ID: options.node_rank * options.n + i,
        _env.MIRRORED_ATTEMPT: attempt,
    }
    if options.cpu_devices:
        variables |= {_env.JAX_PLATFORMS: "cpu", _env.JAX_NUM_CPU_DEVICES: options.cpu_devices}
    elif options.n > 1 or options.gpus_per_worker:
        count = options.gpus_per_worker or 1
        variables[_env.MIRRORED_GPUS] = options.gpus_per_worker or 0
        variables[_env.JAX_LOCAL_DEVICE_IDS] = ",".join(str(gpu) for gpu in range(i * count, (i + 1) * count))
    return {variable.name: str(value) for variable, value in variables.items()}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; if it is wrong, print one line and exit with code 2."""
    parser = _Parser(
        "mirrored launch",
        usage="mirrored launch -n N [options] script.py args...\n       mirrored launch -n N [options] -m module args...",
        description="Start N workers on this host, pass on their output line by line, and start all of them again from their "
        "last checkpoint when one fails.",
        epilog="Exit codes: 75 and 143 (preempted, and saved): start again; 76: starting again would not help; 130: "
        "Ctrl-C; else the program's own. Several hosts: the same on each, with --nnodes, --node-rank and --coordinator.",
        allow_abbrev=False,
    )
    add, index = parser.add_argument, functools.partial(_number, least=0, most=10**9)
    takes_value = [
        add("-n", type=_number, default=1, metavar="N", help="workers on this host (1)"),
        add("--cpu-devices", type=_number, metavar="K", help="run on the CPU, with K devices in each worker"),
        add("--gpus-per-worker", type=_number, metavar="G", help="GPUs of each worker (1 when N > 1, else all)"),
        add("--nnodes", type=_number, default=1, metavar="M", help="hosts, each of which runs this command (1)"),
        add("--node-rank", type=index, metavar="I", help="which of them this is, from 0"),
        add("--coordinator", metavar="HOST:PORT", help="where worker 0 listens; needed for several hosts"),
        add("--max-restarts", type=index, default=0, metavar="R", help="restarts without a new checkpoint in between (0)"),
        add("--grace", type=_seconds, default=30.0, metavar="S", help="seconds that workers have to save and leave (30)"),
        add("--log-dir", type=Path, metavar="D", help="keep the output of each worker in D/attempt-0/worker-0.log"),
    ]
    names = {name for action in takes_value for name in action.option_strings}
    position = 0
    while position < len(argv) and argv[position].startswith("-") and argv[position] not in ("-m", "--"):
        position += 1 + (argv[position] in names)
    options = parser.parse_args(argv[:position])
    command = list(argv[position + (argv[position : position + 1] == ["--"]) :])
    try:
        _check(parser, options, command)
    except ClusterConfigError as error:
        parser.error(str(error))
    return options


def _check(parser: _Parser, options: argparse.Namespace, command: list[str]) -> None:
    if not command:
        parser.error("no script was given")
    if command == ["-m"]:
        parser.error("no module was given after -m")
    if command[0] != "-m":
        if not os.path.exists(command[0]):
            parser.error(f"there is no file {describe(command[0])}")
        is_readable = os.path.isfile(command[0]) or os.path.isdir(command[0])
        if not is_readable or os.path.abspath(command[0]).startswith(_OF_THIS_PROCESS):
            why = "each worker reads the program, and the workers' standard input is empty. Write it into a file"
            parser.error(f"{describe(command[0])} is no file that a worker could read: {why}")
        if command[0].startswith("-"):  # a file whose name Python would take for an option
            command[0] = os.path.join(".", command[0])
    options.command = command
    on_cpu = "JAX_PLATFORMS=cpu" * (_env.JAX_PLATFORMS.get() == "cpu")
    if options.cpu_devices:
        on_cpu = "--cpu-devices"
    if on_cpu and options.gpus_per_worker:
        parser.error(f"{on_cpu} and --gpus-per-worker were both given; a worker runs on the CPU or on GPUs")
    _check_gpus(parser, options)
    _check_nodes(parser, options)
    if options.log_dir:
        parser.right = "mirrored launch -n 2 --log-dir logs train.py"
        options.log_dir = options.log_dir.absolute()
        try:
            options.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"cannot make the folder {describe(str(options.log_dir))} of --log-dir: {error.strerror}")


def _check_gpus(parser: _Parser, options: argparse.Namespace) -> None:
    """Refuse more GPUs than exist, before JAX waits minutes for all workers' GPUs."""
    count, (num_gpus, where) = options.gpus_per_worker or 0, _find_gpus()
    if num_gpus is not None and options.n * count > num_gpus:
        parser.right = f"mirrored launch -n {max(num_gpus // count, 1)} --gpus-per-worker {min(count, num_gpus)} train.py"
        if not num_gpus:
            parser.right = f"mirrored launch -n {options.n} --cpu-devices 1 train.py"
        parser.error(f"-n {options.n} with --gpus-per-worker {count} needs {counted(options.n * count, 'GPU')}, and {where}")


def _find_gpus() -> tuple[int | None, str]:
    """Return the number of NVIDIA GPUs that workers can use, and the source of that number; None if nothing tells it."""
    if (count := _env.named_gpus()) is not None:
        return count, f"CUDA_VISIBLE_DEVICES, which is {describe(_env.CUDA_VISIBLE_DEVICES.get())}, has {count}"
    count = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in os.listdir("/dev"))
    return count or None, f"this host has {count}"


def _check_nodes(parser: _Parser, options: argparse.Namespace) -> None:
    parser.right = "mirrored launch -n 4 --nnodes 2 --node-rank 0 --coordinator 10.0.0.1:9000 train.py"
    if options.nnodes > 1 and options.coordinator is None:
        parser.error("--nnodes needs --coordinator, where worker 0 listens: an address of the host with --node-rank 0")
    if options.nnodes > 1 and options.node_rank is None:
        parser.error(f"--nnodes needs --node-rank: 0 on the first host, {options.nnodes - 1} on the last")
    options.node_rank = options.node_rank or 0
    if options.node_rank >= options.nnodes:
        right = "0" if options.nnodes == 1 else f"0 to {options.nnodes - 1}"
        parser.error(f"--node-rank is {options.node_rank}; with --nnodes {options.nnodes} give {right}")
    if options.n * options.nnodes > MAX_WORKERS:
        parser.error(f"-n {options.n} on {options.nnodes} hosts are more than {MAX_WORKERS} workers")
    if options.coordinator is not None:
        options.coordinator = check_address("--coordinator", options.coordinator)


def _number(text: str, least: int = 1, most: int = MAX_WORKERS) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text[:10]) <= most:
        raise argparse.ArgumentTypeError(f"{describe(text)} is no whole number from {least} to {most}")
    return int(text)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if math.isfinite(seconds := float(text)) and 0 <= seconds <= 1e6:
            return seconds
    raise argparse.ArgumentTypeError(f"{describe(text)} is no number of seconds")


def _open_standard_streams() -> None:
    """Open closed standard streams, so that no worker's pipe gets one of their numbers."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)


def _say(outlet: Outlet, text: str) -> None:
    outlet.write(f"mirrored launch: {text}\n".encode(errors="backslashreplace"))


def _flush(outlets: Sequence[Outlet], signals: Signals) -> None:
    """Write the rest of the output; after another signal, only as much as its reader takes at once."""
    known = len(signals.received)
    while any(outlet.is_waiting for outlet in outlets):
        is_patient = known < 2 and len(signals.received) == known
        seconds = None if is_patient else 0
        if not signals.wait(outlets, [], seconds) and not is_patient:
            break
