"""The GPT of examples/train_gpt.py with its heads, hidden features and classes cut over a `DeviceGroup`.

Written out with the group's collectives, from the weights of the dense model; what is not cut lives on the leader.
"""

from __future__ import annotations

import train_gpt

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.pipeline_parallel import build

CONFIG = train_gpt.Config(vocabulary=12, dim=16, layers=1, heads=4, context=6, dtype="float64")


def model_on(tp):
    """The model of the example, cut over the ranks of `tp`."""
    alone = fp.IdentityComm()
    ranks = train_gpt.Ranks(world=alone, pp=alone, dp=alone, tp=tp, sequence_dim=None)
    return train_gpt.GPT(CONFIG, ft.random.Generator(0), ranks, build("gpipe", 1, 1))


def batches(steps):
    key = ft.random.Generator(1)
    return [key.integers((2, CONFIG.context + 1), 0, CONFIG.vocabulary).numpy() for _ in range(steps)]


class OnDevices:
    def __init__(self, group):
        self.group = group
        self.weights = {}
        for name, weight in model_on(fp.IdentityComm()).model.named_parameters():
            dense = ft.asarray(weight.numpy())
            kind = name.removesuffix(".weight")
            size = CONFIG.dim // CONFIG.heads
            if kind.endswith(("query", "key", "value")):  # whole heads, though they may not divide
                parts = group.place(ft.reshape(dense, (CONFIG.dim, CONFIG.heads, size)), 1)
                self.weights[kind] = [ft.reshape(part, (CONFIG.dim, -1)) for part in parts]
            elif kind.endswith("attention.out"):
                parts = group.place(ft.reshape(dense, (CONFIG.heads, size, CONFIG.dim)), 0)
                self.weights[kind] = [ft.reshape(part, (-1, CONFIG.dim)) for part in parts]
            elif kind == "layers.1.out":
                self.weights[kind] = group.place(dense, 0)
            elif kind.endswith("hidden") or kind == "layers.2.out":
                self.weights[kind] = group.place(dense, 1)
            else:
                self.weights[kind] = [dense.to(group.leader)]

    def _columns(self, xs, kind):
        return [x @ w for x, w in zip(xs, self.weights[kind], strict=True)]

    def _norm(self, x, kind):
        return self.group.broadcast(ft.rms_norm(x, self.weights[kind][0]))

    def _attend(self, q, k, v):
        size = CONFIG.dim // CONFIG.heads
        q, k, v = (ft.permute_dims(ft.reshape(t, (*t.shape[:2], -1, size)), (0, 2, 1, 3)) for t in (q, k, v))
        y = ft.permute_dims(ft.scaled_dot_product_attention(q, k, v, causal=True), (0, 2, 1, 3))
        return ft.reshape(y, (*y.shape[:2], -1))

    def loss(self, windows):
        leader = self.group.leader
        tokens, targets = (ft.asarray(w, device=leader) for w in (windows[:, :-1], windows[:, 1:]))
        x = self.weights["layers.0.token"][0][tokens] + self.weights["layers.0.position"][0]
        xs = self._norm(x, "layers.1.attention_norm")
        qkv = [self._columns(xs, f"layers.1.attention.{name}") for name in ("query", "key", "value")]
        attended = [self._attend(*each) for each in zip(*qkv, strict=True)]
        x = x + self.group.all_reduce(self._columns(attended, "layers.1.attention.out"))
        hidden = [ft.square(ft.relu(h)) for h in self._columns(self._norm(x, "layers.1.norm"), "layers.1.hidden")]
        x = x + self.group.all_reduce(self._columns(hidden, "layers.1.out"))
        logits = self.group.all_gather(self._columns(self._norm(x, "layers.2.norm"), "layers.2.out"), dim=-1)
        return ft.cross_entropy(logits, targets)

    def train(self, steps, lr=0.5):
        """The loss of each step, by plain gradient descent."""
        losses = []
        for windows in batches(steps):
            loss = self.loss(windows)
            flat = [w for parts in self.weights.values() for w in parts]
            after = iter([w - lr * g for w, g in zip(flat, ft.grad(loss, flat), strict=True)])
            self.weights = {kind: [next(after) for _ in parts] for kind, parts in self.weights.items()}
            self.group.realize(loss, self.weights)
            losses.append(loss.item())
        return losses


def train_on_ranks(tp, steps, lr=0.5):
    """The same, by the example's model over ranks."""
    gpt = model_on(tp)
    losses = []
    for windows in batches(steps):
        loss, gradients = gpt.learn(windows)
        for p, g in zip(gpt.model.parameters(), gradients, strict=True):
            p.assign(p - lr * g)
        fp.realize(loss, gpt.model)
        losses.append(loss.item())
    return losses
