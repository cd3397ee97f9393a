"""Programs that people write, each with the same by hand in plain JAX: an entry is a class, and adding one is all there is to do.

`test_programs.py` runs each in every way of running. A step gives back what it carries on, and a dict of results: a replica's
numbers are shares that add up, and rows (names that begin with "rows") are put together in order.
"""

# ruff: noqa: RUF012  (an entry's fields are never changed)

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mirrored as mr

Batch = dict[str, Any]
PROGRAMS: dict[str, type["Program"]] = {}


def batches(sizes: list[int]) -> list[Batch]:
    """Make global batches of so many rows: features, targets, labels, weights, padded tokens, and a number for each row."""
    random, n = np.random.default_rng(0), sum(sizes)
    x = random.normal(size=(n, 3)).astype(np.float32)
    rows = {
        "x": x,
        "y": (x @ np.float32([1, -2, 3]) + 0.5).astype(np.float32),
        "label": random.integers(0, 3, n).astype(np.int32),
        "weight": random.uniform(0.5, 2, n).astype(np.float32),
        "tokens": random.integers(0, 6, (n, 4)).astype(np.int32),
        "mask": np.arange(4) < random.integers(1, 5, n)[:, None],
        "id": np.arange(n, dtype=np.int32),
    }
    starts = np.cumsum([0, *sizes])
    return [{name: array[a:b] for name, array in rows.items()} for a, b in itertools.pairwise(starts)]


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.5, shape).astype(np.float32)


def linear(p: Any, b: Batch) -> jax.Array:
    return b["x"] @ p["w"] + p["b"]


def square(p: Any, b: Batch) -> jax.Array:
    return (linear(p, b) - b["y"]) ** 2


def cross_entropy(logits: jax.Array, b: Batch) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, b["label"])


def ctx() -> Any:
    return mr.get_replica_context()


LINEAR = {"w": np.zeros(3, np.float32), "b": np.float32(0)}
MLP = {"first": normal(3, 8), "second": normal(8, 3, seed=2)}


class Program:
    """README's loop: a loss for each example, averaged over the global batch, and an optimizer.

    An entry says its `losses`, or `loss` and `share`, or `step` and `plain`; in a step `self.v` are the variables.
    """

    params: ClassVar[Any] = LINEAR
    tx: ClassVar[Any] = optax.sgd(0.1)
    #: What the first step is given besides the batch; later ones what the step before has returned.
    carry: ClassVar[Any] = None
    has_optimizer: ClassVar[bool] = True
    is_slow: ClassVar[bool] = False
    rtol: ClassVar[float] = 2e-4
    #: Ways of running, by words in their names, that are refused: the error, and words of its message.
    refuses: ClassVar[dict[str, tuple[type[BaseException], str]]] = {}

    def __init_subclass__(cls) -> None:
        PROGRAMS[cls.__name__] = cls

    @classmethod
    def has_readmes_step(cls) -> bool:
        """Return whether the losses are all that it says: these programs differ in what a model is made of."""
        return (cls.step, cls.share) == (Program.step, Program.share)

    def start(self, strategy: mr.Strategy, shard_state: bool) -> None:
        """Make the variables."""
        with strategy.scope():
            self.v = jax.tree.map(mr.Variable, self.params)
            self.optimizer = mr.Optimizer(self.tx, self.v, shard_state=shard_state)
            self.more()

    def more(self) -> None:
        """Make what an entry has besides."""

    def read(self) -> Any:
        """Return the variables' values outside of a step."""
        return jax.tree.map(np.asarray, self.v)

    def values(self) -> Any:
        return jax.tree.map(jnp.asarray, self.v)

    def losses(self, p: Any, b: Batch) -> jax.Array:
        """Return one loss for each row."""
        return square(p, b)

    def share(self, b: Batch) -> jax.Array:
        """Return the replica's share of the loss, in a step."""
        return mr.losses.compute_average_loss(self.losses(self.values(), b))

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        value, gradients = mr.value_and_grad(lambda: self.share(b), self.v)()
        self.optimizer.apply_gradients(gradients)
        return carry, {"loss": value}

    def loss(self, p: Any, b: Batch) -> jax.Array:
        """Return the loss of a whole batch, on one device."""
        return jnp.mean(self.losses(p, b))

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        """Do a step on one device: change `s` (params, state of the optimizer, carry), and return the results.

        `parts` are the replicas' rows, where what is documented depends on them.
        """
        value, gradients = jax.value_and_grad(self.loss)(s["params"], b)
        self.update(s, gradients)
        return {"loss": value}

    def update(self, s: dict[str, Any], gradients: Any) -> None:
        updates, s["state"] = self.tx.update(gradients, s["state"], s["params"])
        s["params"] = optax.apply_updates(s["params"], updates)


