"""The list of all kinds of datasets. To add one, write a file like the others in this folder, and enter it here."""

from __future__ import annotations

from .counted import BY_NUMBER, FUNCTION, IN_MEMORY, ITERABLE
from .grain import GRAIN
from .hugging_face import ROWS, STREAM
from .kind import SourceKind
from .numpy_dataset import NUMPY
from .torch_data import TORCH

#: The first that recognizes a dataset is its kind.
KINDS = (NUMPY, GRAIN, STREAM, ROWS, TORCH, IN_MEMORY, BY_NUMBER, FUNCTION, ITERABLE)
#: The kind of objects that are no datasets.
NO_SOURCE = SourceKind(is_one=lambda dataset: True, start=iter)


def kind_of(dataset: object) -> SourceKind:
    """Return the kind of a dataset, as the user gave it or `adapted`."""
    return next((kind for kind in KINDS if kind.is_one(dataset)), NO_SOURCE)
