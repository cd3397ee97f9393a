"""The published rates of accelerators, on which a plan's estimates stand.

TPUs: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm (pages of v4, v5e, v5p, v6e, tpu7x), read on 2026-11-27.
GPUs: NVIDIA's data sheets of H100 and H200 (SXM). Dense bfloat16, without sparsity.
"""

from __future__ import annotations

import dataclasses

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts devices: of TPU v4 and tpu7x a chip has two.

    Attributes:
        flops: operations in a second, bfloat16.
        memory: bytes; `memory_rate`: bytes in a second that it reads or writes.
        links: bytes in a second that all its links to near devices send.
        per_host: how many devices the near ones are; None where all devices of a slice are near.
        network: bytes in a second that a device sends to another host; of TPUs, to another slice.
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    links: float
    per_host: int | None
    network: float


#: By JAX's `device_kind`.
CHIPS = {
    "TPU v4": Chip("TPU v4", 275e12 / 2, 32 * 2**30 / 2, 1228 * GB / 2, 300 * GB / 2, None, 6.25 * GB / 2),
    "TPU v5 lite": Chip("TPU v5e", 197e12, 16 * 2**30, 819 * GB, 200 * GB, None, 3.1 * GB),
    "TPU v5": Chip("TPU v5p", 459e12, 95 * 2**30, 2765 * GB, 600 * GB, None, 6.25 * GB),
    "TPU v6 lite": Chip("TPU v6e", 918e12, 32 * 2**30, 1640 * GB, 400 * GB, None, 12.5 * GB),
    "TPU7x": Chip("TPU7x", 2307e12 / 2, 192 * 2**30 / 2, 7380 * GB / 2, 600 * GB / 2, None, 12.5 * GB / 2),
    "NVIDIA H100 80GB HBM3": Chip("H100", 989e12, 80 * 2**30, 3350 * GB, 450 * GB, 8, 40 * GB),
    "NVIDIA H200": Chip("H200", 989e12, 141e9, 4800 * GB, 450 * GB, 8, 40 * GB),
}
#: Of the published rates a training step reaches so much. One H200 (docs/speed.md) has given the figures: GPT with 124 M
#: parameters is limited by its memory, ResNet-50 by its convolutions.
REACHED_PRODUCTS, REACHED_CONVOLUTIONS, REACHED_MEMORY = 0.5, 0.2, 0.75
#: Seconds of one message between near devices, and between hosts.
NEAR_LATENCY, FAR_LATENCY = 3e-6, 10e-6
