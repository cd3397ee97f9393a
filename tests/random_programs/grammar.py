"""A seed becomes the text of a training: a model, a loss, an optimizer, and the step, on one device and of one replica.

The model is written once. What needs all rows of the batch goes through `rows`: the batch itself on one device, collectives in
a step of `mirrored`. The text is what a failure shows, and what is executed (`harness.py`).
"""

# ruff: noqa: E501  (lines of programs)

import random
import textwrap
from collections.abc import Callable

#: What maps features to features, of shapes [n, 4] and [n, 3, 4], by a matrix `w` of shape [4, 4].
MAPS = (
    "jnp.tanh({h} @ {w})", "jax.nn.relu({h} @ {w} + 0.1)", "jax.nn.gelu({h} @ {w})", "{h} + jnp.tanh({h} @ {w})",
    "{h} * jax.nn.sigmoid({h} @ {w})", "jax.nn.softmax({h} @ {w})", "norm({h} @ {w})", "norm({h}) @ {w}", "{h} + norm({h}) @ {w}",
    "jnp.einsum('...i,ij->...j', {h}, {w})", "jax.jit(lambda h, w: jnp.sin(h @ w))({h}, {w})", "clipped({h} @ {w})",
    "softsign({h} @ {w})", "(jnp.cumsum({h}, axis=-1) / 4) @ {w}", "jnp.roll({h}, 1, axis=-1) @ {w}",
    "jnp.sort({h}, axis=-1) @ {w}", "{h} @ {w} - jnp.max({h}, axis=-1, keepdims=True)",
    "jnp.concatenate([{h}[..., :2] @ {w}[:2], {h}[..., 2:] @ {w}[2:]], axis=-1)[..., :4]", "({h} @ {w}).at[..., 0].add(0.5)",
    "jnp.where({h} > 0, {h}, 0.1 * {h}) @ {w}", "jax.nn.swish({h} @ {w}).astype(jnp.float32)", "jnp.split({h} @ {w}, 2, -1)[0].repeat(2, -1)",
    "jax.lax.stop_gradient({h}) @ {w}", "{h} @ jax.lax.stop_gradient({w}) + {h}",
)  # fmt: skip

#: The same in 16 bits.
SMALL_MAPS = (
    "(small({h}) @ small({w})).astype(jnp.float32)", "jax.nn.gelu(small({h}) @ small({w})).astype(jnp.float32)",
    "{h} + jnp.tanh(small({h}) @ small({w}))", "norm((small({h}) @ small({w})).astype(jnp.float32))",
)  # fmt: skip

#: Layers of model libraries, whose weights are those of the program: from `{h}` by `{w}`.
LIBRARIES = (
    "linen.Dense(4, use_bias=False).apply({{'params': {{'kernel': {w}}}}}, {h})",
    "linen.LayerNorm(use_bias=False, epsilon=0.1).apply({{'params': {{'scale': {w}[0] + 1}}}}, {h}) @ {w}",
    "linen.RNN(linen.SimpleCell(4, residual=True)).apply({{'params': {{'cell': {{'i': {{'kernel': {w}, 'bias': {w}[0]}}, 'h': {{'kernel': {w}.T}}}}}}}}, b['seq'], seq_lengths=b['mask'].sum(1))[:, -1] + {h}",
    "linen.MultiHeadDotProductAttention(2, use_bias=False).apply({{'params': {{**{{k: {{'kernel': {w}.reshape(4, 2, 2)}} for k in ('query', 'key', 'value')}}, 'out': {{'kernel': {w}.reshape(2, 2, 4)}}}}}}, b['seq'] + {h}[:, None], mask=b['mask'][:, None, None]).mean(1)",
    "LINEN_STACK.apply({{'params': {{'Dense_0': {{'kernel': jnp.stack([{w}, {w}.T])}}}}}}, {h}, None)[0]",
    "jax.vmap(with_weights(eqx.nn.Linear(4, 4, False, key=jax.random.key(0)), weight={w}))({h})",
    "jax.vmap(with_weights(eqx.nn.LayerNorm(4, eps=0.1), weight={w}[0] + 1, bias={w}[1]))({h}) @ {w}",
    "jax.vmap(with_weights(eqx.nn.Conv1d(4, 4, 1, use_bias=False, key=jax.random.key(0)), weight={w}[..., None].astype(jnp.float32)))(b['seq'].swapaxes(1, 2)).mean(2) + {h}",
    "jax.vmap(lambda x, h: with_weights(eqx.nn.GRUCell(4, 4, False, key=jax.random.key(0)), weight_ih=jnp.concatenate([{w}] * 3), weight_hh=jnp.concatenate([{w}.T] * 3))(x, h))(b['x'], {h})",
    "with_weights(nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)), kernel=nnx.Param({w}))({h})",
    "with_weights(nnx.LayerNorm(4, epsilon=0.1, use_bias=False, rngs=nnx.Rngs(0)), scale=nnx.Param({w}[0] + 1))({h} @ {w})",
)  # fmt: skip

