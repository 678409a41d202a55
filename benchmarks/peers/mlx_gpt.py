"""The GPT step in MLX on the CPU, compiled; one rank."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version

import mlx.core as mx
import worker
from gpt import EPS, LEARNING_RATE, WEIGHT_DECAY, Array, Config
from mlx import nn

Values = dict[str, mx.array]


def linear(p: Values, name: str, x: mx.array) -> mx.array:
    """x @ W + b."""
    return mx.addmm(p[f"{name}.bias"], x, p[f"{name}.weight"])


def normed(p: Values, name: str, x: mx.array) -> mx.array:
    """Layer norm."""
    return mx.fast.layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"], EPS)


def loss_of(p: Values, tokens: mx.array, targets: mx.array, config: Config) -> mx.array:
    """Mean cross-entropy."""
    batch, length = tokens.shape
    dim, heads = config.dim, config.heads
    x = p["token.weight"][tokens] + p["position.weight"]
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        parts = linear(p, f"{block}.query_key_value", normed(p, f"{block}.attention_norm", x))
        query, key, value = parts.reshape(batch, length, 3, heads, dim // heads).transpose(2, 0, 3, 1, 4)
        seen = mx.fast.scaled_dot_product_attention(query, key, value, scale=(dim // heads) ** -0.5, mask="causal")
        x = x + linear(p, f"{block}.attention_out", seen.transpose(0, 2, 1, 3).reshape(batch, length, dim))
        hidden = nn.gelu_approx(linear(p, f"{block}.hidden", normed(p, f"{block}.norm", x)))
        x = x + linear(p, f"{block}.out", hidden)
    logits = normed(p, "norm", x) @ p["head.weight"]
    return nn.losses.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), reduction="mean")


def build(config: Config, weights: dict[str, Array], rank: int, size: int) -> worker.Step:
    """The function of one step."""
    mx.set_default_device(mx.cpu)
    parameters = {name: mx.array(weights.pop(name)) for name in list(weights)}
    means = {name: mx.zeros_like(value) for name, value in parameters.items()}
    squares = {name: mx.zeros_like(value) for name, value in parameters.items()}
    state = [parameters, means, squares, {"count": mx.array(0.0)}]
    mx.eval(state)

    @partial(mx.compile, inputs=state, outputs=state)
    def update(tokens: mx.array, targets: mx.array) -> mx.array:
        loss, grads = mx.value_and_grad(loss_of)(parameters, tokens, targets, config)
        count = state[3]["count"] = state[3]["count"] + 1
        for name, g in grads.items():
            means[name] = 0.9 * means[name] + 0.1 * g
            squares[name] = 0.999 * squares[name] + 0.001 * g * g
            mean, square = means[name] / (1 - 0.9**count), squares[name] / (1 - 0.999**count)
            p = parameters[name]
            parameters[name] = p - LEARNING_RATE * (mean / (mx.sqrt(square) + 1e-8) + WEIGHT_DECAY * p)
        return loss

    def step(tokens: Array, targets: Array) -> float:
        loss = update(mx.array(tokens), mx.array(targets))
        mx.eval(loss, state)
        return loss.item()

    return step


if __name__ == "__main__":
    worker.serve(build, f"mlx {version('mlx')}")
