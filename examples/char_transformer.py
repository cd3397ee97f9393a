"""Train a small transformer on the text of Python's own `help()`, character by character, on four virtual CPU devices.

    python examples/char_transformer.py                 # within a minute on two cores; writes out/char_transformer.png

The text ships with Python (`pydoc_data.topics`); each replica has 8 of the 32 pieces of text of a batch.
"""

import argparse
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from tqdm import tqdm

import mirrored as mr

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTH, WIDTH, NUM_HEADS, NUM_LAYERS = 64, 96, 4, 2


def initial_weights(random: np.random.Generator, num_characters: int) -> dict[str, np.ndarray]:
    """Return embeddings, and for each layer the matrices of attention and of the MLP."""
    shapes = {"embedding": (num_characters, WIDTH), "position": (LENGTH, WIDTH), "logits": (WIDTH, num_characters)}
    for layer in range(NUM_LAYERS):
        shapes |= {f"qkv{layer}": (WIDTH, 3 * WIDTH), f"out{layer}": (WIDTH, WIDTH)}
        shapes |= {f"up{layer}": (WIDTH, 4 * WIDTH), f"down{layer}": (4 * WIDTH, WIDTH)}
    return {name: random.normal(scale=shape[0] ** -0.5, size=shape).astype(np.float32) for name, shape in shapes.items()}


def logits_of(weights: dict, characters: jax.Array) -> jax.Array:
    """Predict the character after each of `characters` [n, length] from it and those before it."""
    x = 4 * weights["embedding"][characters] + weights["position"][: characters.shape[1]]
    for layer in range(NUM_LAYERS):
        heads = (jax.nn.standardize(x) @ weights[f"qkv{layer}"]).reshape(*x.shape[:2], 3, NUM_HEADS, WIDTH // NUM_HEADS)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
        x += attended.reshape(x.shape) @ weights[f"out{layer}"]
        x += jax.nn.gelu(jax.nn.standardize(x) @ weights[f"up{layer}"]) @ weights[f"down{layer}"]
    return jax.nn.standardize(x) @ weights["logits"]


def write_text(weights: dict, prompt: np.ndarray, num_characters: int) -> list[int]:
    """Go on with the prompt [LENGTH], each character drawn by the model's own probabilities, sharpened a little."""

    @jax.jit
    def draw_next(window: jax.Array, i: int) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(jax.random.key(1), i), 1.5 * logits_of(weights, window[None])[0, -1])

    written = list(prompt)
    for i in range(num_characters):
        written.append(int(draw_next(np.array(written[-LENGTH:]), i)))
    return written[LENGTH:]


def draw(losses: list[float], held_out: dict[int, float], text: str, folder: Path) -> Path:
    """Draw the loss of each step and on held-out text, beside what the model writes at the end."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, linewidth=0.8, alpha=0.6, label="training text")
    left.plot(list(held_out), list(held_out.values()), marker="o", markersize=3, label="held-out text")
    left.set(xlabel="step", ylabel="loss (nats per character)", title="A transformer on 4 replicas")
    left.legend(frameon=False)
    right.text(0, 1, textwrap.fill(text, 64), family="monospace", fontsize=8, va="top", parse_math=False)
    right.set_title("What it writes", loc="left")
    right.axis("off")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(path := folder / "char_transformer.png", dpi=120)
    return path


def main() -> None:
    """Train, look at held-out text every 50 steps, write some text, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--out", type=Path, default=Path("out"))
    arguments = parser.parse_args()
    text = " ".join(" ".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode().split())
    alphabet = sorted(set(text))
    numbers = np.searchsorted(alphabet, list(text)).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(numbers, LENGTH + 1)[:: LENGTH // 2]
    train, test = windows[:-128], windows[-126:]  # windows overlap by half: those between the two are left out

    strategy = mr.MirroredStrategy([f"cpu:{i}" for i in range(4)])  # leave the list out to take all GPUs
    with strategy.scope():
        weights = {name: mr.Variable(value) for name, value in initial_weights(np.random.default_rng(0), len(alphabet)).items()}
        schedule = optax.warmup_cosine_decay_schedule(0, 6e-3, min(40, arguments.steps // 2), arguments.steps)
        optimizer = mr.Optimizer(optax.adamw(schedule), weights)

    def loss_of(characters: jax.Array) -> jax.Array:
        logits = logits_of(jax.tree.map(jnp.asarray, weights), characters[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, characters[:, 1:])
        return mr.losses.compute_average_loss(losses.mean(axis=1))

    def train_step(characters: jax.Array) -> jax.Array:
        loss, gradients = mr.value_and_grad(lambda: loss_of(characters), weights)()
        optimizer.apply_gradients(gradients)
        return loss

    rows = strategy.make_numpy_dataset(train).shuffle(seed=0).batch(32).repeat()
    batches = strategy.distribute_dataset(rows, mr.InputOptions(drop_remainder=True))
    [held_out_batch] = strategy.distribute_dataset([test])
    losses, held_out = [], {}
    for step, batch in zip(tqdm(range(1, arguments.steps + 1), unit="step"), batches, strict=False):
        losses.append(strategy.reduce("sum", strategy.run(train_step, args=(batch,))))
        if step % 50 == 1 or step == arguments.steps:
            held_out[step] = float(strategy.reduce("sum", strategy.run(loss_of, args=(held_out_batch,))))
    strategy.assert_mirrored()
    written = "".join(alphabet[i] for i in write_text(jax.tree.map(jnp.asarray, weights), test[0, :LENGTH], 900))
    picture = draw([*map(float, losses)], held_out, written, arguments.out)
    print(f"{written}\n\nheld-out loss {held_out[1]:.2f} at first, {held_out[step]:.2f} after {step} steps; see {picture}")


if __name__ == "__main__":
    main()
