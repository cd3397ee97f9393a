"""One table of what differs by platform. A platform that is not in it gets XLA's own way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, Mesh


class Platform(NamedTuple):
    """The choices of this library on a platform.

    Attributes:
        packs: small arrays travel together in one buffer. On TPUs and GPUs XLA itself combines the sums of single arrays into
            the same all-reduces, so buffers would only add copies.
        is_paced: the number of programs in flight is bounded, because devices share threads; accelerators have queues.
        lanes: the length of the rows in a reduce-scatter; 0: one long row. On TPU v5e and v6e XLA turns a long row into an
            all-reduce and a slice, but rows of 128 numbers into a reduce-scatter (`parts`: of groups).
        orders_sums, orders_scatters: the backward pass waits for large gradients and their sums, so that their operands are free
            early (`_program/passes/order_sums`). On CPU a step takes 0.6 to 1.0 of the time. On TPU v5e XLA's own order of
            all-reduces is better: 6.5 GB, and 8.3 with ours.
        is_host_memory: all devices' arrays are in memory that this process can write, so a gather is a copy.
        options_of_parts: XLA's options for programs with arrays in parts. On GPUs XLA joins gathers up to 30 MiB, and a joint one
            cannot begin before the last of its arrays may: in a small GPT 11 of 26 ran beside other work, now 62 of 62 do.
    """

    packs: bool = False
    is_paced: bool = False
    lanes: int = 0
    orders_sums: bool = False
    orders_scatters: bool = False
    is_host_memory: bool = False
    options_of_parts: Mapping[str, Any] | None = None


#: JAX's name of a platform -> what we do there.
PLATFORMS = {
    "cpu": Platform(packs=True, is_paced=True, orders_sums=True, orders_scatters=True, is_host_memory=True),
    "gpu": Platform(
        orders_sums=True, orders_scatters=True, options_of_parts={"xla_gpu_all_gather_combine_threshold_bytes": 4 * 2**20}
    ),
    "tpu": Platform(lanes=128, orders_scatters=True),
}


def platform_of(mesh: Mesh | AbstractMesh) -> Platform:
    """Return the choices for the devices of a mesh."""
    return PLATFORMS.get(mesh.devices.flat[0].platform, Platform())
