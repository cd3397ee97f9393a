"""The kinds of replicas in an uneven step: replicas whose arguments have the same shapes are of one kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fractions import Fraction

from ..._errors import UnevenReplicasError
from ..._typing import Shape
from ..call import ArrayLeaf, Call, argument_names
from .match_collectives import DROP


@dataclasses.dataclass(frozen=True)
class Kinds:
    """The kinds of the replicas, by the shapes of their arguments."""

    shapes: tuple[tuple[Shape, ...], ...]  # for each kind, the shape of each array argument
    of_replica: tuple[int, ...]  # the kind of each replica
    varied: int  # an argument whose shape differs, by position; messages speak of it
    name: str  # its name
    batches: tuple[int, ...]  # the arguments that are batches of datasets

    def describe(self, kind: int) -> str:
        """Name the replicas of a kind in a message."""
        return f"the replicas whose {self.name} has shape {self.shapes[kind][self.varied]}"

    def explain(self, kind: int) -> str:
        """Say in a note which replicas an error is about."""
        if self.most_rows(kind):
            return (
                f"This is about {self.describe(kind)}: the batch does not divide evenly among the replicas. To leave odd rows "
                f"out: {DROP}."
            )
        numbers = [number for number, own in enumerate(self.of_replica) if own == kind]
        who = f"Replica {numbers[0]} has" if len(numbers) == 1 else f"The replicas {', '.join(map(str, numbers))} have"
        return (
            f"{who} no rows of this batch: `{self.name.strip('`')}` has shape {self.shapes[kind][self.varied]} there. A step "
            "must work without rows. x.reshape(x.shape[0], -1) cannot tell what -1 is: write x.reshape(x.shape[0], "
            "math.prod(x.shape[1:])). jnp.max(x) has no value: write jnp.max(x, initial=-jnp.inf). Or choose a batch size "
            f"of which each replica gets a row, or leave the odd rows out: {DROP}."
        )

    def on_replicas(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return for each replica the size that its kind has."""
        return tuple(sizes[kind] for kind in self.of_replica)

    def guess(self, kind: int, size: int) -> tuple[int, ...]:
        """Guess for each kind a size that is `size` on replicas of one: a number of rows, or a multiple of it."""
        for sizes in self._row_counts():
            rows = sizes[kind]
            if size == rows or (rows > 1 and size % rows == 0):
                return tuple(other * (size // rows if rows else 1) for other in sizes)
        return (size,) * len(self.shapes)

    def rows(self, kind: int) -> tuple[int, int]:
        """Return how many rows a replica of a kind has, and how many all have, as they weigh in a mean.

        Raises:
            UnevenReplicasError: when it depends on the argument.
        """
        counts = [*self._row_counts(), *(tuple(shapes[i][0] for shapes in self.shapes) for i in self.batches)]
        totals = [sum(self.on_replicas(sizes)) for sizes in counts]
        shares = {tuple(Fraction(size, total) for size in sizes) for sizes, total in zip(counts, totals, strict=True)}
        if len(shares) > 1:
            raise UnevenReplicasError(
                "a mean over the replicas weighs them by their rows, but the arguments divide differently among the replicas: "
                f"{', '.join(str(self.on_replicas(sizes)) for sizes in dict.fromkeys(counts))} rows. For one "
                "weight for all write ctx.all_reduce('mean', value, by_rows=False). Divide a loss by its own rows on all "
                "replicas, mr.losses.compute_average_loss(per_example_loss), and let the gradients be summed: aggregate='sum'. "
                f"Or leave the odd rows out: {DROP}."
            )
        return counts[0][kind], totals[0]

    def check_lengths(self, lengths: tuple[int, ...]) -> None:
        """Refuse losses whose lengths on the replicas are neither in the ratio of their rows nor each the number of all rows.

        Rows are along an axis that differs, and along the first axes of batches and of arguments of which an axis differs.

        Raises:
            UnevenReplicasError: for other lengths.
        """
        arguments = enumerate(zip(*self.shapes, strict=True))
        first = [tuple(shape[0] for shape in own) for i, own in arguments if len(set(own)) > 1 or i in self.batches]
        counts = [self.on_replicas(sizes) for sizes in (*self._row_counts(), *first)]
        for rows in counts:
            is_gathered = set(lengths) == {sum(rows)}
            if is_gathered or all(own * sum(rows) == sum(lengths) * its for own, its in zip(lengths, rows, strict=True)):
                return
        raise UnevenReplicasError(_LENGTHS.format(lengths=lengths, rows=counts[0]))

    def most_rows(self, kind: int) -> int:
        return max(sizes[kind] for sizes in self._row_counts())

    def _row_counts(self) -> Iterator[tuple[int, ...]]:
        for shapes in zip(*self.shapes, strict=True):
            yield from (sizes for sizes in zip(*shapes, strict=True) if len(set(sizes)) > 1)


_LENGTHS = (
    "the batch does not divide evenly among the replicas, and a loss that shall be one number for each example, shape [n], has "
    "the lengths {lengths} on the replicas, which have {rows} rows. A mean over the rows, such as losses.mean(axis=0), and a "
    "vector of several terms have such a length, and their mean would change with the number of replicas. Write one of these "
    "lines:\n"
    "    losses.mean(axis=1)                                       # of shape [n, m], the mean of each example's own elements\n"
    "    mr.losses.mean_over_own_rows(jnp.mean(losses))            # a scalar, of terms that are means over own rows\n"
    "    mr.losses.weighted_mean(losses, jnp.ones(losses.shape))   # a scalar, divided by the elements on all replicas"
)


def find_kinds(call: Call, leaves: Sequence[ArrayLeaf]) -> Kinds:
    """Tell which replicas have arguments of the same shapes."""
    varied = next(i for i, leaf in enumerate(leaves) if leaf.shapes is not None)
    num_replicas = len(leaves[varied].shapes or ())
    of_each = [tuple(leaf.shapes[r] if leaf.shapes else leaf.shape for leaf in leaves) for r in range(num_replicas)]
    shapes = tuple(dict.fromkeys(of_each))
    of_replica = tuple(shapes.index(own) for own in of_each)
    batches = tuple(i for i, leaf in enumerate(leaves) if leaf.is_batch)
    return Kinds(shapes, of_replica, varied, argument_names(call)[varied], batches)
