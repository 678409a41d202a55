"""Plans for models whose layers have the names that transformers gives them.

Their attention is `fp.Attention`, under the name of the layer that holds the four projections there. `**` stands for
what comes before, with its dot: a model may be the whole or a part of another. Layers of style `sequence` are split for
parts of the sequence only.
"""

from __future__ import annotations

from typing import Any

Line = tuple[str, str, dict[str, Any], bool]

_WHOLE: dict[str, Any] = {"gather_output": True}

READY: dict[str, tuple[Line, ...]] = {
    "llama": (
        ("**embed_tokens", "vocab", {}, False),
        ("**layers.*.self_attn", "attention", {}, False),
        ("**layers.*.mlp.gate_proj", "column", {}, False),
        ("**layers.*.mlp.up_proj", "column", {}, False),
        ("**layers.*.mlp.down_proj", "row", {}, False),
        ("**layers.*.input_layernorm", "sequence", {}, False),
        ("**layers.*.post_attention_layernorm", "sequence", {}, False),
        ("**norm", "sequence", {}, False),
        ("lm_head", "column", _WHOLE, True),
    ),
    "gpt2": (
        ("**wte", "vocab", {}, False),
        ("**h.*.attn", "attention", {}, False),
        ("**h.*.mlp.c_fc", "column", {}, False),
        ("**h.*.mlp.c_proj", "row", {}, False),
        ("lm_head", "column", _WHOLE, True),
    ),
    "bert": (
        ("**embeddings.word_embeddings", "vocab", {}, False),
        ("**layer.*.attention", "attention", {}, False),
        ("**layer.*.intermediate.dense", "column", {}, False),
        ("**layer.*.output.dense", "row", {}, False),
    ),
}
