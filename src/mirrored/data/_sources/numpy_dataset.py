"""Arrays in memory as a dataset of global batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import jax
import numpy as np

from ... import _tf_names
from ..._html import outline
from ..._replicas.arrays import is_numeric, is_wrapped, refuse_mask
from ..._replicas.host_memory import empty_rows
from ..._replicas.per_replica import PerReplica
from ..._text import counted, shown
from ..._typing import PyTree
from .._sharing.rows import count_rows, refuse_keys
from .kind import Cut, SourceKind
from .verbs import applied, at_most, check_int, checked_function, num_steps, spec_of_batch


@_tf_names.hints("mr.data.NumpyDataset")
@dataclasses.dataclass(frozen=True, repr=False)
class NumpyDataset:
    """A dataset that yields batches of rows in memory, made by `strategy.make_numpy_dataset`.

    Each method returns a new dataset, which can be iterated repeatedly. As in tf.data, `take` and `map` apply to rows before
    `batch`, and to batches after it. `shuffle` and `repeat` apply to rows, and no batch mixes two epochs.

    Attributes:
        arrays: a nest of arrays with the same number of rows.
        batch_size: rows per global batch, or None before `batch`.
        drop_remainder: whether to drop a last batch with fewer rows.
        shuffle_seed: None for the rows' own order; else the k-th pass over the data has the same shuffled order in every run.
        num_epochs: how often one pass repeats the rows; None: endlessly.
        batches_per_epoch: the most batches of an epoch; None: all.
        batches_per_pass: the most batches of all epochs together; None: all.
        maps: functions, each with True if it takes a row, False if it takes a batch.

    >>> dataset = strategy.make_numpy_dataset({"x": np.arange(5)}).batch(2)
    >>> [batch["x"].tolist() for batch in dataset], len(dataset)
    ([[0, 1], [2, 3], [4]], 3)
    """

    arrays: PyTree
    batch_size: int | None = None
    drop_remainder: bool = False
    shuffle_seed: int | None = None
    num_epochs: int | None = 1
    batches_per_epoch: int | None = None
    batches_per_pass: int | None = None
    maps: tuple[tuple[Callable[..., PyTree], bool], ...] = ()
    #: The epoch number with which the next pass begins.
    _next_epoch: list[int] = dataclasses.field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(self.arrays, is_leaf=is_wrapped)[0]:
            name = jax.tree_util.keystr(path) or "the array"
            if not isinstance(leaf, np.ndarray):
                kind = type(leaf).__name__
                raise TypeError(f"{name} is {shown(leaf)} of type {kind}; expected a numpy array whose first axis counts rows.")
            refuse_mask(leaf, lambda name=name: f"{name} is")
            if not is_numeric(leaf.dtype):
                raise TypeError(f"{name} has dtype {leaf.dtype}, which no device can hold. Encode it as numbers first.")
        count_rows(self.arrays, "make_numpy_dataset got", "Each row must be one example, of all arrays.")
        if self.batch_size is not None:
            check_int("batch_size is", self.batch_size, 1, "the number of rows")
        if not isinstance(self.drop_remainder, bool):
            raise TypeError(f"drop_remainder is {self.drop_remainder!r}; expected True or False.")
        if self.shuffle_seed is not None:
            check_int("seed is", self.shuffle_seed, 0, "so that a run can be repeated")
        if self.num_epochs is not None:
            check_int("num_epochs is", self.num_epochs, 1, "the number of passes over the rows")

    @property
    def num_rows(self) -> int:
        """The number of rows."""
        return jax.tree.leaves(self.arrays)[0].shape[0]

    def batch(self, batch_size: int, drop_remainder: bool = False) -> NumpyDataset:
        """Make global batches of `batch_size` rows; the last one holds the rest, or is dropped with `drop_remainder`."""
        if self.batch_size is not None:
            raise ValueError(f"the dataset is batched already, by {self.batch_size}; call batch once.")
        batch_size = check_int("batch_size is", batch_size, 1, "the number of rows")
        return dataclasses.replace(self, batch_size=batch_size, drop_remainder=drop_remainder)

    def shuffle(self, buffer_size: None = None, *, seed: int | None = None) -> NumpyDataset:
        """Shuffle all rows, anew in each pass; the same seed gives the same orders in every run.

        Args:
            buffer_size: leave it out. In tf.data it is the size of a buffer; here all rows are in memory.
            seed: an int of at least 0.
        """
        if buffer_size is not None or seed is None:
            given = f"buffer_size={buffer_size!r}, " * (buffer_size is not None) + f"seed={seed!r}"
            raise TypeError(
                f"shuffle got {given}; expected a seed by its name, and no more: .shuffle(seed={seed or 0!r}). Here all rows "
                "change places, as in tf.data with a buffer_size of the number of rows."
            )
        return dataclasses.replace(self, shuffle_seed=seed)

    def repeat(self, num_epochs: int | None = None) -> NumpyDataset:
        """Repeat the rows `num_epochs` times in one pass, or endlessly; no batch mixes two epochs."""
        if num_epochs is not None:
            check_int("num_epochs is", num_epochs, 1, "the number of passes over the rows, or None for no end")
        if self.batches_per_pass is not None:
            raise ValueError("repeat was called after repeat(...).take(...); leave out the first repeat, or call take last.")
        if num_epochs is None or self.num_epochs is None:
            return dataclasses.replace(self, num_epochs=None)
        return dataclasses.replace(self, num_epochs=self.num_epochs * num_epochs)

    def take(self, count: int) -> NumpyDataset:
        """Keep the first `count` rows or, after `batch`, the first `count` batches; all if there are fewer."""
        check_int("count is", count, 0, "the number of rows, or after batch of batches")
        if self.batch_size is None:
            if self.shuffle_seed is not None or self.num_epochs != 1 or self.maps:
                raise ValueError(
                    "take was called after shuffle, repeat or map. Take rows first, or batches last: .batch(n).take(m)."
                )
            return dataclasses.replace(self, arrays=jax.tree.map(lambda array: array[:count], self.arrays))
        name = "batches_per_epoch" if self.num_epochs == 1 else "batches_per_pass"
        return dataclasses.replace(self, **{name: at_most(count, getattr(self, name))})

    def map(self, fn: Callable[..., PyTree]) -> NumpyDataset:
        """Apply a function to each row or, after `batch`, to each batch; a tuple becomes several arguments, as in tf.data.

        Args:
            fn: takes numpy arrays and returns a nest of arrays. After `batch` it is called once for each whole batch.
        """
        return dataclasses.replace(self, maps=(*self.maps, (checked_function(fn), self.batch_size is None)))

    @property
    def element_spec(self) -> PyTree:
        """The shapes and dtypes of a batch, in its structure, with None for the number of rows."""
        return spec_of_batch(jax.tree.map(np.asarray, self._sample()))

    def __repr__(self) -> str:
        rows = jax.tree.map(lambda array: f"{array.dtype}{list(array.shape[1:])}", self.arrays)
        num_rows, *more = self._summary()
        return f"NumpyDataset({', '.join([f'{num_rows} of {rows}', *more])})"

    def _repr_html_(self) -> str:
        return outline("NumpyDataset of " + "\n".join(self._summary()))

    def _summary(self) -> list[str]:
        lines = [counted(self.num_rows, "row")]
        lines += [f"batches of {self.batch_size}"] * (self.batch_size is not None)
        lines += [f"shuffled with the seed {self.shuffle_seed}"] * (self.shuffle_seed is not None)
        lines += ["repeated without end"] * (self.num_epochs is None)
        lines += [f"{self.num_epochs} passes"] * (self.num_epochs not in (None, 1))
        return lines

    def _sample(self) -> PyTree:
        """Return a batch for a function that may change it, without beginning a pass."""
        return self._mapped(jax.tree.map(lambda array: array[: self._rows_per_batch()].copy(), self.arrays))

    def _mapped(self, batch: PyTree) -> PyTree:
        for fn, is_by_row in self.maps:
            if is_by_row:
                num_rows = jax.tree.leaves(batch)[0].shape[0]
                batch = _stacked([applied(fn, jax.tree.map(lambda leaf, i=i: leaf[i], batch)) for i in range(num_rows)])
            else:
                batch = applied(fn, batch)
        return batch

    def __len__(self) -> int:
        return num_steps(self._num_batches_of_epoch(), (("repeat", self.num_epochs), ("take", self.batches_per_pass)))

    def _num_smaller(self, num_rows: int) -> int:
        """Return how many batches of a pass have fewer rows."""
        if self._rows_per_batch() < num_rows:
            return len(self)
        num_whole, rest = divmod(self.num_rows, self._rows_per_batch())
        per_epoch = self._num_batches_of_epoch()
        if per_epoch <= num_whole or rest >= num_rows:
            return 0
        return len(self) // per_epoch  # the last batch of each epoch

    def __iter__(self) -> Iterator[PyTree]:
        return _NumpyIterator(self)

    def _of_later_passes(self, num_passes: int) -> NumpyDataset:
        """Return this dataset for the next passes: their epochs are numbered now, not when the passes begin."""
        made = dataclasses.replace(self)
        made._next_epoch[0] = self._next_epoch[0]
        self._next_epoch[0] += num_passes * (self.num_epochs or 1)
        return made

    def _num_batches_of_epoch(self) -> int:
        complete, rest = divmod(self.num_rows, self._rows_per_batch())
        return at_most(complete + (rest > 0 and not self.drop_remainder), self.batches_per_epoch)

    def _rows_per_batch(self) -> int:
        if self.batch_size is None:
            raise ValueError(
                "the dataset has rows, not batches. Say how many rows all replicas take together in one step: "
                "strategy.make_numpy_dataset(arrays).batch(global_batch_size)."
            )
        return self.batch_size


class _NumpyIterator:
    """An iterator over one pass of a NumpyDataset. Its position is the pass, the epoch in the pass, and the row in the epoch."""

    def __init__(self, dataset: NumpyDataset) -> None:
        self._dataset = dataset
        size, most = dataset._rows_per_batch(), dataset.batches_per_epoch
        self._end = at_most(dataset.num_rows, most and most * size)  # the end of an epoch's rows
        self._last_start = self._end - (size if dataset.drop_remainder else 1)
        self._first: int | None = None  # see `_begin`
        self._place = (0, 0)  # the epoch, and the row in it
        self._order: tuple[int, np.ndarray] | None = None  # an epoch's number, and the order of its rows

    def __iter__(self) -> _NumpyIterator:
        return self

    def __next__(self) -> PyTree:
        dataset, size = self._dataset, self._dataset._rows_per_batch()
        epoch, row = self._place
        if row > self._last_start:
            epoch, row = epoch + 1, 0
        num_taken = epoch * dataset._num_batches_of_epoch() + -(-row // size)
        is_taken = dataset.batches_per_pass is not None and num_taken >= dataset.batches_per_pass
        if is_taken or epoch == dataset.num_epochs or self._last_start < 0:
            raise StopIteration
        number = self._begin() + epoch
        if self._order is None or self._order[0] != number:
            seed, count = dataset.shuffle_seed, dataset.num_rows
            order = np.arange(count) if seed is None else np.random.default_rng([seed, number]).permutation(count)
            self._order = number, order
        rows = self._order[1][row : min(row + size, self._end)]
        self._place = epoch, row + len(rows)
        return dataset._mapped(jax.tree.map(lambda array: _take_rows(array, rows), dataset.arrays))

    def _begin(self) -> int:
        """Return the number of this pass's first epoch; the first call reserves the numbers of all its epochs."""
        if self._first is None:
            self._first = self._dataset._next_epoch[0]
            self._dataset._next_epoch[0] += self._dataset.num_epochs or 1
        return self._first

    def get_state(self) -> dict[str, int | None]:
        dataset, (epoch, row) = self._dataset, self._place
        position = {"pass": self._begin(), "epoch": epoch, "row": row}
        return {**position, "num_rows": dataset.num_rows, "seed": dataset.shuffle_seed}

    def set_state(self, state: dict[str, int]) -> None:
        dataset = self._dataset
        first, epoch, row, num_rows = (state[name] for name in ("pass", "epoch", "row", "num_rows"))
        if num_rows != dataset.num_rows:
            raise ValueError(f"it is of a dataset of {num_rows} rows, and this one has {dataset.num_rows}")
        if not all(type(number) is int and number >= 0 for number in (first, epoch, row)) or row > num_rows:
            raise ValueError(f"no such position: {state}")
        if dataset.num_epochs is not None and epoch >= dataset.num_epochs:
            raise ValueError(
                f"it is in epoch {epoch}, counted from 0, of rows that are repeated {dataset.num_epochs} times here; call "
                "repeat with at least as many epochs as were begun"
            )
        if state["seed"] != dataset.shuffle_seed:
            raise ValueError(f"its rows are in the order of shuffle seed {state['seed']}, and here of {dataset.shuffle_seed}")
        self._first, self._order = first, None
        self._place = epoch, row
        dataset._next_epoch[0] = first + (dataset.num_epochs or 1)  # the next pass follows this one