TRANSFORMATIONS = (
    "optax.sgd(0.1)", "optax.sgd(0.1, momentum=0.9)", "optax.sgd(0.1, momentum=0.9, nesterov=True)", "optax.adam(0.05, eps=1e-2)",
    "optax.adamw(0.05, eps=1e-2, weight_decay=0.1)", "optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1))",
    "optax.chain(optax.clip(0.05), optax.adam(0.05, eps=1e-2))", "optax.sgd(optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 5))",
    "optax.adam(optax.piecewise_constant_schedule(0.1, {1: 0.5}), eps=1e-2)",
    "optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)",
    "optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.01, 3), eps=1e-2)",
    "optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)", "optax.apply_if_finite(optax.sgd(0.1), 2)",
    "optax.chain(optax.sgd(0.1), optax.ema(0.5))", "optax.adamw(0.05, eps=1e-2, mask=lambda p: {name: a.ndim > 1 for name, a in p.items()})",
    "optax.multi_transform({True: optax.sgd(0.1), False: optax.adam(0.05, eps=1e-2)}, lambda p: {name: a.ndim > 1 for name, a in p.items()})",
    "optax.chain(optax.zero_nans(), optax.adaptive_grad_clip(0.5), optax.sgd(0.1))", "optax.yogi(0.05, eps=1e-2)",
    "optax.chain(optax.centralize(), optax.trace(0.9), optax.scale(-0.05))", "optax.rmsprop(0.02, eps=1e-2)",
    "optax.chain(optax.add_decayed_weights(0.01), optax.scale_by_trust_ratio(eps=1e-2), optax.scale(-0.05))",
)  # fmt: skip


