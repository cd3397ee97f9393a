"""Makes devices of machines that are not here, so that XLA compiles for them: TPU slices, and hosts with H100 GPUs."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path

import jax
from jax.experimental import topologies

from .. import _env
from .._errors import PlanError
from .._text import shown

#: Names to choose from; other sizes of these kinds work too, such as "v5p:4x4x8" and "h100:64x8".
NAMES = (
    "v4:2x2x1", "v4:4x4x4", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:8x8", "v5e:16x16", "v5p:2x2x1", "v5p:4x4x4", "v5p:8x8x4",
    "v6e:2x4", "v6e:8x8", "v6e:16x16", "tpu7x:2x2x1", "tpu7x:4x4x4", "h100:1x8", "h100:4x8", "h100:32x8",
)  # fmt: skip
_TPU = re.compile(r"(?:v\d[a-z]?|tpu7x):\d+(?:x\d+){1,2}")
_H100 = re.compile(r"h100:([1-9]\d*)x([1-8])")
#: In a folder of its own: JAX looks for a TPU wherever it can import libtpu, and prints errors if there is none.
_INSTALL = "pip install --no-deps --target ~/.tpu-compiler libtpu, and set PYTHONPATH=~/.tpu-compiler for the command"
#: The description of an H100 that XLA's compiler reads when there is no GPU to ask.
_H100_CONFIG = Path(__file__).with_name("h100.txtpb")


def topology(name: str) -> list[jax.Device]:
    """Return the devices of a machine that is not here; programs are compiled for them, and never run.

    Args:
        name: a TPU slice, such as `"v5e:16x16"`, `"v5p:8x8x4"`, `"v6e:2x4"`, `"tpu7x:2x2x1"`, or hosts with H100 GPUs, such as
            `"h100:32x8"` for 32 hosts of 8.

    Returns:
        The devices, for `mr.MirroredStrategy(mr.topology(name))`. `mr.plan` describes the programs compiled for them.

    Raises:
        PlanError: (a RuntimeError) for an unknown name, and when the compiler is not installed.
        TypeError: for anything but a string.

    >>> devices = mr.topology("v5e:2x4")  # doctest: +SKIP
    >>> len(devices), devices[0].device_kind  # doctest: +SKIP
    (8, 'TPU v5 lite')

    Source: https://docs.jax.dev/en/latest/jax.experimental.topologies.html
    """
    if not isinstance(name, str):
        raise TypeError(f"mr.topology got {shown(name)}; expected a name such as mr.topology('v5e:16x16').")
    if match := _H100.fullmatch(name):
        return _h100(name, *match.groups())
    if not _TPU.fullmatch(name):
        near = difflib.get_close_matches(name, NAMES, cutoff=0.3)
        known = f"such as {', '.join(map(repr, near))}" if near else f"one of {', '.join(map(repr, NAMES))}"
        raise PlanError(
            f"mr.topology does not know {name!r}; expected {known}. A TPU slice is written v5e:ROWSxCOLUMNS or v5p:XxYxZ, and "
            "hosts with GPUs h100:HOSTSxGPUS."
        )
    _require("libtpu", f"to compile for {name!r} needs libtpu, the compiler of TPUs; it needs no TPU. Write: {_INSTALL}")
    with _env.meanwhile(_env.FOR_TPU_COMPILER):  # else libtpu searches the network for a TPU's metadata
        return _devices(name, "tpu", name)


def _h100(name: str, hosts: str, gpus: str) -> list[jax.Device]:
    _require(
        "jax_cuda13_plugin",
        f"to compile for {name!r} needs JAX's compiler for CUDA; it needs no GPU. Write: pip install "
        f"jax-cuda13-plugin=={jax.__version__} jax-cuda13-pjrt=={jax.__version__} nvidia-cuda-nvcc nvidia-nvvm",
    )
    return _devices(name, "cuda", "h100", topology=f"1x{hosts}x{gpus}", target_config=_H100_CONFIG.read_text())


def _require(module: str, message: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise PlanError(message)


def _devices(name: str, platform: str, topology_name: str, **options: str) -> list[jax.Device]:
    jax.devices("cpu")  # start JAX's own backends first, so that no missing TPU counts as a failed start
    try:
        return list(topologies.get_topology_desc(platform=platform, topology_name=topology_name, **options).devices)
    except (RuntimeError, ValueError) as error:
        if "not implemented" in str(error):  # JAX found no GPU, and gave up the compiler too
            raise PlanError(
                f"JAX has not started the compiler for {name!r}, because it has found no such device here. Set "
                "JAX_PLATFORMS=cpu in the environment: a plan needs no other device."
            ) from error
        raise PlanError(f"the compiler refuses the topology {name!r}: {str(error).splitlines()[0]}") from error
