"""Random uneven steps compute what their replicas compute as threads that meet, and assign only what is mirrored."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _program.uneven.rows import COLUMNS, DEVICES, data, with_nan_padding
from hypothesis import given, settings
from hypothesis import strategies as st
from random_programs import lockstep
from strategies import arrays_of, variable

import mirrored as mr

ONES = np.linspace(0, 1, COLUMNS, dtype=np.float32)


class Meeting:
    """The replicas of a program as threads, of which each runs it eagerly on its own rows."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.barrier = threading.Barrier(len(sizes), timeout=60)
        self.given: list[Any] = [None] * len(sizes)

    def run(self, program: Any, rows: list[np.ndarray]) -> list[Any]:
        def one(number: int) -> Any:
            try:
                with jax.disable_jit():
                    return program(ThreadContext(self, number), jnp.asarray(rows[number]), FakeVariable())
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(len(rows)) as pool:
            return list(pool.map(one, range(len(rows))))


class FakeVariable:
    """A copy of the variable on one replica."""

    value = jnp.asarray(ONES)

    def assign(self, value: jax.Array) -> None:
        self.value = value


class ThreadContext:
    """The context of one replica among threads."""

    def __init__(self, meeting: Meeting, number: int) -> None:
        self.meeting, self.number = meeting, number
        self.num_replicas_in_sync = len(meeting.sizes)
        self.replica_id_in_sync_group = jnp.int32(number)

    def meet(self, value: Any) -> list[Any]:
        self.meeting.given[self.number] = value
        self.meeting.barrier.wait()
        every = list(self.meeting.given)
        self.meeting.barrier.wait()
        return every

    def all_reduce(self, op: str, tree: Any) -> Any:
        weights = self.meeting.sizes if op == "mean" else (1,) * self.num_replicas_in_sync
        divisor = sum(weights) if op == "mean" else 1
        add = lambda *own: sum(w * value for w, value in zip(weights, own, strict=True) if w) / divisor  # noqa: E731
        return jax.tree.map(add, *self.meet(tree))

    def all_gather(self, value: jax.Array, axis: int) -> jax.Array:
        return jnp.concatenate(self.meet(value), axis)


# -- a program keeps two values on each replica: v of shape [4] and rows of shape [n, 4]


def on_v(function):
    return lambda ctx, v, rows, w: (function(ctx, v, rows), rows)


def on_rows(function):
    return lambda ctx, v, rows, w: (v, function(ctx, v, rows))


def collective(function):
    return on_v(lambda ctx, v, rows: jnp.tanh(function(ctx, v, rows)))


def assign(ctx, v, rows, w):
    w.assign(v)
    return v, rows


def plain_mean(ctx, v):
    """Return the mean over the replicas of a value that may be anything, such as a sum over rows."""
    return ctx.all_reduce("sum", v / ctx.num_replicas_in_sync)


def with_rows_in_a_loop(ctx, v, rows):
    """The body uses the rows, and carries them."""

    def body(i, carry):
        v, rows = carry
        total = jnp.tanh(ctx.all_reduce("sum", jnp.tanh(rows * v).sum(axis=0)))
        return total, rows - total

    return jax.lax.fori_loop(0, 2, body, (v, rows))[0]


def in_a_condition(ctx, v, rows):
    is_large = ctx.all_reduce("sum", jnp.asarray(rows.shape[0])) > 5
    return jax.lax.cond(is_large, lambda t: plain_mean(ctx, t), lambda t: plain_mean(ctx, -t), v)


def center(ctx, v, rows):
    total, count = ctx.all_reduce("sum", (jnp.sum(rows, axis=0), jnp.asarray(rows.shape[0], jnp.float32)))
    return rows - total / (count + 1)


def attend(ctx, v, rows):
    others = ctx.all_gather(rows, axis=0)
    return jnp.tanh(rows @ others.T @ others / (1 + others.shape[0]))


def mean_of_rows(ctx, v, rows):
    return ctx.all_reduce("mean", jnp.mean(jnp.concatenate([jnp.tanh(rows), jnp.cos(rows)]), axis=0))


def own_scan(ctx, v, rows):
    if isinstance(ctx, ThreadContext) and not len(rows):
        return v  # without jit JAX refuses a scan of no rows
    return jax.lax.scan(lambda c, row: (jnp.tanh(c + row), None), v, rows)[0]


