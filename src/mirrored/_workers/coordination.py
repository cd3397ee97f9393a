"""How workers tell each other small things: the coordination service of `jax.distributed`, which every cluster has.

Messages are JSON and go through the service's key-value store, not through collectives: a barrier takes a fifth of
the time of one on the devices, and works while the devices are busy or stuck. No jax here.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from .._errors import ProgramMismatchError, WorkerLostError
from .progress import OTHERS_INPUT

#: How long one call into the service may block: a thread inside one cannot be stopped, and must not outlive the program.
SLICE_SECONDS = 0.25
#: Characters that a worker may give to the others at once. With 60 million, the service was so busy that it heard no heartbeats.
MAX_TEXT = 16 * 1024 * 1024
_MAX_SHOWN = 200
_ROOT = "mirrored/"
_SAME = "same"


def digest(text: str) -> str:
    """Return a short text that is equal for equal texts only."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def decoded(text: str, worker: int, where: str) -> Any:
    """Return the JSON value in a text of a worker; refuse a text that has none, is too long or nested too deeply."""
    try:
        if len(text) <= MAX_TEXT:
            return json.loads(text)
        what = f"more than {MAX_TEXT} characters"
    except (ValueError, RecursionError):
        what = repr(text[:_MAX_SHOWN])
    raise ProgramMismatchError(
        f"worker {worker} has given {what} to the other workers at {where!r}; expected JSON of at most {MAX_TEXT} characters. "
        "Every worker must run the same version of the program; a checkpoint may not name so many things, and the position of an "
        "iterator may not be so long."
    )


