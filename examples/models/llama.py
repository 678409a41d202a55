"""Llama (Touvron et al., 2023, arXiv:2302.13971), with the names that transformers gives its layers."""

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

FIXED = {"hidden_act": "silu", "pretraining_tp": 1}

NAMES = NameTable(
    [
        StoredAs("embed_tokens.weight", "model.embed_tokens.weight"),
        StoredAs("layers.*.self_attn.query.*", "model.layers.*.self_attn.q_proj.*", transpose=True),
        StoredAs("layers.*.self_attn.key.*", "model.layers.*.self_attn.k_proj.*", transpose=True),
        StoredAs("layers.*.self_attn.value.*", "model.layers.*.self_attn.v_proj.*", transpose=True),
        StoredAs("layers.*.self_attn.out.*", "model.layers.*.self_attn.o_proj.*", transpose=True),
        StoredAs("layers.*.mlp.*.*", "model.layers.*.mlp.*.*", transpose=True),
        StoredAs("layers.*.*.weight", "model.layers.*.*.weight"),
        StoredAs("norm.weight", "model.norm.weight"),
        StoredAs("lm_head.weight", "lm_head.weight", transpose=True, otherwise="model.embed_tokens.weight"),
    ],
    ignored=["lm_head.weight", "**.rotary_emb.inv_freq"],
    prefix="model.",
)


class Config(msgspec.Struct):
    """What config.json says; the names are those of transformers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    @property
    def context(self) -> int:
        """How many tokens the model was made for."""
        return self.max_position_embeddings

    @classmethod
    def read(cls, folder: Path) -> Config:
        """The configuration of a folder. Raises `DataError` for one that this model does not understand."""
        return read_config(folder / "config.json", cls, FIXED)

    def rotary(self) -> fp.Rotary:
        """The rotation of queries and keys."""
        scaling = self.rope_parameters or self.rope_scaling or {}
        theta = float(scaling.get("rope_theta", self.rope_theta))
        return fp.Rotary(self.head_dim or self.hidden_size // self.num_attention_heads, theta=theta, scaling=scaling)


class MLP(fp.Module):
    """A gated feed-forward layer (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, config: Config, generator: ft.random.Generator, dtype: Any) -> None:
        dim, hidden, options = config.hidden_size, config.intermediate_size, {"bias": config.mlp_bias, "dtype": dtype}
        self.gate_proj = fp.Linear(dim, hidden, generator, **options)
        self.up_proj = fp.Linear(dim, hidden, generator, **options)
        self.down_proj = fp.Linear(hidden, dim, generator, **options)

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """[..., dim] to the same."""
        return self.down_proj(ft.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(fp.Module):
    """Attention and a feed-forward layer, each of what was normalized and added to what comes in."""

    def __init__(self, config: Config, generator: ft.random.Generator, dtype: Any) -> None:
        self.input_layernorm = fp.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.self_attn = fp.Attention(
            config.hidden_size,
            config.num_attention_heads,
            generator,
            kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            bias=config.attention_bias,
            causal=True,
            rotary=config.rotary(),
            dtype=dtype,
        )
        self.post_attention_layernorm = fp.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, generator, dtype)

    def __call__(self, x: ft.Tensor, cache: LayerCache | None = None) -> ft.Tensor:
        """[..., length, dim] to the same; `cache` as in `fp.Attention`."""
        x = x + self.self_attn(self.input_layernorm(x), cache=cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(fp.Module):
    """Tokens to what may come next.

    >>> config = Config(97, 16, 32, 1, 4, 64, num_key_value_heads=2)
    >>> Llama(config, ft.random.Generator(0))(ft.asarray([[1, 2, 3]])).shape
    (1, 3, 97)
    """

    names = NAMES
    plan = "llama"

    def __init__(self, config: Config, generator: ft.random.Generator, dtype: Any = None) -> None:
        dim = config.hidden_size
        self.embed_tokens = fp.Embedding(config.vocab_size, dim, generator, dtype=dtype)
        self.layers = [Layer(config, generator, dtype) for _ in range(config.num_hidden_layers)]
        self.norm = fp.RMSNorm(dim, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = fp.Linear(dim, config.vocab_size, generator, bias=False, dtype=dtype)

    def __call__(self, tokens: ft.Tensor, *, cache: KVPool | None = None, batch: PagedBatch | None = None) -> ft.Tensor:
        """Tokens [batch, length] to logits [batch, length, vocabulary].

        With a cache: tokens [size] of a batch to logits [rows, vocabulary] of what follows each sequence.
        """
        x = self.features(tokens, cache=cache, batch=batch)
        return self.head(x if batch is None else x[batch.last])

    def features(self, tokens: ft.Tensor, *, cache: KVPool | None = None, batch: PagedBatch | None = None) -> ft.Tensor:
        """Tokens [batch, length] to what the head takes, [batch, length, dim]; with a cache [size] to [size, dim]."""
        caches = layer_caches(cache, batch, len(self.layers))
        x = self.embed_tokens(tokens)
        for layer, own in zip(self.layers, caches, strict=True):
            x = layer(x, own)
        return self.norm(x)

    def head(self, x: ft.Tensor) -> ft.Tensor:
        """[..., dim] to logits [..., vocabulary]."""
        return self.embed_tokens.logits(x) if self.lm_head is None else self.lm_head(x)
