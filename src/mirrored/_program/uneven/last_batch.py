"""The last batch of a dataset, for which a new step is traced at once, so that it is refused before anything runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from ..._replicas.per_replica import PerReplica, is_per_replica
from ..._typing import PyTree


@contextlib.contextmanager
def explained(arguments: PyTree) -> Iterator[None]:
    """Add a note to an error inside this block: it is about the last batch, still to come; `arguments` are of its call."""
    try:
        yield
    except Exception as error:
        values = jax.tree.leaves(arguments, is_leaf=is_per_replica)
        num_rows = next(sum(shape[0] for shape in v.shapes) for v in values if isinstance(v, PerReplica) and v.ndim)
        note = (
            f"Nothing has run yet: this is about the last batch of the dataset, of {num_rows} rows, for which a new step is "
            "traced at once. If the loop ends before it, say so: dataset.take(steps)."
        )
        notes = getattr(error, "__notes__", [])
        error.__notes__ = [*notes[:1], note, *notes[1:]]  # after the replicas that it is about, before JAX's own
        raise
