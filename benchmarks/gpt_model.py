"""The GPT step in fuel-parallel; a worker of gpt_step.py."""

from __future__ import annotations

import worker
from gpt import EPS, LEARNING_RATE, WEIGHT_DECAY, Array, Config

import fuel_parallel as fp
import fuel_parallel.lazy as ft


class Block(fp.Module):
    """Attention and feed-forward."""

    def __init__(self, config: Config, generator: ft.random.Generator) -> None:
        dim = config.dim
        self.heads = config.heads
        self.attention_norm = fp.LayerNorm(dim, eps=EPS)
        self.query_key_value = fp.Linear(dim, 3 * dim, generator)
        self.attention_out = fp.Linear(dim, dim, generator)
        self.norm = fp.LayerNorm(dim, eps=EPS)
        self.hidden = fp.Linear(dim, 4 * dim, generator)
        self.out = fp.Linear(4 * dim, dim, generator)

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """[batch, length, dim] to the same."""
        batch, length, dim = x.shape
        parts = self.query_key_value(self.attention_norm(x)).reshape(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = ft.unstack(ft.permute_dims(parts, (2, 0, 3, 1, 4)))
        seen = ft.scaled_dot_product_attention(query, key, value, causal=True)
        x = x + self.attention_out(ft.permute_dims(seen, (0, 2, 1, 3)).reshape(batch, length, dim))
        return x + self.out(ft.gelu(self.hidden(self.norm(x)), approximate=True))


class GPT(fp.Module):
    """Tokens to logits."""

    def __init__(self, config: Config, generator: ft.random.Generator) -> None:
        self.token = fp.Embedding(config.vocabulary, config.dim, generator)
        self.position = fp.Embedding(config.context, config.dim, generator)
        self.blocks = [Block(config, generator) for _ in range(config.layers)]
        self.norm = fp.LayerNorm(config.dim, eps=EPS)
        self.head = fp.Linear(config.dim, config.vocabulary, generator, bias=False)

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        """[batch, length] to [batch, length, vocabulary]."""
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(config: Config, weights: dict[str, Array], rank: int, size: int) -> worker.Step:
    """The function of one step."""
    world = fp.init()
    model = GPT(config, ft.random.Generator(0))
    model.load({name: weights.pop(name) for name in list(weights)})
    device = worker.device()
    for variable in model.named_variables().values():
        variable.assign(variable.to(device))
    optimizer = fp.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    fp.realize(model, optimizer)

    def step(tokens: Array, targets: Array) -> float:
        logits = model(ft.asarray(tokens, device=device))
        targets = targets.reshape(-1)
        loss = ft.cross_entropy(logits.reshape(-1, config.vocabulary), ft.asarray(targets, device=device))
        gradients = fp.data_parallel.average_gradients(ft.grad(loss, model.parameters()), world)
        optimizer.update(gradients)
        fp.realize(loss, model, optimizer)
        return float(loss.item())

    return step


if __name__ == "__main__":
    worker.serve(build, f"fuel-parallel {fp.__version__}, numpy {worker.np.__version__}")
