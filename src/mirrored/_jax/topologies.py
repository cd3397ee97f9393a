"""Tells devices that run programs from those of a topology, for which JAX only compiles. JAX promises no way to ask."""

from __future__ import annotations

import jax


def runs_nothing(device: jax.Device) -> bool:
    """Tell whether a device is one of a topology's, for which JAX can compile, and which runs nothing."""
    return device.client.runtime_type == "compile_only_runtime"
