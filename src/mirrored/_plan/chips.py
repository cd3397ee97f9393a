"""The published rates of accelerators, from which a plan makes its estimates.

TPUs: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm (pages of v4, v5e, v5p, v6e, tpu7x), read on 2026-11-27.
GPUs: NVIDIA's data sheets of H100 and H200 (SXM). Dense bfloat16, without sparsity.
"""

from __future__ import annotations

import dataclasses

from .. import _env

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device, as JAX counts devices: a chip of TPU v4 and tpu7x has two.

    Attributes:
        flops: bfloat16 operations per second.
        memory: bytes; `memory_rate`: bytes that it reads or writes per second.
        links: bytes per second that all its links to near devices send together.
        per_host: the number of near devices; None if all devices of a slice are near.
        share: the part of its memory that JAX takes.
        network: bytes per second that a device sends to another host or, on TPUs, to another slice.
    """

    name: str
    flops: float
    memory: float
    memory_rate: float
    links: float
    per_host: int | None
    network: float
    share: float = 1.0

    @property
    def usable(self) -> float:
        """The bytes of its memory that JAX takes."""
        return self.share * self.memory


#: By JAX's `device_kind`.
CHIPS = {
    "TPU v4": Chip("TPU v4", 275e12 / 2, 32 * 2**30 / 2, 1228 * GB / 2, 300 * GB / 2, None, 6.25 * GB / 2),
    "TPU v5 lite": Chip("TPU v5e", 197e12, 16 * 2**30, 819 * GB, 200 * GB, None, 3.1 * GB),
    "TPU v5": Chip("TPU v5p", 459e12, 95 * 2**30, 2765 * GB, 600 * GB, None, 6.25 * GB),
    "TPU v6 lite": Chip("TPU v6e", 918e12, 32 * 2**30, 1640 * GB, 400 * GB, None, 12.5 * GB),
    "TPU7x": Chip("TPU7x", 2307e12 / 2, 192 * 2**30 / 2, 7380 * GB / 2, 600 * GB / 2, None, 12.5 * GB / 2),
    "NVIDIA H100 80GB HBM3": Chip("H100", 989e12, 80 * 2**30, 3350 * GB, 450 * GB, 8, 40 * GB, 0.75),
    "NVIDIA H200": Chip("H200", 989e12, 141e9, 4800 * GB, 450 * GB, 8, 40 * GB, 0.75),
}
#: The parts of the published rates that a training step reaches, measured on one H200 (docs/speed.md): memory limits GPT with
#: 111 M parameters, convolutions limit ResNet-50.
REACHED_PRODUCTS, REACHED_CONVOLUTIONS, REACHED_MEMORY = 0.5, 0.2, 0.75
#: Seconds that one message takes between near devices, and between hosts.
NEAR_LATENCY, FAR_LATENCY = 3e-6, 10e-6


def chip_of(kind: str) -> Chip | None:
    """Return the published rates of a `device_kind`, and the part of its memory that JAX takes; None if it is unknown."""
    chip = CHIPS.get(kind)
    if chip is None or chip.share == 1.0:
        return chip
    return dataclasses.replace(chip, share=_env.share_of_gpu_memory())
