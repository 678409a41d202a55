"""Trains the GPT of train_gpt.py with its heads, features and characters cut over the devices of one process.

    python examples/gpt_on_devices.py --devices cpu,opencl:0
    python examples/gpt_on_devices.py --devices cuda:0,cuda:1 --draw step.svg      # what runs where, drawn
    fuelrun -n 2 examples/gpt_on_devices.py                                        # over ranks: the same losses

The model is written out with the collectives of a `DeviceGroup`, from the weights of the dense model; what is not cut
lives on the first device. Without --devices it is cut over the ranks, by the layers of `fuel_parallel.tensor_parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
import train_gpt
from train_gpt import Config, Tokens

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DataError
from fuel_parallel.pipeline_parallel import build

Shards = list[ft.Tensor]


class Learner(Protocol):
    """A model that learns by plain gradient descent."""

    def learn(self, windows: Tokens, lr: float) -> float:
        """One step on windows [batch, context + 1]; the loss before it."""


class OnDevices:
    """The model over a group. `weights` has one tensor for each device, or one on the first."""

    def __init__(self, config: Config, group: fp.DeviceGroup, seed: int = 0) -> None:
        self.config, self.group = config, group
        self.weights: dict[str, Shards] = {}
        for name, weight in dense(config, seed).model.named_parameters():
            self.weights[name.removesuffix(".weight")] = self._placed(name.removesuffix(".weight"), weight)

    def _placed(self, name: str, weight: ft.Tensor) -> Shards:
        layer, kind = int(name.split(".")[1]), name.split(".")[-1]
        dense, heads, size = ft.asarray(weight.numpy()), self.config.heads, self.config.dim // self.config.heads
        # Whole heads, though they may not divide.
        if kind in ("query", "key", "value"):
            parts = self.group.place(ft.reshape(dense, (-1, heads, size)), 1)
            return [ft.reshape(part, (self.config.dim, -1)) for part in parts]
        if ".attention." in name:
            parts = self.group.place(ft.reshape(dense, (heads, size, -1)), 0)
            return [ft.reshape(part, (-1, self.config.dim)) for part in parts]
        if kind == "hidden" or (kind == "out" and layer > self.config.layers):
            return self.group.place(dense, 1)
        if kind == "out":
            return self.group.place(dense, 0)
        return [dense.to(self.group.leader)]

    def loss(self, windows: Tokens) -> ft.Tensor:
        """Nats a character, on the first device."""
        tokens, targets = (ft.asarray(w, device=self.group.leader) for w in (windows[:, :-1], windows[:, 1:]))
        x = self.weights["layers.0.token"][0][tokens] + self.weights["layers.0.position"][0]
        for n in range(1, self.config.layers + 1):
            xs = self._norm(x, f"layers.{n}.attention_norm")
            qkv = [self._products(xs, f"layers.{n}.attention.{name}") for name in ("query", "key", "value")]
            attended = [self._attend(*each) for each in zip(*qkv, strict=True)]
            x = x + self.group.all_reduce(self._products(attended, f"layers.{n}.attention.out"))
            hidden = self._products(self._norm(x, f"layers.{n}.norm"), f"layers.{n}.hidden")
            active = [ft.square(ft.relu(h)) for h in hidden]
            x = x + self.group.all_reduce(self._products(active, f"layers.{n}.out"))
        last = f"layers.{self.config.layers + 1}"
        logits = self.group.all_gather(self._products(self._norm(x, f"{last}.norm"), f"{last}.out"), dim=-1)
        return ft.cross_entropy(logits, targets)

    def step(self, windows: Tokens, lr: float) -> tuple[ft.Tensor, dict[str, Shards]]:
        """The loss, and the weights after a step; nothing is computed yet."""
        loss = self.loss(windows)
        flat = [w for parts in self.weights.values() for w in parts]
        after = iter([w - lr * g for w, g in zip(flat, ft.grad(loss, flat), strict=True)])
        return loss, {name: [next(after) for _ in parts] for name, parts in self.weights.items()}

    def learn(self, windows: Tokens, lr: float) -> float:
        """See `Learner.learn`."""
        loss, self.weights = self.step(windows, lr)
        self.group.realize(loss, self.weights)
        return float(loss)

    def _norm(self, x: ft.Tensor, name: str) -> Shards:
        return self.group.broadcast(ft.rms_norm(x, self.weights[name][0]))

    def _products(self, xs: Sequence[ft.Tensor], name: str) -> Shards:
        return [x @ w for x, w in zip(xs, self.weights[name], strict=True)]

    def _attend(self, *qkv: ft.Tensor) -> ft.Tensor:
        size = self.config.dim // self.config.heads
        q, k, v = (ft.permute_dims(ft.reshape(t, (*t.shape[:2], -1, size)), (0, 2, 1, 3)) for t in qkv)
        y = ft.permute_dims(ft.scaled_dot_product_attention(q, k, v, causal=True), (0, 2, 1, 3))
        return ft.reshape(y, (*y.shape[:2], -1))


class OnRanks:
    """The model of train_gpt.py over the ranks of `tp`."""

    def __init__(self, config: Config, tp: fp.Communicator, seed: int = 0) -> None:
        self.gpt = dense(config, seed, tp)

    def learn(self, windows: Tokens, lr: float) -> float:
        """See `Learner.learn`."""
        loss, gradients = self.gpt.learn(windows)
        for p, g in zip(self.gpt.model.parameters(), gradients, strict=True):
            p.assign(p - lr * g)
        fp.realize(loss, self.gpt.model)
        return float(loss)


def dense(config: Config, seed: int, tp: fp.Communicator | None = None) -> train_gpt.GPT:
    """The model of train_gpt.py in one stage; without ranks it is whole."""
    alone = fp.IdentityComm()
    ranks = train_gpt.Ranks(world=alone, pp=alone, dp=alone, tp=tp or alone, sequence_dim=None)
    return train_gpt.GPT(config, ft.random.Generator(seed), ranks, build("gpipe", 1, 1))


def windows(text: Tokens, context: int, batch: int, steps: int, seed: int) -> Iterator[Tokens]:
    """The same windows [batch, context + 1] of a text for everyone."""
    draw = np.random.default_rng(seed)
    for _ in range(steps):
        starts = draw.integers(0, len(text) - context, batch)
        yield text[starts[:, None] + np.arange(context + 1)]


COUNT = click.IntRange(min=1)


@click.command(
    help="Train a small GPT over the devices of one process, or over ranks.", context_settings={"show_default": True}
)
@click.option("--devices", help="Such as cpu,opencl:0; one may be there twice.  [default: cut over ranks]")
@click.option("--algorithm", type=click.Choice(["auto", "fold", "tree", "parts"]), default="auto")
@click.option("--draw", type=click.Path(path_type=Path), help="File (.svg, .dot) for the plan of a step.")
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 text to learn from.  [default: Python's help]")
@click.option("--steps", type=COUNT, default=20)
@click.option("--batch", type=COUNT, default=4, help="Windows of text a step.")
@click.option("--dim", type=COUNT, default=32)
@click.option("--layers", type=COUNT, default=2)
@click.option("--heads", type=COUNT, default=4)
@click.option("--context", type=COUNT, default=16, help="Characters that the model looks back.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), default=0.1)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0)
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32")
def prepare(
    devices: str | None, algorithm: Any, draw: Path | None, text: Path | None, lr: float, seed: int, **rest: Any
) -> tuple[Learner, Iterator[Tokens], float, Path | None]:
    """The model, what it learns from, and how fast."""
    world = fp.init()
    if rest["dim"] % rest["heads"]:
        raise ArgumentError(f"--dim {rest['dim']} cannot be shared equally by --heads {rest['heads']}")
    if devices is not None and world.world_size > 1:
        raise ArgumentError(f"--devices {devices}: these are of one process, and there are {world.world_size} ranks")
    if devices is None and draw is not None:
        raise ArgumentError(f"--draw {draw}: draws what runs on which of --devices; name them, too")
    codes, tokens = np.unique(list(train_gpt.read(text)), return_inverse=True)
    context = rest["context"]
    if len(tokens) <= context:
        raise DataError(f"the text has {len(tokens)} characters; with --context {context} it needs {context + 1}")
    sizes = {name: rest[name] for name in ("dim", "layers", "heads", "context", "dtype")}
    config = Config(vocabulary=len(codes), **sizes)
    learner: Learner = OnRanks(config, world, seed)
    if devices is not None:
        learner = OnDevices(config, fp.DeviceGroup(devices.split(","), algorithm=algorithm), seed)
    return learner, windows(tokens, context, rest["batch"], rest["steps"], seed), lr, draw


def train(learner: Learner, data: Iterator[Tokens], lr: float, draw: Path | None = None) -> list[float]:
    """The loss of each step."""
    losses = []
    for each in data:
        if draw and isinstance(learner, OnDevices) and losses:
            ft.show(list(learner.step(each, lr)), draw, plan=True)
            draw = None
        losses.append(learner.learn(each, lr))
    return losses


if __name__ == "__main__":
    everyone = fp.init()
    prepared = train_gpt.settle(everyone, lambda: prepare.main(standalone_mode=False))
    if isinstance(prepared, tuple):  # not so for --help
        for number, loss in enumerate(train(*prepared), 1):
            if everyone.is_root:
                print(f"step {number}: {loss:.6f}")
