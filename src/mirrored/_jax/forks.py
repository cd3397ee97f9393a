"""Lets a forked child end without JAX's work at the end of a process, which belongs to its parent."""

from __future__ import annotations

import atexit
import ctypes

from jax._src import api as _api
from jax._src import dispatch as _dispatch
from jax._src import distributed as _distributed
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir


def leave_to_parent() -> None:
    """Let a child, forked from a process in which JAX runs, end without closing JAX's objects.

    JAX's atexit functions, and the destructors of these objects, would close the parent's connections to the other workers, and
    wait for threads that the child does not have.
    """
    state = _distributed.global_state
    if state.client is None and not _xla_bridge.backends_are_initialized():
        return  # the child may start JAX for itself
    atexit.unregister(_api.clean_up)
    atexit.unregister(_dispatch.wait_for_tokens)
    backends = vars(_xla_bridge)["_backends"].values()  # JAX's function for them takes a lock that may be held for ever
    for held in (state.client, state.service, state.preemption_sync_manager, _mlir.global_thread_pool, *backends):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))  # so that it is never destroyed
