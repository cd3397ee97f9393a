"""What differs by platform: one table. A platform that is not in it gets XLA's own way."""

from __future__ import annotations

from typing import NamedTuple


class Platform(NamedTuple):
    """What this library does itself on a platform.

    Attributes:
        packs: small arrays travel together in one buffer. XLA on TPUs and GPUs combines their sums itself: of one sum for each
            array it makes the same all-reduces, and buffers would only add copies.
        is_paced: the number of programs in flight is bounded, because devices share threads; accelerators have queues.
        lanes: numbers that lie side by side; where there are some, a reduce-scatter is of rows of so many. Of parts in one long
            row, XLA makes an all-reduce and a slice on TPU v5e and v6e; of rows of 128, a reduce-scatter (`parts`: of groups).
        is_host_memory: arrays of all devices lie in memory that this process can write, so a gather is a copy.
    """

    packs: bool = False
    is_paced: bool = False
    lanes: int = 0
    is_host_memory: bool = False


XLAS_WAY = Platform()
#: By JAX's name of a platform; any other gets `XLAS_WAY`.
PLATFORMS = {"cpu": Platform(packs=True, is_paced=True, is_host_memory=True), "tpu": Platform(lanes=128)}
