"""Adds what `jax.distributed` lacks: its client, gloo's address, whether a backend runs, which devices are missing."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import _jax, utils
from jax.extend.backend import clear_backends as clear_backends

from .. import _env

#: Tell whether JAX has a backend, or several, with this name, such as "tpu" or "gpu".
is_known_platform: Callable[[str], bool] = _xla_bridge.is_known_platform
#: JAX's error when a worker's devices are missing.
_LATE_DEVICES = re.compile(r"timed out with key: [a-z]+:local_topology/[a-z]+/(\d+) and duration: (\w+)")


def client() -> Any:
    """Return the client of JAX's coordination service."""
    return _distributed.global_state.client


def place() -> tuple[int, int]:
    """Return this process's index and the number of processes, as passed to `jax.distributed`."""
    state = _distributed.global_state
    return int(state.process_id or 0), int(state.num_processes or 1)


def before_shutdown(do: Callable[[], object]) -> None:
    """Let JAX's shutdown, which the program or its end calls, first call `do`."""
    state, shutdown = _distributed.global_state, _distributed.global_state.shutdown

    def end() -> None:
        if state.client is not None:
            do()
        shutdown()

    state.shutdown = end


def is_recoverable() -> bool:
    """Tell whether JAX leaves a job alone when one of its workers is gone; then its shutdown waits for no other worker."""
    return bool(jax.config.jax_enable_recoverability)  # pyrefly: ignore[missing-attribute]


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Leave XLA's warnings out for a block, unless the user has chosen what is shown: one speaks of an "experimental" feature."""
    is_by_default = _env.XLA_LOG_LEVEL.get() in (None, "1") and jax.config.jax_logging_level in (None, "NOTSET")
    if is_by_default:
        utils.absl_set_min_log_level(2)
    try:
        yield
    finally:
        if is_by_default:
            utils.absl_set_min_log_level(1)


def swallows_sigterm() -> bool:
    """Tell whether JAX's preemption service runs: it keeps SIGTERM for itself."""
    return _distributed.global_state.preemption_sync_manager is not None


def has_backend() -> bool:
    """Tell whether JAX has started a backend: then this process cannot join a cluster any more."""
    return _xla_bridge.backends_are_initialized()


# -- devices


def known_devices() -> Iterator[tuple[str, frozenset[int]]]:
    """Yield each platform that some worker has started, and the workers whose devices are known to all."""
    for platform in sorted(_xla_bridge.known_platforms()):  # JAX's backends exchange devices under these names
        keys = client().key_value_dir_get_bytes(f"{platform}:local_topology/{platform}/")
        known = frozenset(int(index) for key, _ in keys if (index := key.rpartition("/")[2]).isdecimal())
        if known:
            yield platform, known


class LateDevices(NamedTuple):
    """A worker whose devices are missing, and how long JAX waited for them, such as `2m`."""

    worker: str
    limit: str


def late_devices(error: BaseException) -> LateDevices | None:
    """Return which worker's devices are missing, from JAX's timeout; None for any other error."""
    found = _LATE_DEVICES.search(str(error))
    return None if found is None else LateDevices(found[1], found[2])


# -- collectives of CPU devices


def choose_cpu_collectives(name: str) -> None:
    """Choose gloo or mpi for the collectives of several processes' CPU devices; JAX reads this when the backend starts."""
    jax.config.update("jax_cpu_collectives_implementation", name)
    if name == "mpi":
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # MPI needs one thread


def listen_at(host: str | None) -> None:
    """Let gloo listen where other workers reach this one; its default, the address of the host's name, is often another."""
    if host is None or _cpu_collectives() != "gloo":
        return

    def make() -> object:
        return _xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client(), hostname=host))

    _xla_bridge.register_backend_factory("cpu", functools.partial(make), priority=0, fail_quietly=False)


def _cpu_collectives() -> str:
    return str(jax.config.jax_cpu_collectives_implementation)  # pyrefly: ignore[missing-attribute]
