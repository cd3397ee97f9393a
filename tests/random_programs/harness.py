"""Runs the text of a program on one device and in a way of `mirrored`, and compares the numbers."""

import contextlib
import copy
import functools
import itertools
import linecache
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from random_programs import lockstep
from random_programs.grammar import Program
from strategies import divide_small_arrays

import mirrored as mr

Batch = dict[str, Any]
OWN_ERRORS = tuple(getattr(mr, name) for name in dir(mr) if name.endswith("Error") and isinstance(getattr(mr, name), type))


@functools.cache
def batches(sizes: tuple[int, ...]) -> list[Batch]:
    """Make global batches of so many rows, which are the same whatever follows."""
    draw, n = np.random.default_rng(0), 50
    rows = {
        "x": draw.normal(size=(n, 4)).astype(np.float32),
        "seq": draw.normal(size=(n, 3, 4)).astype(np.float32),
        "y": draw.normal(size=n).astype(np.float32),
        "label": draw.integers(0, 4, n).astype(np.int32),
        "weight": draw.uniform(0.5, 2, n).astype(np.float32),
        "tokens": draw.integers(0, 6, (n, 3)).astype(np.int32),
        "mask": np.arange(3) < draw.integers(1, 4, n)[:, None],
        "id": np.arange(n, dtype=np.int32),
    }
    starts = np.cumsum([0, *sizes])
    return [{name: array[a:b] for name, array in rows.items()} for a, b in itertools.pairwise(starts)]


# -- what a text names


class batch:
    """The rows of a batch on one device: all are there."""

    mean = sum = max = gather = staticmethod(lambda tree: tree)
    scan, cond, fori_loop = staticmethod(jax.lax.scan), staticmethod(jax.lax.cond), staticmethod(jax.lax.fori_loop)


class replicas:
    """The rows of a batch in a step of one replica."""

    mean = staticmethod(lambda tree: mr.get_replica_context().all_reduce("mean", tree))
    sum = staticmethod(lambda tree: mr.get_replica_context().all_reduce("sum", tree))
    max = staticmethod(lambda value: jax.lax.pmax(value, "replica"))
    gather = staticmethod(lambda tree: mr.get_replica_context().all_gather(tree, axis=0))
    scan, cond, fori_loop = staticmethod(mr.scan), staticmethod(mr.cond), staticmethod(mr.fori_loop)


def normal(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype(np.float32)


def norm(h: jax.Array) -> jax.Array:
    mean = h.mean(-1, keepdims=True)
    return (h - mean) / jnp.sqrt(((h - mean) ** 2).mean(-1, keepdims=True) + 0.1)


def dropout(h: jax.Array, key: jax.Array, ids: jax.Array) -> jax.Array:
    """Drop by the number of the row: the same on any number of replicas."""
    keep = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 0.7, h.shape[1:]))(ids)
    return jnp.where(keep, h / 0.7, 0)


@jax.custom_vjp
def clipped(h: jax.Array) -> jax.Array:
    """Return h, whose gradient is cut off."""
    return h


clipped.defvjp(lambda h: (h, None), lambda _, g: (0.5 * jnp.tanh(g),))


@jax.custom_jvp
def softsign(h: jax.Array) -> jax.Array:
    return h / (1 + jnp.abs(h))


softsign.defjvp(lambda p, t: (softsign(*p), t[0] / (1 + jnp.abs(p[0])) ** 2))


def small(array: jax.Array) -> jax.Array:
    return array.astype(jnp.bfloat16)


def with_weights(module: Any, **weights: Any) -> Any:
    """Return a module of Equinox or NNX with other weights."""
    if isinstance(module, eqx.Module):
        return eqx.tree_at(lambda m: [getattr(m, name) for name in weights], module, list(weights.values()))
    for name, weight in weights.items():
        setattr(module, name, weight)
    return module


class Net(nnx.Module):
    """The weights of a program."""

    def __init__(self, params: dict[str, Any], not_trained: list[str]) -> None:
        kind = {name: nnx.BatchStat if name in not_trained else nnx.Param for name in params}
        self.weights = nnx.data({name: kind[name](jnp.asarray(value)) for name, value in params.items()})


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
        return h + jnp.tanh(linen.Dense(4, use_bias=False)(h)), None


STACK = linen.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)()
EQX_NORM, EQX_STATE = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "rows", eps=0.1, mode="batch")

