"""Options that users pass: frozen, validated when they are made."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions:
    """Say how a dataset is distributed.

    Args:
        drop_remainder: leave out the last `n mod R` rows of a global batch of n rows that the R replicas do
            not divide. Default False: such a batch is an error, never a silent loss.
        prefetch: how many batches are moved to the devices ahead of the one in use; 0 moves each when it is
            asked for. Default 2, enough to hide the transfer; each costs one batch of device memory.

    Raises:
        TypeError, ValueError: for a value of the wrong type, or a negative `prefetch`.

    >>> mr.InputOptions(drop_remainder=True)
    InputOptions(drop_remainder=True, prefetch=2)

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/InputOptions
    """

    drop_remainder: bool = False
    prefetch: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.drop_remainder, bool):
            raise TypeError(f"drop_remainder is {self.drop_remainder!r}; expected True or False.")
        if isinstance(self.prefetch, bool) or not isinstance(self.prefetch, int):
            raise TypeError(f"prefetch is {self.prefetch!r}; expected an int, the number of batches ahead.")
        if self.prefetch < 0:
            raise ValueError(f"prefetch is {self.prefetch}; expected 0 or more batches.")