def _stacked(made: list[PyTree]) -> PyTree:
    """Make a batch of the results that a function returned for the rows."""
    try:
        return jax.tree.map(lambda *rows: np.stack(rows), *made)
    except ValueError as error:
        raise ValueError(
            "what the function of map returns for the rows of one batch has different structures or shapes, and cannot be "
            "stacked. Return arrays of one shape for each row, padded if need be; or call map after batch, with a function of "
            "whole batches."
        ) from error


def _take_rows(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Copy rows into memory that devices can use without another copy."""
    [copy] = empty_rows(1, (len(rows), *array.shape[1:]), array.dtype)
    return np.take(array, rows, axis=0, out=copy, mode="clip")  # the default mode makes one more copy; all rows exist


def stacked_lists(arrays: PyTree) -> PyTree:
    """Convert leaves into numpy arrays, and stack lists of arrays, as in tf.data; refuse ragged lists."""

    def stacked(path: tuple[object, ...], leaf: object) -> np.ndarray:
        name = jax.tree_util.keystr(path) or "numpy_input"
        refuse_keys(leaf, f"{name} holds")
        try:
            return leaf if isinstance(leaf, np.ma.MaskedArray) else np.asarray(leaf)  # a masked array is refused later, by name
        except ValueError as error:
            raise ValueError(
                f"{name} is a list whose elements have different shapes, so they cannot be stacked as rows: {error}. For "
                "several arrays of one row each write a tuple or a dict: (x, y)."
            ) from error

    return jax.tree_util.tree_map_with_path(stacked, arrays, is_leaf=lambda node: isinstance(node, list | PerReplica))


def _why_empty(dataset: NumpyDataset) -> str:
    if 0 in (dataset.batches_per_epoch, dataset.batches_per_pass):
        return ""
    if dataset.drop_remainder and dataset.num_rows < (dataset.batch_size or 0):
        return (
            f"NumpyDataset has {counted(dataset.num_rows, 'row')}, fewer than a batch of {dataset.batch_size}, which "
            "drop_remainder=True drops. Make smaller batches, or leave drop_remainder out: then every row is used."
        )
    return "The NumpyDataset is empty, or its batches have no rows."


def _cut(dataset: NumpyDataset) -> Cut | None:
    """Return how an epoch is cut, unless a function of batches may change their number of rows."""
    count = num_steps(dataset._num_batches_of_epoch(), (("take", dataset.batches_per_pass),))
    return Cut(dataset.num_rows, dataset._rows_per_batch(), count) if all(is_by_row for _, is_by_row in dataset.maps) else None


NUMPY = SourceKind(
    is_one=lambda dataset: isinstance(dataset, NumpyDataset),
    start=iter,
    yields_new_arrays=lambda dataset: not dataset.maps,
    sample=lambda dataset: iter([dataset._sample()]),
    for_later=NumpyDataset._of_later_passes,
    counted_sizes=lambda dataset, is_by_file, asked: [],  # it counts rows
    length=len,
    cut=_cut,
    num_smaller=NumpyDataset._num_smaller,
    why_no_batches=lambda dataset, verb, size: dataset._rows_per_batch() and None,
    why_empty=_why_empty,
)
