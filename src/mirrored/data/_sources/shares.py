"""Which datasets give one process its share of the rows already, as in a script of torch.distributed."""

from __future__ import annotations

from typing import Any


def why_share(dataset: Any) -> str | None:
    """Say which share of the rows a torch DataLoader gives, and what to write; None when it gives all of them.

    A sampler with a number `num_replicas` and a `rank` leaves out the rows of other ranks, such as torch's DistributedSampler.
    """
    batch_sampler = getattr(dataset, "batch_sampler", None)
    for sampler in (getattr(dataset, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)):
        count, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if isinstance(count, int) and isinstance(rank, int) and count > 1:
            return (
                f"gives 1/{count} of the rows, those of rank {rank}, by its {type(sampler).__name__}. The strategy divides the "
                "rows among the replicas and workers itself, so leave the sampler out, and its set_epoch: "
                f"{type(dataset).__name__}(data, batch_size=global_batch_size, shuffle=True)."
            )
    return None