NAMES = {"mr": mr, "jax": jax, "jnp": jnp, "np": np, "optax": optax, "batch": batch, "replicas": replicas, "normal": normal}
NAMES |= {"norm": norm, "dropout": dropout, "clipped": clipped, "softsign": softsign}
NAMES |= {"eqx": eqx, "linen": linen, "nnx": nnx, "small": small, "with_weights": with_weights, "Net": Net}
NAMES |= {"LINEN_STACK": STACK, "EQX_NORM": EQX_NORM, "EQX_STATE": EQX_STATE}
NAMES |= {"zeros": lambda n: np.zeros(n, np.float32), "ones": lambda n: np.ones(n, np.float32)}


def executed(seed: int, text: str) -> dict[str, Any]:
    """Return the names that a text defines; tracebacks show its lines."""
    file = f"<program {seed}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    names = dict(NAMES)
    exec(compile(text, file, "exec"), names)
    return names


# -- one device


def alone(names: dict[str, Any], sizes: tuple[int, ...], jit: Any = jax.jit) -> list[tuple[Any, Any]]:
    """Train on one device, in plain JAX: after each step the parameters and what is beside them, and its results."""
    p, tx, not_trained = dict(names["PARAMS"]), names["tx"], names["NOT_TRAINED"]
    state = tx.init({name: a for name, a in p.items() if name not in not_trained})
    ema, seen, positive, after = dict(p), 0.0, 0, []
    one = jit(step_alone(names))
    for t, b in enumerate(batches(sizes)):
        p, state, value, h, norm = one(p, state, b, np.int32(t))
        if t % names["EMA_EVERY"] == 0:
            ema = {name: 0.9 * ema[name] + 0.1 * p[name] for name in ema}
        seen += b["weight"].sum()
        positive += (np.asarray(h)[:, 0] > 0).sum()
        results = {"loss": value, "rows": h, "norm": norm, "error": np.abs(b["y"]).mean()}
        after.append(({"p": p, "ema": ema, "seen": seen, "right": positive, "last": b["y"].mean()}, results))
    return after


def step_alone(names: dict[str, Any]) -> Callable[..., Any]:
    def step(p: Any, state: Any, b: Batch, t: Any) -> Any:
        trained = {name: a for name, a in p.items() if name not in names["NOT_TRAINED"]}
        loss = lambda trained: names["loss_on_one_device"]({**p, **trained}, b, t)  # noqa: E731
        (value, (h, aux)), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        updates, state = names["tx"].update(gradients, state, trained)
        return {**p, **optax.apply_updates(trained, updates), **aux}, state, value, h, optax.tree.norm(gradients)

    return step


# -- ways


class Way(NamedTuple):
    """Where replicas are, and the steps: how each is called, and the rows of its batch on all replicas together."""

    name: str
    num_replicas: int
    devices: int | None = None
    shard_state: bool = False
    schedule: str = "together"
    calls: tuple[str, ...] = ("run", "run")
    sizes: tuple[int, ...] = (5, 5)

    def strategy(self) -> mr.Strategy:
        devices = [f"cpu:{i}" for i in range(self.devices or self.num_replicas)]
        virtual = {"num_replicas": self.num_replicas, "schedule": self.schedule} if self.devices else {}
        return mr.MirroredStrategy(devices, **virtual)

    def first(self, count: int) -> Self:
        """Return a way of the first steps of this one."""
        return self._replace(calls=self.calls[:count], sizes=self.sizes[:count])

    def names(self) -> set[str]:
        """Name the ways in which a step is called."""
        kinds = [f"odd with {size}" if size % self.num_replicas else "even" for size in self.sizes]
        return {f"{self.name}, {call}, {kind}" for call, kind in zip(self.calls, kinds, strict=True)}


def collected(strategy: mr.Strategy, results: Any, axis: int = 0) -> Any:
    def of_all(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, mr.PerReplica):
            return leaf
        return strategy.gather(leaf, axis) if name == "rows" else strategy.reduce("sum", leaf)

    return {name: of_all(name, leaf) for name, leaf in results.items()}


def own_rows(rows: Batch, context: Any) -> Batch:
    return {name: of_all[context.replica_id_in_sync_group] for name, of_all in rows.items()}


