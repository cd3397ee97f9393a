"""Says of a strategy's variables what is in parts, what that saves, and what stays whole."""

from __future__ import annotations

from .._options import Storage
from .._replicas.mesh import ReplicaMesh
from .._text import bytes_in_words, counted
from .spec import VariableSpec
from .variable import live_variables, spec_of

#: So many padded variables are named.
_MAX_NAMED = 3


def describe(mesh: ReplicaMesh) -> list[str]:
    """Return lines about the storage of a strategy's variables; none if all of it is whole, as it is by default."""
    specs = list(map(spec_of, live_variables(mesh)))
    divided = [spec for spec in specs if spec.division is not None]
    if not divided and mesh.storage is Storage.WHOLE:
        return []
    if len(mesh.devices) == 1:
        return ["storage: there is one device, so that nothing is divided"]
    here, all_bytes = sum(spec.bytes_on_device for spec in divided), sum(spec.whole_bytes for spec in divided)
    lines = [
        f"in parts: {counted(len(divided), 'variable')}, {bytes_in_words(here)} on each device in place of "
        f"{bytes_in_words(all_bytes)}; sums of their shapes are reduce-scatters"
    ]
    padded = [f"{spec.name!r} {spec.division}" for spec in divided if spec.division is not None and spec.division.is_padded]
    if padded:
        more = f", and {len(padded) - _MAX_NAMED} more" if len(padded) > _MAX_NAMED else ""
        lines.append(f"  with padding: {'; '.join(padded[:_MAX_NAMED])}{more}")
    if whole := [spec for spec in specs if spec.division is None]:
        largest = max(whole, key=_size)
        lines.append(
            f"whole on each device: {counted(len(whole), 'variable')} of {bytes_in_words(sum(map(_size, whole)))}; the largest "
            f"is {largest.name!r}, {largest.dtype}{list(largest.shape)} of {bytes_in_words(_size(largest))}"
        )
    return lines


def _size(spec: VariableSpec) -> int:
    return spec.bytes_on_device
