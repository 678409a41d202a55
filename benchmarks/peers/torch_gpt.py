"""The GPT step in PyTorch, eager or (GPT_COMPILE=1) compiled; data parallel by DistributedDataParallel over gloo.

On a GPU, float32 products are as exact as ours: TF32 is off unless FUEL_MATMUL_PRECISION=high.
"""

from __future__ import annotations

import os

import torch
import worker
from gpt import EPS, LEARNING_RATE, WEIGHT_DECAY, Array, Config
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and feed-forward."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(dim, eps=EPS)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=EPS)
        self.hidden = nn.Linear(dim, 4 * dim)
        self.out = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, dim] to the same."""
        batch, length, dim = x.shape
        parts = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(batch, length, dim))
        return x + self.out(functional.gelu(self.hidden(self.norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Tokens and targets to the loss."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.dim)
        self.position = nn.Embedding(config.context, config.dim)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.dim, eps=EPS)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Both [batch, length]."""
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def build(config: Config, weights: dict[str, Array], rank: int, size: int) -> worker.Step:
    """The function of one step."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(os.environ.get("FUEL_MATMUL_PRECISION") or "highest")
    device = worker.device()
    with torch.device("meta"):
        model = GPT(config)
    # nn.Linear has [out, in].
    tables = ("token.weight", "position.weight")
    values = {}
    for name in list(weights):
        value = torch.from_numpy(weights.pop(name))
        values[name] = value.T.contiguous() if value.ndim == 2 and name not in tables else value
    model.load_state_dict(values, assign=True)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)
    whole: nn.Module = model
    if size > 1:
        torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
        whole = nn.parallel.DistributedDataParallel(model)
    if os.environ.get("GPT_COMPILE") == "1":
        whole = torch.compile(whole)

    def step(tokens: Array, targets: Array) -> float:
        loss = whole(torch.from_numpy(tokens).to(device), torch.from_numpy(targets).to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    worker.serve(build, f"torch {torch.__version__}")