class Coordination:
    """This worker's connection to the others of its cluster, for messages and barriers; one worker talks to itself."""

    def __init__(self, client: Any = None, worker: int = 0, num_workers: int = 1) -> None:
        assert client is not None or num_workers == 1
        self.worker, self.num_workers = worker, num_workers
        self.others = frozenset(range(num_workers)) - {worker}
        self._client = client
        self._channels: dict[str, Channel] = {}
        self._num_told: dict[str, int] = {}
        self._num_opened = 0
        #: Thread -> the keys of its channels that are closed here; other workers may still read them.
        self._closed: dict[int, list[str]] = {}

    def put(self, key: str, text: str) -> None:
        """Set a key, which may have a value already."""
        if self._client is not None:
            self._client.key_value_set(_ROOT + key, text, allow_overwrite=True)

    def say(self, prefix: str, text: str = "1") -> None:
        """Set this worker's text under `prefix`, for `by_worker`."""
        self.put(f"{prefix}/{self.worker}", text)

    def get(self, key: str, timeout_seconds: float) -> str | None:
        """Wait for a key to be set, and return its value; None at the timeout, or for one worker."""
        milliseconds = max(1, int(timeout_seconds * 1000))
        return self._ask("DEADLINE_EXCEEDED", lambda client: client.blocking_key_value_get(_ROOT + key, milliseconds))

    def peek(self, key: str) -> str | None:
        """Return the value of a key, None if it is not set; never wait."""
        return self._ask("NOT_FOUND", lambda client: client.key_value_try_get(_ROOT + key))

    def _ask(self, absent: str, call: Callable[[Any], str]) -> str | None:
        """Return a value of the service; None without a service (one worker), or if the error's text has `absent`."""
        if self._client is None:
            return None
        try:
            return call(self._client)
        except Exception as error:  # jaxlib's errors have no classes of their own
            if absent in str(error):
                return None
            raise

    def find(self, prefix: str) -> dict[str, str]:
        """Return the keys that begin with `prefix`, which ends in a slash, and their values."""
        if self._client is None:
            return {}
        assert prefix.endswith("/")
        return {key.removeprefix(_ROOT): value for key, value in self._client.key_value_dir_get(_ROOT + prefix)}

    def by_worker(self, prefix: str) -> dict[int, str]:
        """Return the texts that workers have set under `prefix` by `say`."""
        found = self.find(f"{prefix}/")
        return {worker: found[key] for worker in range(self.num_workers) if (key := f"{prefix}/{worker}") in found}

    def of_all(self, prefix: str) -> Sequence[str]:
        """Return every worker's text under `prefix`; "" of a worker that has set none."""
        found = self.by_worker(prefix)
        return [found.get(worker, "") for worker in range(self.num_workers)]

    def await_workers(self, prefix: str, workers: Set[int], deadline: float) -> dict[int, str]:
        """Wait until all `workers` have set a text, or until `deadline` (`time.monotonic`); return `by_worker`."""
        while not workers <= (found := self.by_worker(prefix)).keys() and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def delete(self, key: str) -> None:
        """Remove a key, and all keys that begin with it and a slash."""
        if self._client is not None:
            self._client.key_value_delete(_ROOT + key)

    def await_gone(self, workers: Iterable[int]) -> None:
        """Wait until each of these workers has disconnected, or its heartbeats have ceased."""
        if self._client is not None:
            self._client.get_live_nodes(sorted((self.worker, *workers)))  # whoever lives has to ask too: no other worker does

    def count(self, key: str) -> int:
        """Add one to the workers' common number under a key, and return it."""
        return 1 if self._client is None else self._client.key_value_increment(_ROOT + key, 1)

    def exchange(self, channel: str, value: Any, timeout_seconds: float = math.inf) -> Sequence[Any]:
        """Give a JSON value to all workers, and return the values of all in order. All must call it equally often for a channel.

        Equal values take two messages a worker; if values differ, each worker reads all of them.

        Raises:
            WorkerLostError: when a worker has not come after `timeout_seconds`.
            ProgramMismatchError: when a worker's text is no JSON, or too long; the message names the worker.
        """
        if channel not in self._channels:
            self._channels[channel] = Channel(self, f"exchange/{channel}")
        return self._channels[channel].exchange(value, timeout_seconds)

    def of_chief(self, name: str, value: Any) -> Any:
        """Return worker 0's JSON value; all call it equally often for a name, and come to an exchange between two calls."""
        number = self._num_told.get(name, 0)
        self._num_told[name] = number + 1
        if self.worker == 0:
            self.put(f"chief/{name}/{number}", json.dumps(value))
            if number:
                self.delete(f"chief/{name}/{number - 1}")  # read by all, who have come to an exchange since
            return value
        while (text := self.get(f"chief/{name}/{number}", SLICE_SECONDS)) is None:
            pass  # for ever: the guard ends a program that is stuck
        return decoded(text, 0, name)

    def tell_chief(self, name: str, value: Any) -> None:
        """Give worker 0 a JSON value, in one message. An exchange must follow, after which worker 0 calls `for_chief`."""
        self.say(f"for_chief/{name}", json.dumps(value))

    def for_chief(self, name: str, value: Any) -> Sequence[Any]:
        """Return, on worker 0, the last value that each worker gave to `tell_chief`; on another worker its own value."""
        if self.worker or self.num_workers == 1:
            return [value]
        return [decoded(text, worker, name) for worker, text in self.by_worker(f"for_chief/{name}").items()]

    def channel(self, name: str) -> Channel:
        """Open a channel for another thread; the n-th channel of a worker is connected to the n-th of all others."""
        number = self._num_opened
        self._num_opened += 1
        return Channel(self, f"exchange/{name}:{number}", number, self._closed.pop(threading.get_ident(), ()))

    def barrier(self, name: str, value: Any = None) -> Sequence[Any]:
        """Wait until every worker has come to a barrier of this name, and return the JSON values that they give with it."""
        given = self.exchange("barrier", [name, value])
        pairs = [pair if isinstance(pair, list) and len(pair) == 2 else (pair, None) for pair in given]
        names, values = zip(*pairs, strict=True)
        if any(barrier != name for barrier in names):
            listed = ", ".join(f"worker {index} {str(barrier)[:_MAX_SHOWN]!r}" for index, barrier in enumerate(names))
            raise WorkerLostError(f"the workers are at different barriers: {listed}. Every worker must call the same ones.")
        return values