# -- one loss for each example, README's step: what a model is made of


class Readme(Program):
    tx = optax.adam(0.1)


class ClippedAdam(Program):
    params = MLP
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.05))

    def losses(self, p: Any, b: Batch) -> jax.Array:
        return cross_entropy(jnp.tanh(b["x"] @ p["first"]) @ p["second"], b)


class MixedPrecision(Program):
    rtol = 2e-2

    def losses(self, p: Any, b: Batch) -> jax.Array:
        half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
        return (linear(half, {"x": b["x"].astype(jnp.bfloat16)}).astype(jnp.float32) - b["y"]) ** 2


class Convolution(Program):
    params = {"kernel": normal(2, 1, 4), "out": normal(4, 3)}
    is_slow = True

    def losses(self, p: Any, b: Batch) -> jax.Array:
        x = jax.lax.conv_general_dilated(b["x"][..., None], p["kernel"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
        return cross_entropy(jnp.max(jax.nn.relu(x), axis=1) @ p["out"], b)


class Lstm(Program):
    params = {"embedding": normal(6, 2), "gates": normal(4, 8), "out": normal(2, 3)}
    is_slow = True

    def losses(self, p: Any, b: Batch) -> jax.Array:
        def cell(carry: Any, token: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(jnp.concatenate([p["embedding"][token], h], axis=1) @ p["gates"], 4, axis=1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((b["tokens"].shape[0], 2))
        (h, _), _ = jax.lax.scan(cell, (zeros, zeros), b["tokens"].T)
        return cross_entropy(h @ p["out"], b)


class Attention(Program):
    params = {"embedding": normal(6, 4), "qkv": normal(4, 12), "out": normal(4, 6)}
    is_slow = True

    def losses(self, p: Any, b: Batch) -> jax.Array:
        q, k, v = jnp.split(jax.nn.standardize(p["embedding"][b["tokens"]]) @ p["qkv"], 3, axis=-1)
        scores = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), q @ jnp.swapaxes(k, 1, 2), -1e9)
        logits = jax.nn.softmax(scores) @ v @ p["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], b["tokens"][:, 1:]).mean(axis=1)


class Remat(Program):
    params = MLP

    def losses(self, p: Any, b: Batch) -> jax.Array:
        hidden = jax.checkpoint(lambda w, x: jax.nn.gelu(x @ w))
        return cross_entropy(hidden(p["first"], b["x"]) @ p["second"], b)


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    """Return x, whose gradient is cut off."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


class CustomVjp(Program):
    def losses(self, p: Any, b: Batch) -> jax.Array:
        return (clipped(linear(p, b)) - b["y"]) ** 2


class Conditions(Program):
    def losses(self, p: Any, b: Batch) -> jax.Array:
        is_large = jnp.abs(p["w"]).sum() > 0.1
        error = linear(p, b) - b["y"]
        return jax.lax.cond(is_large, lambda e: jnp.abs(e), lambda e: jnp.where(jnp.abs(e) < 1, e**2, jnp.abs(e)), error)


class FixedPoint(Program):
    def losses(self, p: Any, b: Batch) -> jax.Array:
        def body(state: Any) -> Any:
            return state[0] + 1, jnp.tanh(state[1] * 0.5 + b["x"][:, 0])

        _, z = jax.lax.while_loop(lambda state: state[0] < 5, body, (0, jnp.zeros(b["x"].shape[0])))
        return (linear(p, b) - jax.lax.stop_gradient(z)) ** 2


class GradientPenalty(Program):
    params = MLP
    is_slow = True

    def losses(self, p: Any, b: Batch) -> jax.Array:
        judge = lambda x: jnp.sum(jnp.tanh(x @ p["first"]) @ p["second"])  # noqa: E731
        slopes = jax.vmap(jax.grad(judge))(b["x"])
        return jax.vmap(judge)(b["x"]) + (jnp.sum(slopes**2, axis=1) - 1) ** 2


class NnxInPieces(Program):
    params = {"kernel": normal(3, 3), "bias": normal(3)}

    def losses(self, p: Any, b: Batch) -> jax.Array:
        from flax import nnx

        graph, state = nnx.split(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
        nnx.replace_by_pure_dict(state, p)
        return cross_entropy(nnx.merge(graph, state)(b["x"]), b)


class Keras(Program):
    params = {"kernel": normal(3, 3), "bias": normal(3)}
    is_slow = True

    def start(self, strategy: mr.Strategy, shard_state: bool) -> None:
        self.layer()  # made before, outside of the scope
        super().start(strategy, shard_state)

    @staticmethod
    @functools.cache
    def layer() -> Any:
        import keras

        layer = keras.layers.Dense(3)
        layer.build((None, 3))
        return layer

    def losses(self, p: Any, b: Batch) -> jax.Array:
        logits, _ = self.layer().stateless_call([p["kernel"], p["bias"]], [], b["x"])
        return cross_entropy(logits, b)


class DropoutOfRows(Program):
    """Noise that goes with the row: the same on any number of replicas."""

    params = MLP
    is_slow = True

    def losses(self, p: Any, b: Batch) -> jax.Array:
        keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(3), i))(b["id"])
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (8,)))(keys)
        return cross_entropy(jnp.where(keep, jax.nn.relu(b["x"] @ p["first"]) * 2, 0) @ p["second"], b)


# -- a loss with a step of its own


class Regularized(Program):
    params = MLP
    tx = optax.sgd(0.1, momentum=0.9)

    def losses(self, p: Any, b: Batch) -> jax.Array:
        return cross_entropy(jax.nn.relu(b["x"] @ p["first"]) @ p["second"], b) * b["weight"]

    def loss(self, p: Any, b: Batch) -> jax.Array:
        return jnp.mean(self.losses(p, b)) + 0.01 * optax.tree.norm(p, squared=True)

    def share(self, b: Batch) -> jax.Array:
        p = self.values()
        losses = cross_entropy(jax.nn.relu(b["x"] @ p["first"]) @ p["second"], b)
        penalty = mr.losses.scale_regularization_loss(0.01 * optax.tree.norm(p, squared=True))
        return mr.losses.compute_average_loss(losses, sample_weight=b["weight"]) + penalty


class MeanOfOwnRows(Program):
    def losses(self, p: Any, b: Batch) -> jax.Array:
        return optax.huber_loss(linear(p, b), b["y"])

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        value, gradients = mr.value_and_grad(lambda: self.losses(self.values(), b).mean(), self.v)()
        self.optimizer.apply_gradients(gradients, aggregate="mean")
        return carry, {"loss": ctx().all_reduce("mean", value, by_rows=True)}


class PaddedTokens(Program):
    """The mean over all real tokens of the batch, not over rows."""

    params = {"embedding": normal(6, 3)}

    def losses(self, p: Any, b: Batch) -> jax.Array:
        return jnp.sum(p["embedding"][b["tokens"]] ** 2, axis=-1) * b["mask"]

    def loss(self, p: Any, b: Batch) -> jax.Array:
        return self.losses(p, b).sum() / b["mask"].sum()

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        tokens = ctx().all_reduce("sum", b["mask"].sum())
        value, gradients = mr.value_and_grad(lambda: self.losses(self.values(), b).sum() / tokens, self.v)()
        self.optimizer.apply_gradients(gradients, aggregate="sum")
        return carry, {"loss": value}


class NormalizedAdvantages(Program):
    def surrogate(self, p: Any, b: Batch, mean: jax.Array, deviation: jax.Array) -> jax.Array:
        ratio, advantages = jnp.exp(linear(p, b)), (b["y"] - mean) / (deviation + 1e-8)
        return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages)

    def share(self, b: Batch) -> jax.Array:
        rows = ctx().all_reduce("sum", b["y"].shape[0])
        mean = ctx().all_reduce("sum", b["y"].sum()) / rows
        deviation = jnp.sqrt(ctx().all_reduce("sum", jnp.sum((b["y"] - mean) ** 2)) / rows)
        return mr.losses.compute_average_loss(self.surrogate(self.values(), b, mean, deviation))

    def loss(self, p: Any, b: Batch) -> jax.Array:
        return self.surrogate(p, b, b["y"].mean(), b["y"].std()).mean()


class Contrastive(Program):
    params = {"w": normal(3, 4)}

    def share(self, b: Batch) -> jax.Array:
        everyone, z = ctx().all_gather(b["id"], axis=0), jnp.tanh(b["x"] @ self.v["w"])
        logits = z @ ctx().all_gather(z, axis=0).T
        return mr.losses.compute_average_loss(optax.softmax_cross_entropy(logits, b["id"][:, None] == everyone))

    def loss(self, p: Any, b: Batch) -> jax.Array:
        z = jnp.tanh(b["x"] @ p["w"])
        return optax.softmax_cross_entropy(z @ z.T, b["id"][:, None] == b["id"]).mean()


class GlobalMoments(Program):
    """Normalization over all replicas' rows, and its moving averages."""

    params = {
        "trained": {"w": normal(3, 4), "scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32), "out": normal(4, 3)},
        "stats": {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)},
    }

    def normalized(self, p: Any, h: jax.Array, average: Callable[[Any], Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return values of all rows, normalized, and the new averages; `average` is the mean over the replicas."""
        mean, squares = average((h.mean(0), (h**2).mean(0)))
        new = {"mean": mean, "var": squares - mean**2}
        h = (h - mean) / jnp.sqrt(new["var"] + 1e-3) * p["trained"]["scale"] + p["trained"]["bias"]
        return h, jax.tree.map(lambda old, now: 0.9 * old + 0.1 * now, p["stats"], new)

    def losses_of(self, p: Any, b: Batch, average: Callable[[Any], Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        h, stats = self.normalized(p, b["x"] @ p["trained"]["w"], average)
        return cross_entropy(h @ p["trained"]["out"], b), stats

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        def loss() -> tuple[jax.Array, Any]:
            losses, stats = self.losses_of(self.values(), b, lambda tree: ctx().all_reduce("mean", tree))
            return mr.losses.compute_average_loss(losses), stats

        (value, stats), gradients = mr.value_and_grad(loss, self.v["trained"], has_aux=True)()
        self.optimizer.apply_gradients({"trained": gradients, "stats": dict.fromkeys(stats)})
        for name, variable in self.v["stats"].items():
            variable.assign(stats[name])
        return carry, {"loss": value}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        def loss(p: Any) -> tuple[jax.Array, Any]:
            losses, stats = self.losses_of(p, b, lambda tree: tree)
            return losses.mean(), stats

        (value, stats), gradients = jax.value_and_grad(loss, has_aux=True)(s["params"])
        self.update(s, gradients)
        s["params"]["stats"] = stats
        return {"loss": value}


class LinenNorm(GlobalMoments):
    is_slow = True

    def more(self) -> None:
        import flax.linen  # noqa: F401  (a step looks for layers of what is imported before it)

    def normalized(self, p: Any, h: jax.Array, average: Callable[[Any], Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        import flax.linen as nn

        own = {name: p["trained"][name] for name in ("scale", "bias")}
        variables = {"params": own, "batch_stats": p["stats"]}
        h, new = nn.BatchNorm(use_running_average=False).apply(variables, h, mutable=["batch_stats"])
        return h, new["batch_stats"]


class EquinoxNorm(GlobalMoments):
    is_slow = True

    def more(self) -> None:
        import equinox  # noqa: F401

    def normalized(self, p: Any, h: jax.Array, average: Callable[[Any], Any]) -> tuple[jax.Array, dict[str, jax.Array]]:
        import equinox as eqx

        layer, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, "rows", mode="batch")
        layer = eqx.tree_at(lambda m: (m.weight, m.bias), layer, (p["trained"]["scale"], p["trained"]["bias"]))
        state = state.set(layer.batch_state_index, (p["stats"]["mean"], p["stats"]["var"]))
        h, state = jax.vmap(layer, axis_name="rows", in_axes=(0, None), out_axes=(0, None))(h, state)
        return h, dict(zip(("mean", "var"), state.get(layer.batch_state_index), strict=True))


class CentredWithAMeanLoss(Program):
    """A gradient that has come back through a collective cannot be weighed afterwards."""

    refuses = dict.fromkeys(("odd", "empty"), (mr.UnevenReplicasError, r"come back through a collective.*aggregate='sum'"))

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        def loss() -> jax.Array:
            h = linear(self.values(), b)
            return jnp.mean((h - ctx().all_reduce("mean", jnp.mean(h)) - b["y"]) ** 2)

        _, gradients = mr.value_and_grad(loss, self.v)()
        self.optimizer.apply_gradients(gradients, aggregate="mean")
        return carry, {}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        def loss(p: Any) -> jax.Array:
            h = linear(p, b)
            return jnp.mean((h - jnp.mean(h) - b["y"]) ** 2)

        self.update(s, jax.grad(loss)(s["params"]))
        return {}


class AccumulatedByScan(Program):
    refuses = dict.fromkeys(("odd", "empty"), (TypeError, "cannot reshape"))

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        rows, parts = ctx().all_reduce("sum", b["y"].shape[0]), jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), b)

        def add(total: Any, part: Batch) -> tuple[Any, None]:
            loss = lambda: mr.losses.compute_average_loss(square(self.values(), part), global_batch_size=rows)  # noqa: E731
            return jax.tree.map(jnp.add, total, mr.value_and_grad(loss, self.v)()), None

        (value, gradients), _ = mr.scan(add, (0.0, jax.tree.map(jnp.zeros_like, self.values())), parts)
        self.optimizer.apply_gradients(gradients)
        return carry, {"loss": value}


class Gan(Program):
    params = {"g": np.float32([1, 0]), "d": np.float32([0.1, 0])}
    is_slow = True

    def more(self) -> None:
        self.optimizers = [mr.Optimizer(optax.sgd(0.1), [self.v[name]]) for name in "dg"]

    def d_losses(self, p: Any, b: Batch) -> jax.Array:
        return jax.nn.softplus(-p["d"][0] * b["y"] - p["d"][1]) + jax.nn.softplus(-self.g_logits(p, b))

    def g_logits(self, p: Any, b: Batch) -> jax.Array:
        return -p["d"][0] * (p["g"][0] * b["x"][:, 0] + p["g"][1]) - p["d"][1]

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        of_d = lambda: mr.losses.compute_average_loss(self.d_losses(self.values(), b))  # noqa: E731
        of_g = lambda: mr.losses.compute_average_loss(jax.nn.softplus(self.g_logits(self.values(), b)))  # noqa: E731
        results = {}
        for name, loss, optimizer in zip("dg", (of_d, of_g), self.optimizers, strict=True):
            results[name], gradients = mr.value_and_grad(loss, [self.v[name]])()
            optimizer.apply_gradients(gradients)
        return carry, results

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        results = {}
        for name, losses in (("d", self.d_losses), ("g", lambda p, b: jax.nn.softplus(self.g_logits(p, b)))):
            loss = lambda own, name=name, losses=losses: losses({**s["params"], name: own}, b).mean()  # noqa: E731
            results[name], gradient = jax.value_and_grad(loss)(s["params"][name])
            s["params"][name] = s["params"][name] - 0.1 * gradient
        return results


class PrivateGradients(Program):
    """A gradient for each example, each clipped by its own norm."""

    @staticmethod
    def clipped_sum(p: Any, b: Batch) -> Any:
        one = lambda x, y: jax.grad(lambda p: (x @ p["w"] + p["b"] - y) ** 2)(p)  # noqa: E731
        gradients = jax.vmap(one)(b["x"], b["y"])
        norms = jax.vmap(optax.tree.norm)(gradients)
        return jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1, 1 / norms), g, 1), gradients)

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        own = mr.losses.as_share(self.clipped_sum(self.values(), b))
        total, rows = ctx().all_reduce("sum", (own, b["y"].shape[0]))
        self.optimizer.apply_gradients(jax.tree.map(lambda g: g / rows, total), aggregate=False)
        return carry, {}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        self.update(s, jax.tree.map(lambda g: g / b["y"].size, self.clipped_sum(s["params"], b)))
        return {}


class TargetNetwork(Program):
    params = {**LINEAR, "target": np.zeros(3, np.float32)}

    def losses(self, p: Any, b: Batch) -> jax.Array:
        return (linear(p, b) - b["y"] - 0.9 * jax.lax.stop_gradient(b["x"] @ p["target"])) ** 2

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        _, results = super().step(carry, b)
        is_due = self.optimizer.iterations.value % 2 == 0
        self.v["target"].assign(jax.lax.cond(is_due, lambda: self.v["w"].value, lambda: self.v["target"].value))
        return carry, results

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        results, s["carry"] = super().plain(s, b, parts), s["carry"] is None  # each second step
        s["params"]["target"] = s["params"]["target"] if s["carry"] else s["params"]["w"]
        return results


class DropoutOfReplicas(Program):
    """Noise of `ctx.rng`: that of one device."""

    def share(self, b: Batch) -> jax.Array:
        keep = jax.random.bernoulli(ctx().rng(jax.random.key(1)), 0.5, b["x"].shape)
        return super().share({**b, "x": jnp.where(keep, b["x"] * 2, 0)})

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        keep = jax.random.bernoulli(jax.random.key(1), 0.5, b["x"].shape)
        return super().plain(s, {**b, "x": jnp.where(keep, b["x"] * 2, 0)}, parts)


# -- states in the hands of the user, numbers that are counted


class NoOptimizer(Program):
    """A program without one."""

    has_optimizer = False

    def start(self, strategy: mr.Strategy, shard_state: bool) -> None:
        with strategy.scope():
            self.v = {name: mr.Variable(value, name=name, **self.kinds.get(name, {})) for name, value in self.params.items()}

    kinds: ClassVar[dict[str, dict[str, str]]] = {}


del PROGRAMS["NoOptimizer"]


class WithoutVariables(NoOptimizer):
    """Parameters and the optimizer's state as arguments that come back."""

    carry = (LINEAR, optax.adam(0.1).init(LINEAR))

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        params, state = carry
        loss = lambda p: mr.losses.compute_average_loss(square(p, b))  # noqa: E731
        value, gradients = ctx().all_reduce("sum", jax.value_and_grad(loss)(params))
        updates, state = optax.adam(0.1).update(gradients, state)
        return (optax.apply_updates(params, updates), state), {"loss": value}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        params, state = s["carry"]
        value, gradients = jax.value_and_grad(self.loss)(params, b)
        updates, state = optax.adam(0.1).update(gradients, state)
        s["carry"] = optax.apply_updates(params, updates), state
        return {"loss": value}


class StateInAVariable(NoOptimizer):
    """A tree of arrays as one variable, as train states of Linen are kept."""

    params = {"state": {"w": np.zeros(3, np.float32), "step": np.int32(0)}}

    def read(self) -> Any:
        return {"state": self.v["state"].numpy()}

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        old = self.v["state"].value
        loss = lambda w: mr.losses.compute_average_loss((b["x"] @ w - b["y"]) ** 2)  # noqa: E731
        gradient = ctx().all_reduce("sum", jax.grad(loss)(old["w"]))
        self.v["state"].assign({"w": old["w"] - 0.1 * gradient, "step": old["step"] + 1})
        return carry, {}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        old = s["params"]["state"]
        gradient = jax.grad(lambda w: jnp.mean((b["x"] @ w - b["y"]) ** 2))(old["w"])
        s["params"]["state"] = {"w": old["w"] - 0.1 * gradient, "step": old["step"] + 1}
        return {}


class RunningSums(NoOptimizer):
    """Sums of an epoch: of losses, which each replica carries on for itself, and of all rows."""

    carry = {"loss": np.float32(0), "rows": np.int32(0)}
    refuses = {"scan": (TypeError, "carry input and carry output")}  # what differs by replica must begin so

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        rows = ctx().all_reduce("sum", b["y"].shape[0])
        return {"loss": carry["loss"] + square(self.values(), b).sum(), "rows": carry["rows"] + rows}, {}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        old = s["carry"]
        s["carry"] = {"loss": old["loss"] + square(s["params"], b).sum(), "rows": old["rows"] + b["y"].shape[0]}
        return {}


class Counted(NoOptimizer):
    """Metrics in variables that are added up when they are read."""

    params = {"w": normal(3, 3), "right": np.int32(0), "seen": np.int32(0), "loss": np.float32(0)}

    kinds = {name: {"synchronization": "on_read", "aggregation": "sum"} for name in ("right", "seen", "loss")}

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        logits = b["x"] @ self.v["w"]
        self.v["right"].assign_add(jnp.sum(jnp.argmax(logits, axis=1) == b["label"]))
        self.v["seen"].assign_add(b["label"].shape[0])
        self.v["loss"].assign_add(cross_entropy(logits, b).sum())
        return carry, {}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        p, logits = s["params"], b["x"] @ s["params"]["w"]
        p["right"] = p["right"] + jnp.sum(jnp.argmax(logits, axis=1) == b["label"])
        p["seen"], p["loss"] = p["seen"] + b["label"].size, p["loss"] + cross_entropy(logits, b).sum()
        return {}


class Evaluation(NoOptimizer):
    """Predictions in the order of the input, accuracy, and counts by class."""

    params = {"w": normal(3, 3)}

    def measure(self, p: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        logits = b["x"] @ p["w"]
        counts = jnp.zeros((3, 3), jnp.int32).at[b["label"], logits.argmax(1)].add(1)
        return {"counts": counts, "loss": cross_entropy(logits, b).sum()}, {
            "rows": logits,
            "rows of best": jax.lax.top_k(logits, 2)[1],
        }

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        sums, rows = self.measure(self.values(), b)
        return carry, {"all": ctx().all_reduce("sum", sums), **rows}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        sums, rows = self.measure(s["params"], b)
        return {"all": sums, **rows}


class Clusters(NoOptimizer):
    """k-means: sums by cluster, over all replicas."""

    params = {"centres": normal(4, 3)}

    def sums(self, p: Any, b: Batch) -> tuple[jax.Array, jax.Array]:
        nearest = jnp.argmin(jnp.sum((b["x"][:, None] - p["centres"]) ** 2, axis=-1), axis=1)
        return jax.ops.segment_sum(b["x"], nearest, 4), jnp.bincount(nearest, length=4)

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        total, count = ctx().all_reduce("sum", self.sums(self.values(), b))
        self.v["centres"].assign(total / jnp.maximum(count, 1)[:, None])
        return carry, {"count": count}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        total, count = self.sums(s["params"], b)
        s["params"]["centres"] = total / jnp.maximum(count, 1)[:, None]
        return {"count": count}


class AggregatedAssignment(NoOptimizer):
    """Variables whose assignments are summed, averaged, or taken from the first replica."""

    params = {"sum": np.float32(0), "mean": np.float32(0), "first": np.float32(0)}

    kinds = {name: {"aggregation": name if name != "first" else "only_first_replica"} for name in ("sum", "mean", "first")}

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        self.v["sum"].assign_add(b["y"].sum())
        self.v["mean"].assign(b["y"].mean())
        self.v["first"].assign(jnp.max(b["y"], initial=-9))
        return carry, {}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        s["params"] = {"sum": s["params"]["sum"] + b["y"].sum(), "mean": b["y"].mean(), "first": parts[0]["y"].max()}
        return {}


class LineSearch(Program):
    is_slow = True
    tx = optax.lbfgs(memory_size=2, linesearch=optax.scale_by_backtracking_linesearch(max_backtracking_steps=5, store_grad=True))

    def step(self, carry: Any, b: Batch) -> tuple[Any, dict[str, Any]]:
        loss = mr.losses.global_loss(lambda p: mr.losses.compute_average_loss(square(p, b)))
        value, gradients = jax.value_and_grad(loss)(self.values())
        self.optimizer.apply_gradients(gradients, aggregate=False, value=value, grad=gradients, value_fn=loss)
        return carry, {"loss": value}

    def plain(self, s: dict[str, Any], b: Batch, parts: list[Batch]) -> dict[str, Any]:
        loss: Callable[[Any], jax.Array] = lambda p: self.loss(p, b)  # noqa: E731
        value, gradients = jax.value_and_grad(loss)(s["params"])
        updates, s["state"] = self.tx.update(gradients, s["state"], s["params"], value=value, grad=gradients, value_fn=loss)
        s["params"] = optax.apply_updates(s["params"], updates)
        return {"loss": value}
