"""Tells a topology's devices, for which JAX only compiles, from devices that run programs; JAX promises no way to ask."""

from __future__ import annotations

import jax


def runs_nothing(device: jax.Device) -> bool:
    """Tell whether a device belongs to a topology: JAX can compile for it, but it runs nothing."""
    return device.client.runtime_type == "compile_only_runtime"
