"""Learns to read handwritten digits with a small network, data parallel over all ranks, in seconds.

    fuelrun -n 2 examples/train_digits.py

The 1,797 digits come with scikit-learn: pip install 'fuel-parallel[examples]'. A fifth of them is kept for the test.
"""

from __future__ import annotations

import sys
from typing import Any

import click
import numpy as np

import fuel_parallel as fp
import fuel_parallel.lazy as ft

Array = np.ndarray[Any, Any]


class Network(fp.Module):
    """64 pixels, one hidden layer, 10 classes."""

    def __init__(self, width: int, generator: ft.random.Generator) -> None:
        self.hidden = fp.Linear(64, width, generator)
        self.out = fp.Linear(width, 10, generator)

    def __call__(self, pixels: ft.Tensor) -> ft.Tensor:
        """[batch, 64] to logits [batch, 10]."""
        return self.out(ft.relu(self.hidden(pixels)))


def load(seed: int) -> tuple[Array, Array]:
    """Pixels between 0 and 1 and the digits they show, in random order."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("train_digits.py: needs scikit-learn: pip install 'fuel-parallel[examples]'")
    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    return digits.data[order].astype(np.float32) / 16, digits.target[order].astype(np.int64)


@click.command(context_settings={"show_default": True})
@click.option("--epochs", type=click.IntRange(min=1), default=12)
@click.option("--batch", type=click.IntRange(1, 1000), default=48, help="Digits a step, of all ranks together.")
@click.option("--width", type=click.IntRange(min=1), default=256)
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), default=0.01, help="Learning rate; falls to 0.")
@click.option("--seed", type=click.IntRange(min=0), default=0)
def main(epochs: int, batch: int, width: int, lr: float, seed: int) -> None:
    """Train a small network on scikit-learn's digits."""
    world = fp.init()
    mine = np.array(fp.data_parallel.shard_rows(batch, world))
    pixels, digits = load(seed)
    kept = len(digits) // 5
    training, test = slice(kept, None), slice(0, kept)
    model = Network(width, ft.random.Generator(seed))
    optimizer = fp.optim.AdamW(model.parameters(), weight_decay=0.1)
    draw = np.random.default_rng(seed)
    bar = fp.progress(range(epochs), description="epochs")
    for epoch in bar:
        optimizer.lr = lr * (1 - epoch / epochs)
        order = draw.permutation(len(digits[training]))  # the same on every rank, which takes its rows
        for start in range(0, len(order) - batch + 1, batch):
            rows = order[start + mine]
            logits = model(ft.asarray(pixels[training][rows]))
            loss = ft.cross_entropy(logits, ft.asarray(digits[training][rows]))
            gradients = ft.grad(loss, model.parameters())
            optimizer.update(fp.data_parallel.average_gradients(gradients, world))
            fp.realize(loss, model, optimizer)
        bar.show(loss=world.all_reduce(loss, fp.ReduceOp.AVG))
    guesses = ft.argmax(model(ft.asarray(pixels[test])), axis=-1).numpy()
    if world.is_root:
        print(f"test accuracy {np.mean(guesses == digits[test]):.1%} of {kept} digits")


if __name__ == "__main__":
    main()
