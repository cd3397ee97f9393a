"""Tables as data: one JSON object a line, so that runs of several files, and of several hours, stand together."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(path: Path, table: Mapping[str, Any]) -> None:
    """Add a table to a file, with what a reader must know to compare it: when, on which machine, with which versions."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    line = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        "machine": f"{os.cpu_count()} cores, {_processor()}",
        "load": round(os.getloadavg()[0], 1),
        "versions": {"python": platform.python_version()} | versions,
        **table,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the tables of a file, in the order in which they were measured."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def _processor() -> str:
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