def steps_of(strategy: mr.Strategy, step: Callable[[Any, Batch], Any], way: Way, carry: Any) -> tuple[Any, list[Any]]:
    """Run the steps: what they hand on at last, and the results of each."""
    holds_objects = any(isinstance(leaf, nnx.Module) for leaf in (carry if isinstance(carry, tuple) else ()))
    steps, results = list(zip(way.calls, batches(way.sizes), strict=True)), []
    dataset = iter(strategy.distribute_dataset([b for call, b in steps if call != "scan"]))

    def run(carry: Any, b: Batch) -> Any:
        carry, result = strategy.run(step, args=(carry, b))
        return carry, collected(strategy, result)

    called = {"run": run, "function": mr.function(run)}
    for call, group in itertools.groupby(steps, lambda each: each[0]):
        data = [b for _, b in group]
        if call == "scan":
            rows = jax.tree.map(lambda *a: np.stack([np.split(leaf, way.num_replicas) for leaf in a], 1), *data)
            rows = strategy.distribute_values_from_function(functools.partial(own_rows, rows))
            carry, stacked = mr.scan(lambda carry, b: strategy.run(step, args=(carry, b)), carry, rows)
            stacked = collected(strategy, stacked, 1)
            results += [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(len(data))]
            continue
        for b in itertools.islice(dataset, len(data)):
            given = called[call](carry, b)
            carry = carry if holds_objects else given[0]
            results.append(given[1])
    return carry, results


class Outcome(NamedTuple):
    """How a program ended in a way: ok, refused (by us, and it runs with the line that the message says), stuck (refused, and no
    line helps), wrong, warned, or broken (another's exception)."""

    kind: str
    words: str = ""


#: Of numbers of 32 bits, and of those that were computed in 16 (bfloat16 has 8 digits, so each rounding is up to 2**-9 of a
#: number, and replicas round at other places than one device: a gradient is a sum over rows, rounded for each replica).
TOLERANCES = {False: {"rtol": 1e-3, "atol": 1e-4}, True: {"rtol": 2**-5, "atol": 2**-6}}


def difference(ours: Any, right: Any, is_small: bool = False) -> str:
    """Tell the first number that differs; one device may have computed more than is asked for."""
    for path, own in jax.tree_util.tree_leaves_with_path(ours):
        value = functools.reduce(lambda tree, key: tree[key.key if hasattr(key, "key") else key.idx], path, right)
        own, value = np.asarray(own, np.float64), np.asarray(value, np.float64)
        if own.shape != value.shape or not np.allclose(own, value, **TOLERANCES[is_small]):
            return f"{jax.tree_util.keystr(path)} is {own.tolist()}, on one device {value.tolist()}"[:300]
    return ""


#: What a message says to write -> the text of programs, and what it becomes.
REMEDIES = {
    "write mr.losses.compute_average_loss(per_example_loss)": {
        "mr.losses.mean_over_own_rows(l.mean())": "mr.losses.compute_average_loss(l)",
        "mr.losses.mean_over_own_rows(l.mean() + penalty)":
            "mr.losses.compute_average_loss(l) + mr.losses.scale_regularization_loss(penalty)",
    },
}  # fmt: skip


def follow(program: Program, way: Way, right: list[tuple[Any, Any]], refused: Outcome) -> Outcome:
    """Write what a refusal says: it is one only if the program runs then."""
    for words, texts in REMEDIES.items():
        text = program.text
        for old, new in texts.items():
            text = text.replace(old, new)
        if words in refused.words and text != program.text:
            end = judge(program, executed(program.seed, text), way, right)
            return refused if end.kind == "ok" else Outcome("stuck", f"{refused.words} ... and then {end.kind}: {end.words}")
    return Outcome("stuck", refused.words)


def judge(program: Program, names: dict[str, Any], way: Way, right: list[tuple[Any, Any]]) -> Outcome:
    with warnings.catch_warnings(record=True) as said, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        try:
            strategy = way.strategy()
            divide_small_arrays(patch, 16)  # with `shard_state`
            step, read, carry = names["make"](strategy, way.shard_state)
            carry, results = steps_of(strategy, step, way, carry)
            if wrong := difference((read(carry), results), (right[len(results) - 1][0], [r for _, r in right]), program.is_small):
                return Outcome("wrong", wrong)
            strategy.assert_mirrored()
        except Exception as error:
            is_own = "/mirrored/" in (traceback.extract_tb(error.__traceback__)[-1].filename) or isinstance(error, OWN_ERRORS)
            return Outcome("refused" if is_own else "broken", f"{type(error).__name__}: {error}")
    own = [w for w in said if "persistent compilation cache" not in str(w.message)]
    if "stop_gradient" in program.text:  # nothing that is trained may depend on the rows, as the warning says
        own = [w for w in own if "computed the same gradients" not in str(w.message)]
    return Outcome("warned", f"{own[0].category.__name__}: {own[0].message}") if own else Outcome("ok")


