"""The state of the process, which belongs to no strategy. The page on state says who changes it, and under which lock."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import itertools
import os
import weakref
from _thread import RLock
from collections.abc import Callable, Hashable, Sequence
from typing import Any

# -- locks


class Lock(RLock):  # pyrefly: ignore[invalid-inheritance]  # CPython allows it
    """A reentrant lock for `with`, which a Ctrl-C at any moment leaves free; all our locks are of this kind.

    Python looks for signals after each call of a C function, and Python 3.14 also after that of a lock's `__enter__`: then the
    block does not begin, and the lock is held for ever. Python does not look after an operator, nor when its own function ends.

    Attributes:
        taking: `True in lock.taking` takes the lock, and its block begins by the following `try`.
    """

    __slots__ = ("taking",)

    def __init__(self) -> None:
        self.taking = map(self.acquire, itertools.repeat(True))

    def __enter__(self) -> bool:  # pyrefly: ignore[bad-override]
        return True in self.taking


# -- where the program is, for each thread and each asynchronous task

#: The innermost scope, step or trace (`_replicas/frames.Frame`).
frame: contextvars.ContextVar[Any] = contextvars.ContextVar("mirrored_frame", default=None)
#: Whether the optimizer of a model library is writing variables: then its gradients are already summed.
is_library_update: contextvars.ContextVar[bool] = contextvars.ContextVar("mirrored_library_update", default=False)

# -- the command `mirrored plan`

#: The devices of strategies that name none, and how often a planned program is called; None: this machine's, without limit.
topology: tuple[Any, ...] | None = None
#: The command's planned meshes (`_replicas/mesh.PlannedMesh`), kept even if their strategies are gone.
planned_meshes: list[Any] = []
max_planned_calls: int | None = None


@dataclasses.dataclass
class WhatIf:
    """The changes that the command makes to a planned program, and what it learns of the program.

    Attributes:
        rows: the rows of each replica in every batch; 0: those of the dataset.
        parts: the number of parts, one after the other, in which a device takes its rows.
        shard_state: whether each `mr.Optimizer` divides its state.
        storage: the `Storage` of all strategies; None: their own.
        given_rows: the largest number of rows of a replica in the dataset's last batch.
    """

    rows: int = 0
    parts: int = 1
    shard_state: bool = False
    storage: Any = None
    given_rows: int = 0


what_if = WhatIf()

# -- programs in flight (`_replicas/in_flight`)

#: Guards removals from the two queues.
in_flight_lock = Lock()
#: Results of this process's own programs, and of programs that several workers run, each of these with its check.
in_flight: collections.deque[Any] = collections.deque()
joint_in_flight: collections.deque[tuple[Any, Callable[[Any], None] | None]] = collections.deque()
#: Whether this process was forked from one in which JAX ran: then it lacks the threads that run programs.
is_forked = False
#: Mesh and content, or mesh and `id` of an array of JAX's, that programs close over -> its copy on each device.
constants: weakref.WeakValueDictionary[Hashable, Any] = weakref.WeakValueDictionary()

# -- model libraries

#: All of them (`_models/library.Library`), once `_models/libraries` is imported.
libraries: Sequence[Any] = ()
#: Guards the next three: the libraries' replaced methods, how many blocks need them, and the strategies' models.
replaced_lock = Lock()
replaced: dict[tuple[type, str], tuple[Callable[..., Any], Any]] = {}
num_replacing = 0
#: Model with its own training loop, made in a strategy's scope or run on a strategy -> its devices.
library_models: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
#: Guards the next two: the places of JAX's functions that are replaced while steps are traced, and how many traces run.
lax_lock = Lock()
lax_replaced: list[tuple[Any, str, Callable[..., Any]]] = []
num_step_traces = 0

# -- facts for reports


@dataclasses.dataclass
class Waited:
    """The seconds that this process's threads have waited.

    Attributes:
        input: for the next batch of a distributed dataset.
        devices: for programs in flight, if their number is bounded.
    """

    input: float = 0.0
    devices: float = 0.0


waited = Waited()
#: Warning -> how often it came; the oldest are dropped first.
warned: collections.OrderedDict[str, int] = collections.OrderedDict()
#: Mesh -> its devices' time in the last profile of its programs.
last_profiles: dict[Any, Any] = {}
#: The step times of all strategies (`_replicas/spent.Spent`), and the strategies.
times: weakref.WeakSet[Any] = weakref.WeakSet()
strategies: weakref.WeakSet[Any] = weakref.WeakSet()
#: Whether this worker was warned that it trains alone.
has_warned_of_workers = False

# -- for JAX and tracebacks

#: Numbers for separate sets of JAX's caches.
cache_numbers = itertools.count()
#: Folders of code that is not the user's: ours, JAX's, and known libraries' (`_jax/user_code`).
library_folders: tuple[str, ...] = ()


def _renew_locks() -> None:
    """Make new locks in a forked child: a thread of the parent may hold an old one for ever."""
    global in_flight_lock, replaced_lock, lax_lock
    in_flight_lock, replaced_lock, lax_lock = Lock(), Lock(), Lock()


os.register_at_fork(after_in_child=_renew_locks)