class Channel:
    """Exchanges of values with all workers, one after the other.

    Each worker counts itself under the digest of its value, and waits for one key. The last worker under one common digest sets
    the key to "same". The first worker under a second digest sets it to "different": then each worker gives its value, counts
    itself once more, and reads all values. After a round in which values differed, the next one begins with the values.
    """

    def __init__(self, coordination: Coordination, prefix: str, number: int = -1, closed_before: Sequence[str] = ()) -> None:
        self._coordination, self._prefix = coordination, prefix
        self.number = number  # of the opened channel, the same on all workers; -1 of a named one
        self._opened_by, self._closed_before = threading.get_ident(), tuple(closed_before)
        self._round, self._are_same = 0, True
        #: Place in this round -> the digest under which this worker is counted: an interrupted exchange may be made again.
        self._counted: dict[str, str] = {}
        self._is_last = False  # whether this worker was the last to come to the place
        self._num_passes = 0
        self._closed = threading.Event()
        self._is_waiting = False

    def exchange(self, value: Any, timeout_seconds: float = math.inf) -> Sequence[Any]:
        """See `Coordination.exchange`."""
        this = self._coordination
        text = json.dumps(value)
        if this.num_workers == 1:
            return [json.loads(text)]
        deadline = time.monotonic() + timeout_seconds
        self._is_waiting = True
        if self._are_same and self._all_have("same", digest(text), deadline):
            values = [json.loads(text)] * this.num_workers
            self._end_round()
        else:
            texts = self._texts(text, deadline)
            self._are_same = len(set(texts)) == 1
            values = [decoded(text, worker, self._name) for worker, text in enumerate(texts)]
        self._is_waiting = False
        return values

    def next_pass(self) -> int:
        """Return the number of a new pass over the data, from 0 on."""
        self._num_passes += 1
        return self._num_passes - 1

    def describe(self) -> str:
        """Say for the guard whether the channel's thread waits in an exchange."""
        return OTHERS_INPUT if self._is_waiting else "its own pipeline works on it"

    def close(self) -> None:
        """End the exchange that a thread is waiting in: it raises `ChannelClosed`."""
        if not self._closed.is_set():
            self._closed.set()  # at any line: garbage collection closes too
            self._coordination._closed.setdefault(self._opened_by, []).extend((*self._closed_before, self._prefix))

    @property
    def _name(self) -> str:
        return self._prefix.removeprefix("exchange/")

    def _all_have(self, place: str, key: str, deadline: float) -> bool:
        """Wait at a place of this round; tell whether all workers come there with one digest. False at the first other digest."""
        this, here = self._coordination, f"{self._prefix}/{self._round}/{place}"
        count = 0
        if place not in self._counted:
            count = this.count(f"{here}/{key}")
            self._counted[place] = key
        self._is_last = count == this.num_workers
        if self._is_last:
            this.put(f"{here}-are", _SAME)
            return True
        if self._counted[place] != key or (count == 1 and len(this.find(f"{here}/")) > 1):
            this.put(f"{here}-are", "different")
        return self._await(f"{here}-are", deadline) == _SAME

    def _texts(self, text: str, deadline: float) -> Sequence[str]:
        """Return the texts of all workers."""
        this, here = self._coordination, f"{self._prefix}/{self._round}/given"
        this.say(here, text[: MAX_TEXT + 1])  # of a text that is too long, enough for all to see that it is
        self._all_have("givers", "all", deadline)
        texts = this.of_all(here)
        self._end_round()
        return texts

    def _end_round(self) -> None:
        """Go on to the next round; the last worker to come to this round knows that all have read the one before."""
        this = self._coordination
        if self._is_last and self._round:
            this.delete(f"{self._prefix}/{self._round - 1}")
        for prefix in self._closed_before:  # all workers have opened this channel, so they have closed these
            this.delete(prefix)
        self._closed_before = ()
        self._round += 1
        self._counted = {}

    def _await(self, key: str, deadline: float) -> str:
        while not self._closed.is_set():
            text = self._coordination.get(key, min(SLICE_SECONDS, deadline - time.monotonic()))
            if text is not None:
                return text
            if time.monotonic() >= deadline:
                raise WorkerLostError(
                    f"not all workers have come to {self._name!r}, where worker {self._coordination.worker} waits for them. "
                    "Every worker must run the same program."
                )
        raise ChannelClosed


class ChannelClosed(Exception):
    """This worker does not want to wait any longer. Users never see it."""
