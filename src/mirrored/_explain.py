"""What a compiled step does, in words."""

from __future__ import annotations

from ._replicate import Program


def describe_program(program: Program) -> str:
    """Say which variables a step touches, and what it communicates."""
    findings, lifted = program.findings, program.lifted
    sizes: dict[str, list[int]] = {}
    for collective in findings.collectives:
        name = {"psum": "all-reduce", "all_gather": "all-gather"}.get(collective.name, collective.name)
        sizes.setdefault(name + (" in a loop" if collective.in_loop else ""), []).append(collective.num_bytes)
    communication = ", ".join(f"{len(b)} {name} of {_bytes(sum(b))}" for name, b in sizes.items()) or "no communication"
    return f"{program.name}: {len(lifted.written)} variables written, {len(lifted.read_only)} read; {communication}"


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"
