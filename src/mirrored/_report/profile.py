"""Profiles steps with JAX's profiler, for TensorBoard and Perfetto; each run of a program appears there by name."""

from __future__ import annotations

import collections
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from .._errors import ContextError
from .._process import last_profiles
from .._program import program
from .._replicas import frames
from .._replicas.mesh import ReplicaMesh
from .._replicas.spent import COMPUTATION, DeviceTime, forget_pause
from .._strategy.strategy import coordination_of, joint_strategy
from .._text import shown
from .._variables.access import lent
from .._variables.variable import live_variables
from . import traced


@contextlib.contextmanager
def profile(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Record the devices and Python inside this block, with `jax.profiler`.

    Each run of a step or an `mr.function` is one step of the profile, labelled with your function's name and a number. The
    block waits for all programs in flight. Record a few steps, not the first, which compiles, nor a whole training.

    Afterwards `strategy.explain()` and `mr.report` show which shares of the devices' time are computation and communication.

    Args:
        folder: the profile's folder; with several workers, each writes into its own subfolder `worker_<i>`. TensorBoard with
            its profile plugin shows it, and so does xprof: `tensorboard --logdir FOLDER`.

    Returns:
        This worker's folder.

    Raises:
        TypeError: when the folder is no path.
        RuntimeError: when another profile is being recorded; a ContextError inside a step or an `mr.function`.

    >>> import tempfile
    >>> def train_step(x):
    ...     return x + 1
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with mr.profile(folder) as path:
    ...         for _ in range(3):
    ...             _ = strategy.run(train_step, args=(np.ones(2),))
    ...     len(list(path.rglob("*.xplane.pb")))
    1
    >>> "3 steps" in (line := strategy.explain().splitlines()[-1]), line.partition(": ")[2]
    (True, '100% computation, 0% communication')

    Source: https://docs.jax.dev/en/latest/profiling.html
    """
    if not isinstance(folder, str | os.PathLike) or isinstance(os.fspath(folder), bytes) or not os.fspath(folder):
        raise TypeError(f"mr.profile got {shown(folder)}; expected a folder to write into: with mr.profile('profiles'):")
    if frames.is_traced():
        raise ContextError(
            "mr.profile was called inside a step or an mr.function, which is traced once and then run many times. Write "
            "`with mr.profile(folder):` around the loop that runs it."
        )
    if program.annotate is not None:
        raise RuntimeError("mr.profile: a profile is being recorded already, and JAX records one at a time. End that one first.")
    path = Path(folder)
    if (joint := joint_strategy()) is not None:
        path = path / f"worker_{coordination_of(joint).worker}"  # else workers of one host would write into one file
    numbers: collections.Counter[str] = collections.Counter()
    ran: dict[ReplicaMesh, list[program.Program]] = {}
    results: dict[ReplicaMesh, list[Any]] = {}  # of the last program with results: devices run one program after another

    def step(running: program.Program) -> Callable[[list[Any]], None]:
        ran.setdefault(running.mesh, []).append(running)
        numbers[running.name] += 1
        mark = jax.profiler.StepTraceAnnotation(running.name, step_num=numbers[running.name] - 1)
        mark.__enter__()

        def end(made: list[Any]) -> None:
            mark.__exit__(None, None, None)
            results[running.mesh] = list(made) or results.get(running.mesh, [])  # a run changes its list

        return end

    jax.profiler.start_trace(path)
    forget_pause()
    program.annotate = step
    try:
        yield path
        for mesh in ran:
            with lent(live_variables(mesh)) as arrays:
                jax.block_until_ready([arrays, [made for made in results.get(mesh, []) if not made.is_deleted()]])
    finally:
        program.annotate = None
        jax.profiler.stop_trace()
    for mesh, programs in ran.items():
        last_profiles[mesh] = _device_time(path, os.fspath(folder), mesh, programs)
    forget_pause()


def _device_time(path: Path, folder: str, mesh: ReplicaMesh, programs: list[program.Program]) -> DeviceTime:
    """Read the time of this process's devices of a mesh from the profile that was just written."""
    own = [traced.number_of(device) for device in mesh.local_devices]
    try:
        traces = sorted(path.rglob("*.xplane.pb"), key=lambda trace: trace.stat().st_mtime_ns)
        if not traces:
            raise ValueError("JAX's profiler wrote no trace")
        seconds = traced.seconds_of(traces[-1], own)
        if set(seconds) == {COMPUTATION} and any(map(program.collectives_of, programs)):
            raise ValueError("the trace names no collective, although the programs have some")
    except (OSError, ValueError) as error:
        return DeviceTime(folder, time.time(), len(programs), len(own), {}, str(error))
    if mesh.mesh.devices.size == 1:  # a sum over one replica communicates nothing, whatever its kind says
        seconds = {COMPUTATION: sum(seconds.values())}
    return DeviceTime(folder, time.time(), len(programs), len(own), seconds)
