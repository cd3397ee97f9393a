"""A coordination service in one process: what Coordination needs of jaxlib's client, for tests with threads as workers."""

import collections
import threading
import time
from typing import Any


class FakeClient:
    """Keep keys and values as the service does, with its errors; count the calls of each method, which fail for a `reason`."""

    def __init__(self) -> None:
        self.counted: collections.Counter[str] = collections.Counter()
        self.reason = ""
        self.values: dict[str, str] = {}
        self.dead: set[int] = set()
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        deadline = time.monotonic() + timeout_ms / 1000
        with self._changed:
            while key not in self.values:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.values[key]

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            if key not in self.values:
                raise RuntimeError(f"NOT_FOUND: key not found. Key: {key}")
            return self.values[key]

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        with self._changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for known in [known for known in self.values if known == key or known.startswith(f"{key}/")]:
                del self.values[known]

    def key_value_increment(self, key: str, increment: int) -> int:
        with self._changed:
            value = int(self.values.get(key, "0")) + increment
            self.values[key] = str(value)
            return value

    def get_live_nodes(self, workers: list[int]) -> dict[int, int]:
        """Wait until all but one of these workers have died: no other worker asks."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.dead.intersection(workers)) >= len(workers) - 1)
        return {worker: 1 for worker in workers if worker not in self.dead}

    def die(self, *workers: int) -> None:
        """Let workers die, of whom nobody is told."""
        with self._changed:
            self.dead.update(workers)
            self._changed.notify_all()

    def __getattribute__(self, name: str) -> Any:
        if "key_value" in name:
            self.counted[name] += 1
            if self.reason:
                raise RuntimeError(self.reason)
        return super().__getattribute__(name)