#: Which leave v as mirrored as it was.
KEEPING = {
    "tanh": on_v(lambda ctx, v, rows: jnp.tanh(v)),
    "constant": on_v(lambda ctx, v, rows: v + ONES),
    "roll": on_v(lambda ctx, v, rows: jnp.roll(v, 1)),
    "read": lambda ctx, v, rows, w: (w.value + 0.5 * v, rows),
    # of a loop's result the proof assumes that the loop may run 0 times
    "in a loop": collective(lambda ctx, v, rows: jax.lax.fori_loop(0, 2, lambda i, t: plain_mean(ctx, t) + 1, v)),
    "in a loop with rows": collective(with_rows_in_a_loop),
    "scaled": on_rows(lambda ctx, v, rows: jnp.tanh(rows * v)),
    "fewer": on_rows(lambda ctx, v, rows: rows[: rows.shape[0] // 2]),
    "rest": on_rows(lambda ctx, v, rows: rows[1:]),
    "twice": on_rows(lambda ctx, v, rows: jnp.concatenate([rows, -rows])),
    "one more": on_rows(lambda ctx, v, rows: jnp.concatenate([rows, jnp.tanh(v)[None]])),
    "sorted": on_rows(lambda ctx, v, rows: jnp.sort(rows, axis=0)),
    "numbered": on_rows(lambda ctx, v, rows: jnp.tanh(rows + jnp.arange(rows.shape[0])[:, None].astype("float32"))),
    "skipped": on_rows(lambda ctx, v, rows: rows if rows.shape[0] < 2 else jnp.cos(rows)),
    "center": on_rows(center),
    "attend": on_rows(attend),
}
#: After which v is mirrored.
MIRRORING = {
    "sum of rows": collective(lambda ctx, v, rows: ctx.all_reduce("sum", jnp.tanh(rows).sum(axis=0))),
    "mean": collective(lambda ctx, v, rows: plain_mean(ctx, v)),
    "mean of rows": collective(mean_of_rows),
    "gathered": collective(lambda ctx, v, rows: jnp.sum(ctx.all_gather(v[None], axis=0) ** 2, axis=0)),
    "gathered rows": collective(lambda ctx, v, rows: jnp.max(ctx.all_gather(rows, axis=0), axis=0, initial=0.0)),
    "gathered columns": collective(lambda ctx, v, rows: jnp.sum(jnp.sin(ctx.all_gather(rows.T, axis=1)), axis=1)),
    "in a cond": collective(in_a_condition),
    "jit": jax.jit(collective(lambda ctx, v, rows: plain_mean(ctx, v)), static_argnums=(0, 3)),
}
#: After which v may differ by replica.
TAINTING = {
    "rank": on_v(lambda ctx, v, rows: v + ctx.replica_id_in_sync_group.astype("float32")),
    "own count": on_v(lambda ctx, v, rows: v / (1 + rows.shape[0]) + 0 * ctx.replica_id_in_sync_group),
    "own sum": on_v(lambda ctx, v, rows: v + jnp.tanh(rows).sum(axis=0)),
    "own constant": on_v(
        lambda ctx, v, rows: v * np.full(COLUMNS, rows.shape[0] - 1, np.float32) + 0 * ctx.replica_id_in_sync_group
    ),
    "own scan": on_v(own_scan),
}
OPERATIONS = {**KEEPING, **MIRRORING, **TAINTING, "assign": assign}


def expect(names):
    """Return whether v is mirrored in the end, and whether it was so at each assignment."""
    is_mirrored = may_assign = True
    for name in names:
        is_mirrored = (is_mirrored or name in MIRRORING) and name not in TAINTING
        may_assign &= is_mirrored or name != "assign"
    return is_mirrored, may_assign


def check_random_program(names, sizes):
    strategy = mr.MirroredStrategy(DEVICES[: len(sizes)])  # new: one step of many programs would warn
    rows = [data(n) + np.float32(i) for i, n in enumerate(sizes)]
    w = variable(ONES, strategy)
    seen = variable(0, strategy, synchronization="on_read", aggregation="sum")

    def program(ctx, rows, w):
        v = jnp.asarray(ONES)
        for name in names:
            v, rows = OPERATIONS[name](ctx, v, rows, w)
        return v, rows, w.value

    def step(rows):
        v, rows, _ = program(mr.get_replica_context(), rows, w)
        seen.assign_add(rows.shape[0])
        return v, rows

    is_mirrored, may_assign = expect(names)
    if not may_assign:
        with pytest.raises(mr.ReplicasDivergeError):
            strategy.run(step, args=(with_nan_padding(rows),))
        np.testing.assert_array_equal(w.value, ONES)
        assert int(seen.value) == 0
        return
    v, out = strategy.run(step, args=(with_nan_padding(rows),))
    strategy.assert_mirrored()
    assert isinstance(v, mr.PerReplica) is not is_mirrored
    expected = Meeting(sizes).run(program, rows)
    values = [v] * len(sizes) if is_mirrored else arrays_of(v)
    for ours, theirs in zip(zip(values, arrays_of(out), strict=True), expected, strict=True):
        for own, other in zip((*ours, w.numpy()), theirs, strict=True):
            np.testing.assert_allclose(own, other, rtol=2e-3, atol=2e-4)
    assert int(seen.value) == sum(len(own_rows) for _, own_rows, _ in expected)


PROGRAMS = st.lists(st.sampled_from(sorted(OPERATIONS)), min_size=2, max_size=9)
SIZES = st.sampled_from([(2, 1), (0, 3), (3, 2, 2), (1, 0, 0), (0, 4, 1), (1, 1, 0), (2, 2, 2), (2, 1, 0, 3, 2, 2, 0, 1)])


@given(names=PROGRAMS, sizes=SIZES)
@settings(max_examples=3, deadline=None, derandomize=True)
def test_random_programs_compute_what_threads_compute_and_only_mirrored_values_are_assigned(names, sizes):
    with lockstep.computed():
        check_random_program(names, sizes)


@pytest.mark.nightly(
    "tests/_program/uneven/test_random_programs.py::test_random_programs_compute_what_threads_compute_and_only_mirrored_values_are_assigned"
)
@pytest.mark.timeout(1200)
@given(names=PROGRAMS, sizes=SIZES)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_many_random_programs(names, sizes):
    """A collective of one line that is used twice may be refused, see docs/LOG.md; what runs is right."""
    try:
        check_random_program(names, sizes)
    except mr.UnevenReplicasError as refusal:
        assert "collectives of one kind in different orders" in str(refusal), refusal
