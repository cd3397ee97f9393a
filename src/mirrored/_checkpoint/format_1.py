"""Reads the arrays of steps of format 1, which orbax wrote. The only module that imports orbax, and only for these."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

ARRAYS = "arrays"


def read(directory: Path, described: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Read arrays, one by one: orbax does not end well with several reads of which some fail.

    Of a dtype that orbax does not know, such as float8, it gives the bytes. Empty arrays were not written.
    """
    try:
        ocp, me = importlib.import_module("orbax.checkpoint"), jax.process_index()
    except ImportError as error:
        raise ImportError("an earlier version of mirrored wrote it by orbax-checkpoint: pip install orbax-checkpoint") from error
    # It waits for no other process, as one that all processes share would.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"mirrored-worker-{me}"
    )
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        for key, about in described.items():
            if 0 in about["shape"]:
                yield key, np.zeros(0, np.uint8)
                continue
            args = ocp.args.PyTreeRestore(item={key: 0}, restore_args={key: as_numpy}, partial_restore=True)
            yield key, np.asarray(checkpointer.restore(directory, args=args)[key])