class Program:
    """The text of one training, and what of it the ways of running depend on."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.is_small = self.chance(0.1)  # computes in 16 bits
        self.params: dict[str, str] = {}
        self.frozen: set[str] = set()
        self.stats: list[str] = []
        self.lines: list[str] = []
        self.penalties: list[str] = []
        self.has_collective = False
        self.text = self.written()

    # -- small words

    def one(self, *choices: str) -> str:
        return self.random.choice(choices)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def add(self, text: str) -> None:
        self.lines += textwrap.dedent(text).strip("\n").split("\n")

    def weight(self, *shape: int) -> str:
        """Return a matrix: mostly a new one, else one that is there already."""
        of_this_shape = [
            name for name, value in self.params.items() if value.startswith(f"normal({', '.join(map(str, shape))}, ")
        ]
        if of_this_shape and self.chance(0.25):
            name = self.one(*of_this_shape)
            return f"p['{name}']" + (".T" if len(set(shape)) == 1 and len(shape) == 2 and self.chance(0.5) else "")
        name = f"w{len(self.params)}"
        self.params[name] = f"normal({', '.join(map(str, shape))}, seed={self.random.randrange(100)})"
        if self.chance(0.1) and len(self.params) > 1:
            self.frozen.add(name)
        return f"p['{name}']"

    def vector(self, value: str) -> str:
        name = f"b{len(self.params)}"
        self.params[name] = value
        return f"p['{name}']"

    def mapped(self, h: str = "h", w: str | None = None) -> str:
        maps = SMALL_MAPS if self.is_small and self.chance(0.3) else MAPS
        return self.random.choice(maps).format(h=h, w=w or self.weight(4, 4))

    def key(self) -> str:
        key = f"jax.random.key({self.random.randrange(9)})"
        return f"jax.random.fold_in({key}, t)" if self.chance(0.5) else key

    # -- layers: from h of shape [n, 4] to such an h

    def plain_layer(self) -> None:
        self.add(f"h = {self.mapped()}")

    def biased(self) -> None:
        self.add(f"h = {self.one('jnp.tanh', 'jax.nn.relu', 'jax.nn.silu')}(h @ {self.weight(4, 4)} + {self.vector('zeros(4)')})")

    def remat(self) -> None:
        policy = self.one("", ", policy=jax.checkpoint_policies.dots_saveable")
        self.add(f"h = jax.checkpoint(lambda w, h: {self.mapped('h', 'w')}{policy})({self.weight(4, 4)}, h)")

    def own_norm(self) -> None:
        self.add(f"h = norm(h) * {self.vector('ones(4)')} + {self.vector('zeros(4)')}")

    def dropout(self) -> None:
        self.add(
            self.one(
                f"h = dropout(h, {self.key()}, b['id'])",
                f"h = jnp.where(jax.random.bernoulli({self.key()}, 0.7, (4,)), h / 0.7, 0)",
                f"h = h + 0.1 * jax.vmap(lambda i: jax.random.normal(jax.random.fold_in({self.key()}, i), (4,)))(b['id'])",
            )
        )

    def batch_norm(self) -> None:
        self.has_collective = True
        name = f"stats{len(self.stats)}"
        self.add(
            self.one(
                "mean, squares = rows.mean((h.mean(0), (h**2).mean(0)))",
                "mean = rows.mean(h.mean(0))\nsquares = rows.mean((h**2).mean(0))",
                "total, of_squares, count = rows.sum((h.sum(0), (h**2).sum(0), jnp.float32(h.shape[0])))\n"
                "mean, squares = total / count, of_squares / count",
            )
        )
        self.add("h = (h - mean) / jnp.sqrt(squares - mean**2 + 0.1)")
        if self.chance(0.5):
            self.add(f"h = h * {self.vector('ones(4)')} + {self.vector('zeros(4)')}")
        if self.chance(0.5):
            self.stats.append(name)
            self.params[name] = "zeros(4)"
            self.add(f"aux['{name}'] = 0.9 * p['{name}'] + 0.1 * mean")

    def scan_over_layers(self) -> None:
        stack = self.weight(2, 4, 4)
        noise = self.one("", "h = dropout(h, k, b['id'])", "h = jnp.where(jax.random.bernoulli(k, 0.7, (4,)), h / 0.7, 0)")
        out, after = self.random.choice(
            [
                ("None", ""),
                ("h", "h = h + ys.mean(0)"),
                ("h.sum(-1)", "h = h + ys.mean(0)[:, None]"),
                ("jnp.sum(w**2)", "penalty"),
                ("h", ""),
            ]
        )
        self.add(f"""
            def layer(h, wk):
                w, k = wk
                h = {self.mapped("h", "w")}
                {noise or "pass"}
                return h, {out}
            """)
        body = self.one("layer", "jax.checkpoint(layer)")
        unroll = self.one("", "", ", unroll=2", ", reverse=True")
        self.add(f"h, ys = jax.lax.scan({body}, h, ({stack}, jax.random.split({self.key()}, 2)){unroll})")
        if after == "penalty":
            self.penalties.append(f"jnp.sum({stack}**2)")
        elif after:
            self.add(after)

    def recurrent(self) -> None:
        w, u = self.weight(4, 4), self.weight(4, 4)
        start = self.one(
            "jnp.zeros((b['y'].shape[0], 4))", "jnp.zeros_like(h)", "h", "jnp.broadcast_to(w[0], h.shape).astype(jnp.float32)"
        )
        keep = self.one("new", "jnp.where(m[:, None], new, c)")
        more, out = self.random.choice(
            [("0.0", "s + 1.0"), ("jax.random.key(5)", "jax.random.split(s)[0]"), ("jnp.zeros(h.shape[0])", "s + new.sum(-1)"),
             ("jnp.zeros(h.shape[0])", "s * 0.5"), ("jnp.int32(0)", "s + 1"), ("jnp.ones(4)", "s * jnp.tanh(w).sum(0)")]
        )  # fmt: skip
        noise = " + 0.1 * jax.random.normal(s, (4,))" if "key" in more else " * (1 + s)" if more == "jnp.ones(4)" else ""
        seen, after = self.random.choice(
            [("None", "h = h + c"), ("None", "h = c"), ("new", "h = h + ys.mean(0)"), ("c.mean(-1)", "h = c + ys[0][:, None]")]
        )
        self.add(f"""
            w, u = {w}, {u}
            def cell(carry, xm):
                (c, s), (x, m) = carry, xm
                new = jnp.tanh(c @ w + x @ u){noise}
                return ({keep}, {out}), {seen}
            (c, s), ys = jax.lax.scan(cell, ({start}, {more}), (b['seq'].swapaxes(0, 1), b['mask'].T))
            {after}
            """)

    def attention(self) -> None:
        self.add(f"""
            e = {self.weight(6, 4)}[b['tokens']] + h[:, None] * 0.5
            q, k, v = e @ {self.weight(4, 4)}, e @ {self.weight(4, 4)}, e @ {self.weight(4, 4)}
            scores = q @ k.swapaxes(1, 2) / 2
            """)
        self.add(
            self.one(
                "scores = jnp.where(b['mask'][:, None, :], scores, -1e9)",
                "scores = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), scores, -1e9)",
                "scores = scores - 0.1 * jnp.abs(jnp.arange(3)[:, None] - jnp.arange(3))",
            )
        )
        self.add("e = e + jax.nn.softmax(scores) @ v")
        self.add(
            self.one(
                "h = e.mean(1)",
                "h = (e * b['mask'][..., None]).sum(1) / b['mask'].sum(1)[:, None]",
                "h = jnp.take_along_axis(e, (b['mask'].sum(1) - 1)[:, None, None], axis=1)[:, 0]",
                "h = e.max(1)",
            )
        )

    def condition(self) -> None:
        test = self.one("t % 2 == 0", f"jnp.sum({self.weight(4, 4)}) > 0.3", "jnp.bool_(True)", "t > 0")
        one, other = self.weight(4, 4), self.weight(4, 4)
        self.add(
            self.one(
                f"h = jax.lax.cond({test}, lambda h: {self.mapped('h', one)}, lambda h: {self.mapped('h', other)}, h)",
                f"h = jax.lax.cond({test}, lambda: {self.mapped('h', one)}, lambda: h)",
                f"h = jax.lax.switch(t % 3, [lambda h: {self.mapped('h', one)}, lambda h: h, lambda h: {self.mapped('h', other)}], h)",
                f"h = h * jax.lax.cond({test}, lambda: jnp.tanh({one}).sum().astype(jnp.float32), lambda: 1.0)",
            )
        )

    def loop(self) -> None:
        w = self.weight(4, 4)
        self.add(
            self.one(
                f"h = jax.lax.fori_loop(0, 2, lambda i, h: {self.mapped('h', w)}, h)",
                f"h = h + jax.lax.stop_gradient(jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1])), (0, h))[1]) @ {w}",
                f"h = h @ jax.lax.fori_loop(0, 2, lambda i, w: jnp.tanh(w), {w})",
                f"h = jax.lax.map(lambda row: {self.mapped('row', w)}, h)",
                f"h = h @ {w} * jax.lax.scan(lambda c, x: (c * 0.5 + x, None), 0.0, jnp.arange(3.0))[0]",
                f"h = jnp.tanh(jax.lax.associative_scan(jnp.add, h @ {w}, axis=1))",
                f"h = h + jax.lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * 0.5), (0, jax.lax.stop_gradient({w})))[1][0]",
            )
        )

    def by_row(self) -> None:
        w = self.weight(4, 4)
        self.add(
            self.one(
                f"h = jax.vmap(lambda row: {self.mapped('row', w)})(h)",
                f"h = h + 0.1 * jax.vmap(jax.grad(lambda row: jnp.sum(jnp.tanh(row @ {w}))))(h)",
                f"h = jax.vmap(lambda row, i: jnp.roll(row @ {w}, i % 4))(h, b['id'])",
                f"h = jax.vmap(lambda row, m: jax.lax.cond(m, lambda r: r @ {w}, lambda r: r, row))(h, b['mask'][:, 1])",
            )
        )

    def experts(self) -> None:
        gates, stack = self.weight(4, 4), self.weight(2, 4, 4)
        self.has_collective = True
        self.add(f"""
            gates = jax.nn.softmax((h @ {gates})[:, :2])
            chosen = jax.nn.one_hot(gates.argmax(-1), 2)
            h = jnp.einsum('ne,nd,edf->nf', chosen * gates, h, {stack})
            balance = 0.1 * jnp.sum(rows.mean(gates.mean(0)) * rows.mean(chosen.mean(0)))
            """)
        self.penalties.append("balance")

    def all_rows(self) -> None:
        self.has_collective = True
        self.add(
            self.one(
                "everyone = rows.gather(h)\nh = h + jax.nn.softmax(h @ everyone.T) @ everyone",
                "h = h - rows.mean(h.mean(0))",
                "h = h / (1 + rows.max(jax.lax.stop_gradient(jnp.abs(h)).max(initial=0)))",
                "h = h * jax.nn.sigmoid(rows.gather(h).mean(0))",
                "h = h + 0.1 * rows.sum((h * b['weight'][:, None]).sum(0)) / rows.sum(b['weight'].sum())",
                "h = jax.checkpoint(lambda h: jnp.tanh(h - rows.mean(h.mean(0))))(h)",
            )
        )

    def embedding(self) -> None:
        self.add(
            self.one(
                f"h = h + {self.weight(6, 4)}[b['tokens'][:, 0]]",
                f"h = h + jax.nn.one_hot(b['label'], 4) @ {self.weight(4, 4)}",
                f"h = h + jnp.take({self.weight(6, 4)}, b['tokens'], axis=0).mean(1)",
                f"h = h + jax.ops.segment_sum(b['seq'].reshape(-1, 4), jnp.repeat(b['id'] - b['id'].min(initial=99), 3), h.shape[0]) @ {self.weight(4, 4)}",
            )
        )

    def of_a_library(self) -> None:
        self.add(f"h = {self.random.choice(LIBRARIES).format(h='h', w=self.weight(4, 4))}")

    def norm_of_a_library(self) -> None:
        self.has_collective = True
        if self.chance(0.5):
            self.add("h = jax.vmap(EQX_NORM, axis_name='rows', in_axes=(0, None), out_axes=(0, None))(h, EQX_STATE)[0]")
            return
        name, other = (f"stats{len(self.stats) + i}" for i in range(2))
        self.stats += [name, other]
        self.params |= {name: "zeros(4)", other: "ones(4)"}
        self.add(f"""
            norm_of_all = linen.BatchNorm(use_running_average=False, momentum=0.9, epsilon=0.1, use_bias=False, use_scale=False)
            h, new = norm_of_all.apply({{'batch_stats': {{'mean': p['{name}'], 'var': p['{other}']}}}}, h, mutable=['batch_stats'])
            aux['{name}'], aux['{other}'] = new['batch_stats']['mean'], new['batch_stats']['var']
            """)

    def our_loop(self) -> None:
        """Use the control flow of `mirrored`, which in a step is that of JAX."""
        w = self.weight(4, 4)
        self.add(
            self.one(
                f"h, ys = rows.scan(lambda h, w: ({self.mapped('h', 'w')}, h.sum(-1)), h, {self.weight(2, 4, 4)})\nh = h + ys.mean(0)[:, None]",
                f"h = rows.fori_loop(0, 2, lambda i, h: {self.mapped('h', w)}, h)",
                f"h = rows.cond(t % 2 == 0, lambda h: {self.mapped('h', w)}, lambda h: h * 0.5, h)",
                f"h = h * rows.cond(jnp.sum({w}) > 0, lambda w: jnp.tanh(w).sum(0), lambda w: w[0], {w})",
                f"h, ys = rows.scan(lambda c, xm: ((jnp.where(xm[1][:, None], jnp.tanh(c[0] @ {w} + xm[0]), c[0]), c[1] + 1), c[1]), (h, jnp.int32(0)), (b['seq'].swapaxes(0, 1), b['mask'].T))[0]",
            )
        )

    def convolution(self) -> None:
        self.add(
            f"c = jax.lax.conv_general_dilated(b['seq'], {self.weight(2, 4, 4)}.astype(jnp.float32), (1,), 'SAME', dimension_numbers=('NWC', 'WIO', 'NWC'))"
        )
        self.add(self.one("h = h + jax.nn.relu(c).max(1)", "h = jnp.tanh(c.mean(1)) + h"))

    # -- losses

    def losses(self) -> str:
        """Write losses `l`, and return their kind: one for each row, or for each token."""
        kind = self.random.choice(["rows"] * 4 + ["tokens"] + ["pairs"])
        if kind == "tokens":
            self.add(f"""
                logits = (h[:, None] + {self.weight(6, 4)}[b['tokens']]) @ {self.weight(4, 6)}
                l = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(b['tokens'], 1, axis=1))
                """)
            return kind
        if kind == "pairs":
            self.has_collective = True
            self.add(
                self.one(
                    "l = optax.softmax_cross_entropy(h @ rows.gather(h).T, b['id'][:, None] == rows.gather(b['id']))",
                    "z = h / jnp.sqrt(1 + jnp.sum(h**2, -1, keepdims=True))\neveryone = rows.gather({'z': z, 'id': b['id']})\n"
                    "l = optax.softmax_cross_entropy(5 * z @ everyone['z'].T, b['id'][:, None] == everyone['id'])",
                    "e = jnp.tanh(b['seq'].mean(1)) + 0.1 * h\n"
                    "same = b['id'][:, None] == rows.gather(b['id'])\n"
                    "l = (optax.softmax_cross_entropy(h @ rows.gather(e).T, same) + optax.softmax_cross_entropy(e @ rows.gather(h).T, same)) / 2",
                    "l = jnp.mean(jnp.abs(h[:, None, 0] - rows.gather(h)[None, :, 1]), axis=1) + h[:, 2] ** 2",
                )
            )
            return kind
        w = self.weight(4, 4)
        self.add(
            self.one(
                f"l = ((h @ {w})[:, 0] - b['y']) ** 2",
                f"l = optax.huber_loss((h @ {w})[:, 0], b['y'])",
                f"l = optax.softmax_cross_entropy_with_integer_labels(h @ {w}, b['label'])",
                f"l = optax.softmax_cross_entropy(h @ {w}, optax.smooth_labels(jax.nn.one_hot(b['label'], 4), 0.1))",
                f"l = optax.sigmoid_binary_cross_entropy((h @ {w})[:, 0], b['label'] % 2)",
                "l = jnp.sum(optax.squared_error(h, b['x']), axis=-1)",
                f"l = jax.nn.logsumexp(h @ {w}, axis=-1) ** 2 - (h * b['y'][:, None]).sum(-1)",
            )
        )
        if self.chance(0.15):
            self.add("l = l + 0.1 * jnp.sum(h**2, axis=-1)")
        return kind

    def divided(self, kind: str) -> tuple[str, str, str]:
        """Return the loss on one device, in a step, and what the optimizer is told."""
        if not self.penalties and not self.has_collective and self.chance(0.25):
            return self.in_parts(kind)
        plus = " + penalty" if self.penalties else ""
        scaled = " + mr.losses.scale_regularization_loss(penalty)" if self.penalties else ""
        if kind == "tokens":
            return self.random.choice(
                [
                    (f"l.mean(){plus}", f"l.mean(axis=1){plus}", ""),
                    (f"(l * b['mask']).sum() / b['mask'].sum(){plus}", f"mr.losses.weighted_mean(l, b['mask']){scaled}", ""),
                    (f"l.sum() / l.shape[0]{plus}", f"mr.losses.compute_average_loss(l.sum(1)){scaled}", ""),
                    (f"(l * b['weight'][:, None]).sum() / (3 * b['weight'].sum()){plus}", f"mr.losses.weighted_mean(l, jnp.broadcast_to(b['weight'][:, None], l.shape)){scaled}", ""),
                    (f"(l * b['mask']).sum() / b['mask'].sum(){plus}",
                     f"mr.losses.already_divided((l * b['mask']).sum() / rows.sum(b['mask'].sum())){scaled}", ""),
                ]
            )  # fmt: skip
        forms = [
            (f"l.mean(){plus}", f"l{plus}", ""),
            (f"l.mean(){plus}", f"l{plus}", ""),
            (f"(l * b['weight']).mean(){plus}", f"l * b['weight']{plus}", ""),
            (f"l.mean(){plus}", f"mr.losses.compute_average_loss(l){scaled}", ""),
            (f"(l * b['weight']).mean(){plus}", f"mr.losses.compute_average_loss(l, b['weight']){scaled}", ""),
            (f"(l * b['weight']).sum() / b['weight'].sum(){plus}", f"mr.losses.weighted_mean(l, b['weight']){scaled}", ""),
            (f"(l * b['mask'][:, 1]).sum() / b['mask'][:, 1].sum().clip(1){plus}", f"mr.losses.weighted_mean(l, b['mask'][:, 1]){scaled}", ""),
            (f"l.mean(){plus}", f"mr.losses.mean_over_own_rows(l.mean()){scaled}", ""),
            (f"l.mean(){plus}", f"mr.losses.mean_over_own_rows(l.mean(){plus})", ""),
            (f"l.mean(){plus}", f"mr.losses.already_divided(l.sum() / rows.sum(l.shape[0])){scaled}", ""),
            (f"l.mean(){plus}", f"0.5 * mr.losses.compute_average_loss(l) + 0.5 * mr.losses.compute_average_loss(l){scaled}", ""),
        ]  # fmt: skip
        if not self.has_collective and not self.cuts_gradients():
            forms += [(f"l.mean(){plus}", f"l.mean(){plus}", "mean"), ("l.mean()", "l.sum() / rows.sum(l.shape[0])", "sum")]
        return self.random.choice(forms)

    def cuts_gradients(self) -> bool:
        """Tell whether gradients of rows are cut off: by how much depends on what the loss is divided by, and when."""
        return any("clipped(" in line for line in self.lines)

    def in_parts(self, kind: str) -> tuple[str, str, str]:
        """Return losses that are accumulated over parts of the rows: of a part, with the total of all parts."""
        count = "rows.sum(b['y'].shape[0])"
        if kind == "tokens":
            return self.random.choice(
                [
                    ("(l * b['mask']).sum() / b['mask'].sum()", "mr.losses.weighted_mean(l, b['mask'], total=total)", "rows.sum(b['mask'].sum())"),
                    ("l.sum() / l.shape[0]", "mr.losses.compute_average_loss(l.sum(1), global_batch_size=total)", count),
                ]
            )  # fmt: skip
        return self.random.choice(
            [
                ("(l * b['weight']).sum() / b['weight'].sum()", "mr.losses.weighted_mean(l, b['weight'], total=total)", "rows.sum(b['weight'].sum())"),
                ("l.mean()", "mr.losses.compute_average_loss(l, global_batch_size=total)", count),
                ("(l * b['weight']).mean()", "mr.losses.compute_average_loss(l, b['weight'], global_batch_size=total)", count),
                ("l.mean()", "mr.losses.already_divided(l.sum() / total)", count),
            ]
        )  # fmt: skip

    # -- the whole

    def written(self) -> str:
        layers: list[Callable[[], None]] = [
            self.plain_layer, self.biased, self.remat, self.own_norm, self.dropout, self.batch_norm, self.scan_over_layers, self.recurrent,
            self.attention, self.condition, self.loop, self.by_row, self.experts, self.all_rows, self.embedding, self.convolution,
            self.of_a_library, self.of_a_library, self.norm_of_a_library, self.our_loop,
        ]  # fmt: skip
        self.add(f"h = b['x'] @ {self.weight(4, 4)}")
        for _ in range(self.random.choice([1, 1, 1, 2, 2, 3])):
            self.random.choice(layers)()
        kind = self.losses()
        if self.chance(0.3):
            self.penalties.append(
                self.one(
                    "sum(jnp.sum(a**2) for a in p.values())", "optax.tree.norm(p, squared=True)", "jnp.sum(jnp.abs(p['w0']))"
                )
            )
        self.add(f"penalty = 0.01 * ({' + '.join(self.penalties) or '0.0'})")
        alone, share, how = self.divided(kind)
        made = self.make(share, how)
        return "\n".join([self.head(), self.losses_text(alone, share), made])

    def head(self) -> str:
        params = "".join(f"    {name!r}: {value},\n" for name, value in self.params.items())
        fits = [tx for tx in TRANSFORMATIONS if "p.items()" not in tx or not self.is_nnx]  # a mask of NNX' tree is another
        if self.is_small and self.chance(0.3):
            fits = [tx for tx in fits if "inject_hyperparams(optax.adam)" not in tx]  # its b2 is 1 in 16 bits, and all is NaN
            params = params.replace("),\n", ").astype(jnp.bfloat16),\n")
        return f"""PARAMS = {{
{params}}}
NOT_TRAINED = {sorted({*self.frozen, *self.stats})!r}
tx = {self.random.choice(fits)}

