"""The GPT step in JAX, one jitted function with donated state; data parallel by a mesh over processes (gloo)."""

from __future__ import annotations

import os

# XLA takes as many threads as the process may use cores when it starts.
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {sorted(cores)[int(os.environ.get("RANK", "0")) % len(cores)]})
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import worker  # noqa: E402
from gpt import EPS, LEARNING_RATE, WEIGHT_DECAY, Array, Config  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

Values = dict[str, jax.Array]


def normed(p: Values, name: str, x: jax.Array) -> jax.Array:
    """Layer norm."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * p[f"{name}.weight"] + p[f"{name}.bias"]


def linear(p: Values, name: str, x: jax.Array) -> jax.Array:
    """x @ W + b."""
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def loss_of(p: Values, tokens: jax.Array, targets: jax.Array, config: Config) -> jax.Array:
    """Mean cross-entropy."""
    batch, length = tokens.shape
    dim, heads = config.dim, config.heads
    visible = jnp.tril(jnp.ones((length, length), bool))
    x = p["token.weight"][tokens] + p["position.weight"]
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        parts = linear(p, f"{block}.query_key_value", normed(p, f"{block}.attention_norm", x))
        query, key, value = parts.reshape(batch, length, 3, heads, dim // heads).transpose(2, 0, 3, 1, 4)
        scores = query @ key.swapaxes(-1, -2) * (dim // heads) ** -0.5
        seen = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf)) @ value
        x = x + linear(p, f"{block}.attention_out", seen.transpose(0, 2, 1, 3).reshape(batch, length, dim))
        hidden = jax.nn.gelu(linear(p, f"{block}.hidden", normed(p, f"{block}.norm", x)), approximate=True)
        x = x + linear(p, f"{block}.out", hidden)
    logits = normed(p, "norm", x) @ p["head.weight"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -picked.mean()


def build(config: Config, weights: dict[str, Array], rank: int, size: int) -> worker.Step:
    """The function of one step."""
    if size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        jax.distributed.initialize(address, num_processes=size, process_id=rank)
    mesh = jax.make_mesh((size,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    everywhere, by_rank = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("dp"))
    parameters: Values = {name: jax.device_put(weights.pop(name), everywhere) for name in list(weights)}
    means = {name: jnp.zeros_like(value) for name, value in parameters.items()}
    squares = {name: jnp.zeros_like(value) for name, value in parameters.items()}
    state = (parameters, means, squares, jnp.zeros((), jnp.float32))
    release_threads()

    def update(state, tokens, targets):  # type: ignore[no-untyped-def]
        parameters, means, squares, count = state
        loss, grads = jax.value_and_grad(loss_of)(parameters, tokens, targets, config)
        count = count + 1
        means = {name: 0.9 * means[name] + 0.1 * g for name, g in grads.items()}
        squares = {name: 0.999 * squares[name] + 0.001 * g * g for name, g in grads.items()}

        def moved(name: str, p: jax.Array) -> jax.Array:
            mean, square = means[name] / (1 - 0.9**count), squares[name] / (1 - 0.999**count)
            return p - LEARNING_RATE * (mean / (jnp.sqrt(square) + 1e-8) + WEIGHT_DECAY * p)

        return ({name: moved(name, p) for name, p in parameters.items()}, means, squares, count), loss

    compiled = jax.jit(update, donate_argnums=0)

    def step(tokens: Array, targets: Array) -> float:
        nonlocal state
        shards = [jax.make_array_from_process_local_data(by_rank, x) for x in (tokens, targets)]
        state, loss = compiled(state, *shards)
        result = float(loss)
        jax.block_until_ready(state)
        return result

    return step


def release_threads() -> None:
    """Lets all threads of this process use every core again."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


if __name__ == "__main__":
    worker.serve(build, f"jax {jax.__version__}")
