"""What `jax.distributed` does not offer: its client, where gloo listens, whether a backend runs, who waits for devices."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.lib import _jax
from jax.extend.backend import clear_backends as clear_backends

#: Tell whether JAX has a backend, or several, of this name, such as "tpu" or "gpu".
is_known_platform: Callable[[str], bool] = _xla_bridge.is_known_platform
#: What JAX says when one of these names has not come.
_LATE_DEVICES = re.compile(r"timed out with key: [a-z]+:local_topology/[a-z]+/(\d+) and duration: (\w+)")


def client() -> Any:
    """Return the client of the coordination service."""
    return _distributed.global_state.client


def place() -> tuple[int, int]:
    """Return the index of this process and the number of processes, as `jax.distributed` was told."""
    state = _distributed.global_state
    return int(state.process_id or 0), int(state.num_processes or 1)


def before_shutdown(do: Callable[[], object]) -> None:
    """Let something be done first by JAX's shutdown, which comes at the end of the program, or where the program calls it."""
    state, shutdown = _distributed.global_state, _distributed.global_state.shutdown

    def end() -> None:
        if state.client is not None:
            do()
        shutdown()

    state.shutdown = end


def is_recoverable() -> bool:
    """Tell whether JAX leaves a job alone when one of its workers is gone; then its shutdown waits for no other worker."""
    return bool(jax.config.jax_enable_recoverability)  # pyrefly: ignore[missing-attribute]


def swallows_sigterm() -> bool:
    """Tell whether JAX's preemption service runs, which keeps SIGTERM for itself."""
    return _distributed.global_state.preemption_sync_manager is not None


def has_backend() -> bool:
    """Tell whether JAX has started a backend, after which a process can join no cluster."""
    return _xla_bridge.backends_are_initialized()


# -- devices


def known_devices() -> Iterator[tuple[str, frozenset[int]]]:
    """Yield each platform that has started somewhere, and the workers whose devices all others know."""
    for platform in sorted(_xla_bridge.known_platforms()):  # the names under which JAX's backends tell each other
        keys = client().key_value_dir_get_bytes(f"{platform}:local_topology/{platform}/")
        known = frozenset(int(index) for key, _ in keys if (index := key.rpartition("/")[2]).isdecimal())
        if known:
            yield platform, known


class LateDevices(NamedTuple):
    """The worker whose devices have not come, and JAX's limit for it, such as `2m`."""

    worker: str
    limit: str


def late_devices(error: BaseException) -> LateDevices | None:
    """Return of whom an error of JAX's start says that its devices have not come, if it says that."""
    found = _LATE_DEVICES.search(str(error))
    return None if found is None else LateDevices(found[1], found[2])


# -- collectives of CPU devices


def choose_cpu_collectives(name: str) -> None:
    """Tell JAX which collectives the CPU devices of several processes use, gloo or mpi; it asks when the backend starts."""
    jax.config.update("jax_cpu_collectives_implementation", name)
    if name == "mpi":
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # MPI wants one thread


def listen_at(host: str | None) -> None:
    """Let gloo listen where the other workers reach this one: its default, what the host's name resolves to, is often not."""
    if host is None or _cpu_collectives() != "gloo":
        return

    def make() -> object:
        return _xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(distributed_client=client(), hostname=host))

    _xla_bridge.register_backend_factory("cpu", functools.partial(make), priority=0, fail_quietly=False)


def _cpu_collectives() -> str:
    return str(jax.config.jax_cpu_collectives_implementation)  # pyrefly: ignore[missing-attribute]
