"""Makes the golden files beside it: tiny models of random weights as transformers writes them, and what they answer.

    python -m venv golden && golden/bin/pip install torch transformers
    golden/bin/python tests/golden/make_models.py

Each folder holds config.json and the weights as `save_pretrained` writes them, and `expected.json`: tokens, the logits
that transformers computes for them in float64, and the tokens that greedy decoding adds to the first row. With
`--check FOLDER LIKE` it compares the weights that transformers loads from a folder with those of a golden one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
NEW_TOKENS = 8

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[Any, Any, str, str]] = {
    # In bfloat16 and three files.
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA, initializer_range=0.2), "bfloat16", "40KB"),
    # Six heads over three, a head larger than hidden_size / heads, biases, a tied head, and stretched rotations.
    "llama-uneven": (
        LlamaForCausalLM,
        LlamaConfig(
            **LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True, "head_dim": 10},
            attention_bias=True,
            rope_parameters=LLAMA_3,
            initializer_range=0.2,
        ),
        "float32",
        "5GB",
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=97,
            n_embd=48,
            n_layer=2,
            n_head=6,
            n_positions=64,
            initializer_range=0.3,
            bos_token_id=0,
            eos_token_id=0,
        ),
        "float32",
        "5GB",
    ),
}


def make(name: str) -> None:
    """Writes one folder."""
    kind, config, dtype, largest = MODELS[name]
    torch.manual_seed(sum(name.encode()))
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases and scales start at 0 and 1, where a mistake could not be seen
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model = model.to(getattr(torch, dtype))
    folder = HERE / name
    model.save_pretrained(folder, max_shard_size=largest)
    (folder / "generation_config.json").unlink(missing_ok=True)
    model = kind.from_pretrained(folder, dtype=torch.float64).eval()  # not cast: that would round its frequencies too
    tokens = torch.randint(0, 97, (2, 12))
    with torch.no_grad():
        logits = model(tokens).logits
        row = tokens[:1]
        for _ in range(NEW_TOKENS):
            row = torch.cat([row, model(row).logits[:, -1:].argmax(-1)], dim=1)
    expected = {
        "transformers": transformers.__version__,
        "tokens": tokens.tolist(),
        "logits": [[[float(f"{value:.9g}") for value in place] for place in one] for one in logits.tolist()],
        "greedy": row[0, 12:].tolist(),
    }
    (folder / "expected.json").write_text(json.dumps(expected) + "\n")
    print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes", expected["greedy"])


def check(folder: str, like: str) -> None:
    """Compares what transformers loads from a folder with a golden one, tensor by tensor."""
    kind, _, _, _ = MODELS[like]
    found, wanted = (kind.from_pretrained(path).state_dict() for path in (Path(folder), HERE / like))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].float(), tensor.float()), name
    print(f"{folder}: transformers loads the {len(wanted)} tensors of {like}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--check"]:
        check(*sys.argv[2:4])
    else:
        for model in MODELS:
            make(model)
