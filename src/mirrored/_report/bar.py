"""A progress bar over the batches of a loop, with steps per second and the input's share of the time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from .._strategy.strategy import joint_strategy
from .._text import shown

T = TypeVar("T")


def progress(batches: Iterable[T], *, total: int | None = None, description: str = "") -> Iterator[T]:
    """Show a progress bar while a loop takes batches: steps, steps a second, and the share of time spent waiting for input.

    With several workers only the chief shows the bar. In a notebook it is a widget. `mirrored launch` keeps it in one line.

    Args:
        batches: the batches of the loop, such as a distributed dataset.
        total: the number of batches; default: `len(batches)`, if they have a length.
        description: the text before the bar, such as "epoch 3".

    Returns:
        An iterator over the batches.

    Raises:
        TypeError: for a wrong argument.
        ImportError: when tqdm is not installed.

    >>> for batch in mr.progress(strategy.distribute_dataset([np.ones(4)] * 3), description="epoch 1"):
    ...     _ = strategy.run(lambda x: x, args=(batch,))
    """
    if not isinstance(batches, Iterable):
        raise TypeError(f"mr.progress got {shown(batches)}; expected the batches of a loop: for batch in mr.progress(dataset):")
    if total is not None and (isinstance(total, bool) or not isinstance(total, int) or total < 0):
        raise TypeError(f"mr.progress: total is {shown(total)}; expected how many batches there will be, or None.")
    if not isinstance(description, str):
        raise TypeError(f"mr.progress: description is {shown(description)}; expected a str, such as 'epoch 3'.")
    if total is None:
        with contextlib.suppress(TypeError):
            total = len(batches)  # pyrefly: ignore[bad-argument-type]
    strategy = joint_strategy()
    is_hidden = strategy is not None and not strategy.is_chief
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("mr.progress needs tqdm, which is not installed: pip install tqdm.") from error
    return _show(batches, tqdm(total=total, desc=description, unit="step", disable=is_hidden))


def _show(batches: Iterable[T], bar: Any) -> Iterator[T]:
    with bar:
        start, waited, iterator = time.perf_counter(), 0.0, iter(batches)
        while True:
            asked = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            waited += time.perf_counter() - asked
            yield batch
            bar.set_postfix_str(f"input {waited / (time.perf_counter() - start):.0%}", refresh=False)
            bar.update()