"""

    def losses_text(self, alone: str, share: str) -> str:
        return f"""
def model(p, b, rows, t):
    aux = {{}}
{textwrap.indent(chr(10).join(self.lines), "    ")}
    return l, penalty, h, aux


def loss_on_one_device(p, b, t):
    l, penalty, h, aux = model(p, b, batch, t)
    return {alone}, (h, aux)


def loss_of_a_replica(p, b, t, total=None):
    rows = replicas
    l, penalty, h, aux = model(p, b, rows, t)
    return {share}, (h, aux)

"""

    def make(self, share: str, how: str) -> str:
        """Return the text of the function that makes the variables and the step of one replica."""
        totals, how = (how, "") if how.startswith("rows.") else ("", how)
        told = f", aggregate='{how}'" if how else ""
        is_scalar = share.startswith(("mr.losses", "0.5 * mr.losses")) or bool(how)
        of_scalars = ["jax", "tree", "twice", "arguments", "nnx", *["scan"] * (not self.cuts_gradients())] * is_scalar
        forms = ["mr", "mr", "function"] + (["norm", *of_scalars] if not how else [])
        form = self.one(*forms)  # a sum by hand of gradients of a loss that has no word is warned of
        if not self.stats and self.chance(0.3):
            form = "minimize"
        if totals:
            form = "parts"
        self.is_nnx = form == "nnx"
        by_hand = form in ("tree", "arguments")
        t = {"tree": "state.value['t']", "arguments": "carry['t']", "nnx": "carry[1].step[...]"}.get(
            form, "optimizer.iterations.value"
        )
        trained = "trained = {name: p[name] for name in PARAMS if name not in NOT_TRAINED}"
        whole = "def loss(trained):\n    return loss_of_a_replica({**p, **trained}, b, t)"
        own = "own = {name: v[name] for name in PARAMS if name not in NOT_TRAINED}"
        of_variables = "def loss():\n    return loss_of_a_replica({name: a.value for name, a in v.items()}, b, t)"
        p = "p = {name: a.value for name, a in v.items()}"
        apply = f"optimizer.apply_gradients(gradients{told})"
        of_type = "aux = {name: new.astype(p[name].dtype) for name, new in aux.items()}"  # what `assign` does; a scan asks for it
        step = {
            "minimize": [of_variables, f"value = optimizer.minimize(lambda: loss()[0]{told})", "h, aux = b['y'], {}"],
            "mr": [of_variables, own, "(value, (h, aux)), gradients = mr.value_and_grad(loss, own, has_aux=True)()", apply],
            "function": [of_variables, own, "(value, (h, aux)), gradients = mr.value_and_grad(loss, own, has_aux=True)()",
                         f"optimizer.apply_gradients([(gradients[name], own[name]) for name in own]{told})"],
            "norm": [of_variables, own, "(value, (h, aux)), gradients = mr.value_and_grad(loss, own, has_aux=True)()",
                     "gradients = mr.get_replica_context().all_reduce('sum', gradients)", "norm = optax.tree.norm(gradients)",
                     "optimizer.apply_gradients(gradients, aggregate=False)"],
            "jax": [p, trained, whole, "(value, (h, aux)), gradients = jax.value_and_grad(loss, has_aux=True)(trained)", apply],
            "twice": [p, trained, whole, "(value, (h, aux)), one = jax.value_and_grad(loss, has_aux=True)(trained)",
                      "other = jax.grad(lambda trained: loss(trained)[0])(trained)",
                      "gradients = jax.tree.map(lambda a, b: (a + b) / 2, one, other)", apply],
            "scan": [p, trained, whole, "def add(total, weight):",
                     "    (value, out), g = jax.value_and_grad(lambda trained: (lambda l, out: (l * weight, out))(*loss(trained)), has_aux=True)(trained)",
                     "    return jax.tree.map(jnp.add, total, (value, g)), out",
                     "(value, gradients), (h, aux) = jax.lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, trained)), jnp.array([0.25, 0.75]))",
                     "h, aux = jax.tree.map(lambda a: a[-1], (h, aux))", apply],
            "parts": [p, trained, whole.replace("(trained):", "(trained, b):").replace("b, t)", "b, t, total)"), f"total = {totals.replace('rows', 'replicas')}",
                      "def add(so_far, part):", "    (value, _), g = jax.value_and_grad(loss, has_aux=True)(trained, part)",
                      "    return jax.tree.map(jnp.add, so_far, (value, g)), None",
                      "zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained)",
                      "(value, gradients), _ = jax.lax.scan(add, zeros, jax.tree.map(lambda a: a[:, None], b))", "h, aux = b['y'], {}", apply],
            "arguments": ["p = carry['p']", trained, whole, "(value, (h, aux)), gradients = jax.value_and_grad(loss, has_aux=True)(trained)",
                          "value, gradients = mr.get_replica_context().all_reduce('sum', (value, gradients))",
                          "updates, tx_state = tx.update(gradients, carry['tx'], trained)",
                          of_type, "carry = {'p': {**p, **optax.apply_updates(trained, updates), **aux}, 'tx': tx_state, 't': t + 1}", "aux = {}"],
            "nnx": ["net, its = carry", "def loss(net):", "    return loss_of_a_replica({name: net.weights[name][...] for name in PARAMS}, b, t)",
                    "(value, (h, aux)), gradients = nnx.value_and_grad(loss, has_aux=True)(net)",
                    "value, gradients = mr.get_replica_context().all_reduce('sum', (value, gradients))", "its.update(net, gradients)",
                    "for name, new in aux.items():", "    net.weights[name][...] = new.astype(net.weights[name].dtype)", "aux, carry = {}, ()"],
            "tree": ["p = state.value['p']", trained, whole, "(value, (h, aux)), gradients = jax.value_and_grad(loss, has_aux=True)(trained)",
                     self.one("gradients = mr.get_replica_context().all_reduce('sum', gradients)",
                              "gradients, value = mr.get_replica_context().all_reduce('sum', (gradients, value))",
                              "gradients = jax.lax.psum(gradients, 'replica')"),
                     "updates, tx_state = tx.update(gradients, state.value['tx'], trained)",
                     of_type, "p = {**p, **optax.apply_updates(trained, updates), **aux}",
                     "state.assign({'p': p, 'tx': tx_state, 't': t + 1})", "aux = {}"],
        }[form]  # fmt: skip
        step = [f"t = {t}", *step]
        if how == "mean":
            step.append("value = mr.get_replica_context().all_reduce('mean', value)")
        result = {"loss": "value"}
        if form == "norm":
            result["norm"] = "norm"
        if self.stats and not by_hand and not self.is_nnx:
            step += ["for name, new in aux.items():", "    v[name].assign(new)"]
        self.results = [name for name in ("rows", "seen", "error", "right", "last") if self.chance(0.2)]
        if form in ("minimize", "parts"):
            self.results = [name for name in self.results if name not in ("rows", "right")]
        ema = "" if by_hand or self.is_nnx else self.one("", "", "", "", "", "always", "sometimes")
        variables = ""
        if ema:
            variables += "        ema = {name: mr.Variable(value, trainable=False) for name, value in PARAMS.items()}\n"
            follow = ["for name, average in ema.items():", "    average.assign(0.9 * average + 0.1 * v[name])"]
            if ema == "sometimes":
                follow = ["def follow():", *(f"    {line}" for line in follow), "mr.cond(t % 2 == 0, follow, lambda: None)"]
            step += follow
        if "seen" in self.results:
            variables += "        seen = mr.Variable(0.0, synchronization='on_read', aggregation='sum')\n"
            step.append("seen.assign_add(b['weight'].sum())")
        if "right" in self.results:
            variables += "        right = mr.Variable(0, synchronization='on_read', aggregation='sum')\n"
            step.append("right.assign_add((h[:, 0] > 0).sum())")
        if "last" in self.results:
            variables += "        last = mr.Variable(0.0, aggregation='mean')\n"
            step.append("last.assign(b['y'].mean())")
        if "rows" in self.results:
            result["rows"] = "h"
        if "error" in self.results:
            result["error"] = "replicas.sum(jnp.abs(b['y']).sum()) / replicas.sum(b['y'].shape[0])"
        step.append("return carry, {" + ", ".join(f"{name!r}: {value}" for name, value in result.items()) + "}")
        made, start = "", "()"
        trained = "{name: PARAMS[name] for name in PARAMS if name not in NOT_TRAINED}"
        if form == "tree":
            made += f"        state = mr.Variable({{'p': PARAMS, 'tx': tx.init({trained}), 't': np.int32(0)}})\n"
            read = "        p = state.value['p']\n"
        elif form == "arguments":
            start = f"{{'p': {{**PARAMS}}, 'tx': tx.init({trained}), 't': np.int32(0)}}"
            read = "        p = carry['p']\n"
        elif self.is_nnx:
            start = "start"
            made += "        net = Net(PARAMS, NOT_TRAINED)\n        start = net, nnx.Optimizer(net, tx, wrt=nnx.Param)\n"
            read = "        p = {name: net.weights[name][...] for name in PARAMS}\n"
        else:
            made += "        v = {name: mr.Variable(value, name=name) for name, value in PARAMS.items()}\n"
            made += "        own = {name: v[name] for name in PARAMS if name not in NOT_TRAINED}\n"
            made += "        optimizer = mr.Optimizer(tx, own, shard_state=shard_state)\n"
            read = "        p = {name: a.value for name, a in v.items()}\n"
        made += variables or "        pass\n" * (not made)
        read += "        return {'p': p" + ", 'ema': {name: a.value for name, a in ema.items()}" * bool(ema)
        read += "".join(f", {name!r}: {name}.value" for name in ("seen", "right", "last") if name in self.results) + "}\n"
        return f"""
EMA_EVERY = {2 if ema == "sometimes" else 1}


def make(strategy, shard_state):
    with strategy.scope():
{made}
    def step(carry, b):
{textwrap.indent(chr(10).join(step), " " * 8)}

    def read(carry):
{read}
    return step, read, {start}
"""
