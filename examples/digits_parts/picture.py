"""The curves of a training."""

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(losses: np.ndarray, accuracies: np.ndarray, folder: Path) -> Path:
    """Draw the loss of each step and the held-out accuracy of each epoch."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.semilogy(np.arange(1, losses.size + 1) / losses.shape[1], losses.ravel(), linewidth=0.8)
    left.set(xlabel="epoch", ylabel="loss of the global batch", title="Training")
    right.plot(np.arange(1, len(accuracies) + 1), 100 * accuracies, marker="o", markersize=3)
    right.set(xlabel="epoch", ylabel="held-out images right (%)", title=f"Accuracy: {accuracies[-1]:.1%} at the end")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.spines[["top", "right"]].set_visible(False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "digits.png"
    figure.savefig(path, dpi=120)
    return path
