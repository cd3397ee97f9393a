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
        has_lanes: the last axis of an array lies in lanes of 128 numbers: narrower parts waste memory, and XLA scatters no sums
            of them. Among more than 8 devices a sum is scattered in two rounds: a single round, on 16 to 256 chips of v5e,
            v5p and v6e, XLA turns into an all-reduce and a slice.
        orders_sums: the backward pass waits for large gradients and their sums, so that their operands are free early
            (`_program/passes/order_sums`). On CPU a step takes 0.6 to 1.0 of the time. On TPU v5e XLA's own order of all-reduces
            is better: 6.5 GB, and 8.3 with ours. Reduce-scatters have an order on every platform (`_program/passes/turns`).
        is_host_memory: all devices' arrays are in memory that this process can write, so a gather is a copy.
        options_of_parts: XLA's options for programs with arrays in parts. On GPUs XLA joins gathers up to 30 MiB, and a joint one
            cannot begin before the last of its arrays may: in a small GPT 11 of 26 ran beside other work, now 62 of 62 do.
    """

    packs: bool = False
    is_paced: bool = False
    has_lanes: bool = False
    orders_sums: bool = False
    is_host_memory: bool = False
    options_of_parts: Mapping[str, Any] | None = None


#: JAX's name of a platform -> what we do there.
PLATFORMS = {
    "cpu": Platform(packs=True, is_paced=True, orders_sums=True, is_host_memory=True),
    "gpu": Platform(orders_sums=True, options_of_parts={"xla_gpu_all_gather_combine_threshold_bytes": 4 * 2**20}),
    "tpu": Platform(has_lanes=True),
}


def platform_of(mesh: Mesh | AbstractMesh) -> Platform:
    """Return the choices for the devices of a mesh."""
    return PLATFORMS.get(mesh.devices.flat[0].platform, Platform())
