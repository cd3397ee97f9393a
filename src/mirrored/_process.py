"""The state of the process: what belongs to no strategy. docs/design/state.md says who changes it, and under which lock.

Whoever changes one changes it here, as an attribute of this module or of the object in it. A forked child and a test that wants a
process as new begin here, too.
"""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

# -- where the program is: each thread, and each asynchronous task, has its own

#: The innermost scope, step or trace (`_replicas/frames.Frame`).
frame: contextvars.ContextVar[Any] = contextvars.ContextVar("mirrored_frame", default=None)
#: Whether a Keras optimizer, which has summed its gradients, writes variables.
is_keras_update: contextvars.ContextVar[bool] = contextvars.ContextVar("mirrored_keras_update", default=False)

# -- programs in flight (`_replicas/in_flight`)

#: Guards the two queues where they are shortened.
in_flight_lock = threading.Lock()
#: Results of programs of this process alone, and of those in which other workers take part, each with its check.
in_flight: collections.deque[Any] = collections.deque()
joint_in_flight: collections.deque[tuple[Any, Callable[[Any], None] | None]] = collections.deque()
#: Whether this process was forked from one in which JAX ran: then the threads that carry out programs are not here.
is_forked = False

# -- what is replaced in other libraries

#: Guards the next three: what is in Keras and Equinox in place of which method, in how many blocks, and the strategies' models.
replaced_lock = threading.RLock()
replaced: dict[tuple[type, str], tuple[Callable[..., Any], Any]] = {}
num_replacing = 0
#: The devices of each Keras model that was made in a strategy's scope, or runs on a strategy.
keras_models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
#: Guards the next two: JAX's collectives while uneven steps are traced, and how many are.
lax_lock = threading.Lock()
lax_originals: dict[str, Callable[..., Any]] = {}
num_step_traces = 0

# -- what a report tells


@dataclasses.dataclass
class Waited:
    """Seconds that this process's threads have waited.

    Attributes:
        input: for the next batch of a distributed dataset.
        devices: for programs in flight, where their number is bounded.
    """

    input: float = 0.0
    devices: float = 0.0


waited = Waited()
#: What the user was warned of, and how often; the oldest go first.
warned: collections.OrderedDict[str, int] = collections.OrderedDict()
#: Of the last profile in which programs of a mesh ran.
last_profiles: dict[Any, Any] = {}
#: The times of all strategies (`_replicas/spent.Spent`), and the strategies.
times: weakref.WeakSet[Any] = weakref.WeakSet()
strategies: weakref.WeakSet[Any] = weakref.WeakSet()
#: Whether a worker that trains by itself was told so.
has_warned_of_workers = False

# -- what JAX and tracebacks are told

#: Numbers of separate sets of JAX's caches.
cache_numbers = itertools.count()
#: Folders whose code is not the user's: ours, JAX's, those of libraries that we know (`_jax/user_code`).
library_folders: tuple[str, ...] = ()


def _renew_locks() -> None:
    """Make the locks anew in a forked child, where the thread that holds one is not."""
    global in_flight_lock, replaced_lock, lax_lock
    in_flight_lock, replaced_lock, lax_lock = threading.Lock(), threading.RLock(), threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
