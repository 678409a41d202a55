"""GPT-2 (Radford et al., 2019), with the names that transformers gives its layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from models.caching import layer_caches
from models.config import read_config

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.checkpoint import NameTable, StoredAs
from fuel_parallel.distributed_cache import KVPool, LayerCache, PagedBatch

FIXED = {
    "activation_function": "gelu_new",
    "add_cross_attention": False,
    "reorder_and_upcast_attn": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}

# GPT-2's weights are [in, out] in files too, and its queries, keys and values are one tensor.
NAMES = NameTable(
    [
        StoredAs(("h.*.attn.query.*", "h.*.attn.key.*", "h.*.attn.value.*"), "transformer.h.*.attn.c_attn.*"),
        StoredAs("h.*.attn.out.*", "transformer.h.*.attn.c_proj.*"),
        StoredAs("**", "transformer.**"),
    ],
    ignored=["lm_head.weight", "**.attn.bias", "**.attn.masked_bias"],
    prefix="transformer.",
)


class Config(msgspec.Struct):
    """What config.json says; the names are those of transformers."""

    vocab_size: int
    n_embd: int
    n_layer: int
    n_head: int
    n_positions: int
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5

    @property
    def context(self) -> int:
        """How many tokens the model was made for."""
        return self.n_positions

    @classmethod
    def read(cls, folder: Path) -> Config:
        """The configuration of a folder. Raises `DataError` for one that this model does not understand."""
        return read_config(folder / "config.json", cls, FIXED)


class MLP(fp.Module):
    """Two layers with a GELU between them."""

    def __init__(self, config: Config, generator: ft.random.Generator, dtype: Any) -> None:
        hidden = config.n_inner or 4 * config.n_embd
        self.c_fc = fp.Linear(config.n_embd, hidden, generator, dtype=dtype)
        self.c_proj = fp.Linear(hidden, config.n_embd, generator, dtype=dtype)

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """[..., dim] to the same."""
        return self.c_proj(ft.gelu(self.c_fc(x), approximate=True))


class Layer(fp.Module):
    """Attention and a feed-forward layer, each of what was normalized and added to what comes in."""

    def __init__(self, config: Config, generator: ft.random.Generator, dtype: Any) -> None:
        self.ln_1 = fp.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, dtype=dtype)
        self.attn = fp.Attention(config.n_embd, config.n_head, generator, causal=True, dtype=dtype)
        self.ln_2 = fp.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, dtype=dtype)
        self.mlp = MLP(config, generator, dtype)

    def __call__(self, x: ft.Tensor, cache: LayerCache | None = None) -> ft.Tensor:
        """[..., length, dim] to the same; `cache` as in `fp.Attention`."""
        x = x + self.attn(self.ln_1(x), cache=cache)
        return x + self.mlp(self.ln_2(x))


class GPT2(fp.Module):
    """Tokens to what may come next.

    >>> GPT2(Config(97, 16, 1, 4, 64), ft.random.Generator(0))(ft.asarray([[1, 2, 3]])).shape
    (1, 3, 97)
    """

    names = NAMES
    plan = "gpt2"

    def __init__(self, config: Config, generator: ft.random.Generator, dtype: Any = None) -> None:
        self.wte = fp.Embedding(config.vocab_size, config.n_embd, generator, dtype=dtype)
        self.wpe = fp.Embedding(config.n_positions, config.n_embd, generator, dtype=dtype)
        self.h = [Layer(config, generator, dtype) for _ in range(config.n_layer)]
        self.ln_f = fp.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon, dtype=dtype)

    def __call__(self, tokens: ft.Tensor, *, cache: KVPool | None = None, batch: PagedBatch | None = None) -> ft.Tensor:
        """Tokens [batch, length] to logits [batch, length, vocabulary].

        With a cache: tokens [size] of a batch to logits [rows, vocabulary] of what follows each sequence.
        """
        x = self.features(tokens, cache=cache, batch=batch)
        return self.head(x if batch is None else x[batch.last])

    def features(self, tokens: ft.Tensor, *, cache: KVPool | None = None, batch: PagedBatch | None = None) -> ft.Tensor:
        """Tokens [batch, length] to what the head takes, [batch, length, dim]; with a cache [size] to [size, dim]."""
        caches = layer_caches(cache, batch, len(self.h))
        positions = self.wpe.weight[: tokens.shape[1]] if batch is None else self.wpe(batch.positions)
        x = self.wte(tokens) + positions
        for layer, own in zip(self.h, caches, strict=True):
            x = layer(x, own)
        return self.ln_f(x)

    def head(self, x: ft.Tensor) -> ft.Tensor:
        """[..., dim] to logits [..., vocabulary]."""
        return self.wte.logits(x)