def judge_without_casts(program: Program, way: Way, jit: Any) -> Outcome:
    """Judge a program of 16 bits with 32: where replicas round at other places, a training of 16 bits may go another way."""
    wide = copy.copy(program)
    wide.is_small = False
    names = executed(program.seed, program.text.replace(".astype(jnp.bfloat16)", ""))
    names["small"] = lambda array: array
    return judge(wide, names, way, alone(names, way.sizes, jit))


#: Where replicas may be, and how they are scheduled.
PLACES = (
    Way("R1", 1), Way("R2", 2), Way("R2, sharded", 2, shard_state=True), Way("R3", 3), Way("R3, sharded", 3, shard_state=True),
    Way("R4 on 2", 4, 2), *(Way(f"R{count} on 1, one by one", count, 1, schedule="one_by_one") for count in (3, 4)),
)  # fmt: skip
#: How a step is called: by `strategy.run`, and so in a `mr.function` or a `mr.scan`, which all use its one program.
CALLS = ("run", "function", "scan")


def ways_of(program: Program) -> list[Way]:
    """Choose three or four ways to call the step, with even batches and with odd ones: in one place, or in two.

    Most of the time goes to the traces, of which each number of rows needs one on one device, and one in each place.
    """
    draw, its = program.random, CALLS[:2] if program.is_nnx else CALLS  # `mr.scan` carries no objects
    if program.chance(0.5):
        place = draw.choice(PLACES[1:])
        even, odd = draw.choice({2: [(6, 5)], 3: [(6, 5), (6, 5), (6, 2)], 4: [(8, 7)]}[place.num_replicas])
        of_even = draw.sample(its, 2)  # four steps: a training that diverges multiplies what rounding does in each
        blocks = [(even, of_even), (odd, [draw.choice(CALLS[:2])] * (1 if "scan" in of_even else 2))]
        draw.shuffle(blocks)
        steps = [(call, rows) for rows, calls in blocks for call in calls for _ in range(1 + (call == "scan"))]
        calls, sizes = zip(*steps, strict=True)
        return [place._replace(calls=calls, sizes=sizes)]
    rows = draw.choice((5, 6, 6, 6, 7, 8, 8, 2))  # of two rows, a third replica has none
    one = draw.choice([place for place in PLACES if rows % place.num_replicas == 0])
    other = draw.choice([place for place in PLACES if rows % place.num_replicas])
    first, second = draw.sample(its, 2)
    called = (first, second, second) if second == "scan" else (first, first, second)
    return [
        one._replace(calls=called, sizes=(rows,) * 3),
        other._replace(calls=("run", "run", draw.choice(CALLS[:2])), sizes=(rows,) * 3),
    ]


#: Of so many programs XLA compiles one, two steps in one place; the others are computed without it (`lockstep`).
COMPILED = 20
#: A loss on one device from which a training is no longer followed: each further step multiplies what rounding has done.
DIVERGED = 1e3


def check(seed: int, one_compiled_of: int = COMPILED) -> list[tuple[int, str, Outcome]]:
    """Run a program in its ways: how each has ended."""
    program = Program(seed)
    is_compiled = seed % one_compiled_of == 0
    ways, names, outcomes = ways_of(program), executed(seed, program.text), []
    jit = jax.jit if is_compiled else lockstep.jit
    with contextlib.nullcontext() if is_compiled else lockstep.patched():
        ways = [ways[-1].first(2)] if is_compiled else ways
        try:
            right = alone(names, ways[0].sizes, jit)
        except Exception as error:  # the generator's fault: it runs on no device
            return [(seed, "one device", Outcome("broken", f"{type(error).__name__}: {error}"))]
        calm = itertools.takewhile(lambda after: abs(after[1]["loss"]) < DIVERGED, right)
        count = max(1, len(list(calm)))
        for way in (each.first(count) for each in ways):
            outcome = judge(program, names, way, right)
            outcome = follow(program, way, right, outcome) if outcome.kind == "refused" else outcome
            if outcome.kind == "wrong" and program.is_small:
                outcome = judge_without_casts(program, way, jit)
            outcomes += [(seed, name, outcome) for name in (way.names() if outcome.kind == "ok" else [way.name])]
    linecache.cache.pop(f"<program {seed}>", None)
    return outcomes
