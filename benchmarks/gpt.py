"""The task of the GPT benchmark, without any framework: sizes, initial weights, batches, matrix products.

All frameworks compute the same formula: token and position embeddings; in each layer, pre-norm layer norm (eps 1e-5),
causal attention over `heads`, and a feed-forward of 4 * dim with tanh-GELU, both added to what comes in, all with
biases; a last layer norm; a head of its own, without bias; mean cross-entropy; AdamW (betas 0.9 and 0.999, eps 1e-8).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

LEARNING_RATE = 3e-4
WEIGHT_DECAY = 0.01
EPS = 1e-5
BATCHES = 8


@dataclass(frozen=True)
class Config:
    """Sizes. `batch` is that of one rank."""

    dim: int = 256
    layers: int = 4
    heads: int = 4
    context: int = 128
    batch: int = 8
    vocabulary: int = 4096

    def save(self, folder: Path) -> None:
        """Writes what a worker needs to begin."""
        (folder / "config.json").write_text(json.dumps(asdict(self)))
        np.savez(folder / "weights.npz", allow_pickle=False, **initial_weights(self))

    @classmethod
    def load(cls, folder: Path) -> Config:
        """Reads what `save` wrote."""
        return cls(**json.loads((folder / "config.json").read_text()))


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The parameters by name. Matrices are [in, out]."""
    dim = config.dim
    found: dict[str, tuple[int, ...]] = {
        "token.weight": (config.vocabulary, dim),
        "position.weight": (config.context, dim),
    }

    def norm(name: str) -> None:
        found.update({f"{name}.weight": (dim,), f"{name}.bias": (dim,)})

    def linear(name: str, inputs: int, outputs: int) -> None:
        found.update({f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)})

    for layer in range(config.layers):
        block = f"blocks.{layer}"
        norm(f"{block}.attention_norm")
        linear(f"{block}.query_key_value", dim, 3 * dim)
        linear(f"{block}.attention_out", dim, dim)
        norm(f"{block}.norm")
        linear(f"{block}.hidden", dim, 4 * dim)
        linear(f"{block}.out", 4 * dim, dim)
    norm("norm")
    found["head.weight"] = (dim, config.vocabulary)
    return found


def initial_weights(config: Config) -> dict[str, Array]:
    """The weights that every framework starts from."""
    draw = np.random.default_rng(0)
    weights = {}
    for name, shape in shapes(config).items():
        if len(shape) == 1:
            weights[name] = np.full(shape, name.endswith("norm.weight"), np.float32)
        else:
            weights[name] = (draw.standard_normal(shape) * 0.02).astype(np.float32)
    return weights


def batch(config: Config, step: int, rank: int) -> tuple[Array, Array]:
    """Random tokens [batch, context] and what follows each of them; there are `BATCHES` different ones a rank."""
    draw = np.random.default_rng((step % BATCHES, rank))
    tokens = draw.integers(0, config.vocabulary, (config.batch, config.context + 1))
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


@dataclass(frozen=True)
class Gemm:
    """`count` products [rows, inner] @ [inner, columns]; a transposed operand lies in memory the other way round."""

    count: int
    rows: int
    inner: int
    columns: int
    transposed: str = ""

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.count * self.rows * self.inner * self.columns

    def backward(self) -> tuple[Gemm, Gemm]:
        """The products that give the cotangents of the left and of the right operand."""
        n, r, i, c = self.count, self.rows, self.inner, self.columns
        return Gemm(n, r, c, i, "right"), Gemm(n, i, r, c, "left")


def gemms(config: Config) -> list[Gemm]:
    """All matrix products of one step of one rank, in no particular order."""
    rows, dim = config.batch * config.context, config.dim
    pairs, length, width = config.batch * config.heads, config.context, config.dim // config.heads
    layer = [
        Gemm(1, rows, dim, 3 * dim),
        Gemm(pairs, length, width, length, "right"),
        Gemm(pairs, length, length, width),
        Gemm(1, rows, dim, dim),
        Gemm(1, rows, dim, 4 * dim),
        Gemm(1, rows, 4 * dim, dim),
    ]
    forward = [*layer * config.layers, Gemm(1, rows, dim, config.vocabulary)]
    backward = []
    for product in forward:
        left, right = product.backward()
        if product.transposed:
            # scores = q @ k.T: its cotangents are g @ k and g.T @ q.
            left = Gemm(left.count, left.rows, left.inner, left.columns)
            right = Gemm(right.count, right.columns, right.inner, right.rows, "left")
        backward += [left, right]
    return [*forward, *backward]
