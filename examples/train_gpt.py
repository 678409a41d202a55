"""Trains a small GPT that writes character by character, data parallel over all ranks.

    fuelrun -n 2 examples/train_gpt.py
    fuelrun -n 4 examples/train_gpt.py --text novel.txt --steps 2000 --sample 1000
    fuelrun -n 4 examples/train_gpt.py --checkpoint runs/novel --every 100     # started again, it goes on where it was

Without --text it learns from the help texts that come with Python. Every rank draws the same batch, computes its own
rows of it and averages the gradients with the others: more ranks change the speed and, but for rounding, nothing else.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import click
import numpy as np

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel.errors import ArgumentError, CheckpointError, DataError

T = TypeVar("T")
Tokens = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Config:
    """What the model looks like."""

    vocabulary: int
    dim: int
    layers: int
    heads: int
    context: int
    dtype: str


class Block(fp.Module):
    """Attention and a feed-forward layer, each added to what comes in; both start as zero."""

    def __init__(self, config: Config, generator: ft.random.Generator) -> None:
        dim, dtype = config.dim, config.dtype
        self.heads = config.heads
        self.attention_norm = fp.RMSNorm(dim, dtype=dtype)
        self.query_key_value = fp.Linear(dim, 3 * dim, generator, bias=False, dtype=dtype)
        self.attention_out = fp.Parameter(ft.zeros((dim, dim), dtype=dtype))
        self.norm = fp.RMSNorm(dim, dtype=dtype)
        self.hidden = fp.Linear(dim, 4 * dim, generator, bias=False, dtype=dtype)
        self.out = fp.Parameter(ft.zeros((4 * dim, dim), dtype=dtype))

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """[batch, length, dim] to the same."""
        x = x + self.attend(self.attention_norm(x)) @ self.attention_out
        return x + ft.square(ft.relu(self.hidden(self.norm(x)))) @ self.out

    def attend(self, x: ft.Tensor) -> ft.Tensor:
        """Every position looks at itself and those before it."""
        batch, length, dim = x.shape
        parts = self.query_key_value(x).reshape(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = ft.unstack(ft.permute_dims(parts, (2, 0, 3, 1, 4)))
        seen = ft.scaled_dot_product_attention(query, key, value, causal=True)
        return ft.permute_dims(seen, (0, 2, 1, 3)).reshape(batch, length, dim)


class GPT(fp.Module):
    """Tokens to logits: what may come next, at every position."""

    def __init__(self, config: Config, generator: ft.random.Generator) -> None:
        dim, dtype = config.dim, config.dtype
        self.token = fp.Embedding(config.vocabulary, dim, generator, dtype=dtype)
        self.position = fp.Embedding(config.context, dim, generator, dtype=dtype)
        self.blocks = [Block(config, generator) for _ in range(config.layers)]
        self.norm = fp.RMSNorm(dim, dtype=dtype)
        self.head = fp.Linear(dim, config.vocabulary, generator, bias=False, dtype=dtype)

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        """[batch, length] to [batch, length, vocabulary]."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tokens) -> ft.Tensor:
        """Nats a character, for windows [batch, context + 1] of text."""
        logits = self(ft.asarray(windows[:, :-1]))
        return ft.cross_entropy(logits.reshape(-1, logits.shape[-1]), ft.asarray(windows[:, 1:].reshape(-1)))


@dataclass(frozen=True)
class Job:
    """All that a run needs; the text as numbers, the last twentieth of it held out."""

    config: Config
    characters: str
    training: Tokens
    held_out: Tokens
    steps: int
    batch: int
    lr: float
    seed: int
    sample: int
    metrics: TextIO | None
    checkpoint: Path | None
    every: int
    keep: int

    def windows(self, text: Tokens, starts: Tokens, world: fp.Communicator) -> Tokens:
        """This rank's rows of the batch of windows that begin at `starts`."""
        mine = starts[fp.data_parallel.shard_rows(len(starts), world)]
        return text[mine[:, None] + np.arange(self.config.context + 1)]


COUNT = click.IntRange(min=1)


@click.command(help="Train a small character-level GPT on all ranks.", context_settings={"show_default": True})
@click.option("--text", type=click.Path(path_type=Path), help="UTF-8 text to learn from.  [default: Python's help]")
@click.option("--steps", type=COUNT, default=500)
@click.option("--batch", type=COUNT, default=32, help="Windows of text a step, of all ranks together.")
@click.option("--dim", type=COUNT, default=128)
@click.option("--layers", type=COUNT, default=4)
@click.option("--heads", type=COUNT, default=4)
@click.option("--context", type=COUNT, default=64, help="Characters that the model looks back.")
@click.option("--lr", type=click.FloatRange(0, 1, min_open=True), default=3e-3, help="Highest learning rate.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0)
@click.option("--sample", type=click.IntRange(min=0), default=400, help="Characters to write at the end.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32")
@click.option("--metrics", type=click.Path(path_type=Path), help="File for loss and speed of each step, as JSON lines.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Folder to save to and to go on from.")
@click.option("--every", type=COUNT, default=100, help="Steps from one checkpoint to the next.")
@click.option("--keep", type=COUNT, default=3, help="Checkpoints that stay.")
def prepare(
    text: Path | None, dim: int, layers: int, heads: int, context: int, dtype: str, metrics: Path | None, **rest: Any
) -> Job:
    """Reads and checks what was asked for."""
    world = fp.init()
    fp.data_parallel.shard_rows(rest["batch"], world)
    if dim % heads:
        raise ArgumentError(f"--dim {dim} cannot be shared equally by --heads {heads}")
    characters = read(text)
    codes, tokens = np.unique(np.frombuffer(characters.encode("utf-32-le"), np.uint32), return_inverse=True)
    cut = len(tokens) - len(tokens) // 20
    if len(tokens) - cut <= context:
        raise DataError(
            f"the text has {len(tokens)} characters; with --context {context} it needs {20 * (context + 1)}, "
            "because a twentieth is held out"
        )
    try:
        log = metrics.open("a+") if metrics and world.is_root else None
    except OSError as reason:
        raise DataError(f"--metrics {metrics}: {reason.strerror}") from None
    config = Config(len(codes), dim, layers, heads, context, dtype)
    return Job(config, "".join(map(chr, codes)), tokens[:cut], tokens[cut:], metrics=log, **rest)


def read(path: Path | None) -> str:
    """The text. Python's help repeats itself: each paragraph is taken once, or what is held out were known."""
    if path is None:
        from pydoc_data.topics import topics

        paragraphs = "\n\n".join(topics.values()).split("\n\n")
        return "\n\n".join(dict.fromkeys(paragraph.rstrip() for paragraph in paragraphs))
    try:
        text = path.read_text("utf-8")
    except OSError as reason:
        raise DataError(f"--text {path}: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise DataError(f"--text {path}: not UTF-8: {reason.reason} at byte {reason.start}") from None
    if not text:
        raise DataError(f"--text {path}: the file is empty")
    return text


def train(job: Job, world: fp.Communicator) -> None:
    """The training loop, then a sample of what was learned."""
    say = print if world.is_root else lambda *_: None
    generator = ft.random.Generator(job.seed)
    draw = np.random.default_rng(job.seed)
    model = GPT(job.config, generator)
    optimizer = fp.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
    state = {"model": model, "optimizer": optimizer, "generator": generator, "draw": draw}
    done = resume(job, state, world)
    fp.realize(model, optimizer)
    size = sum(parameter.size for parameter in model.parameters())
    say(f"{size:,} parameters, {len(job.training):,} characters, {world.world_size} rank(s)")
    if done:
        say(f"going on after step {done}, from {job.checkpoint}")
    bar = fp.progress(range(done + 1, job.steps + 1), description="training")
    for step in bar:
        began = time.perf_counter()
        optimizer.lr = job.lr * min(step / 50, 0.55 + 0.45 * math.cos(math.pi * step / job.steps))
        starts = draw.integers(0, len(job.training) - job.config.context, job.batch)
        mine = model.loss(job.windows(job.training, starts, world))
        gradients = fp.data_parallel.average_gradients(ft.grad(mine, model.parameters()), world)
        loss = world.all_reduce(mine, fp.ReduceOp.AVG)
        optimizer.update(gradients)
        fp.realize(loss, model, optimizer)
        speed = job.batch * job.config.context / (time.perf_counter() - began)
        bar.show(loss=loss, tokens_per_s=speed)
        if job.metrics:
            record = {"step": step, "loss": loss.item(), "tokens_per_s": speed}
            print(json.dumps(record), file=job.metrics, flush=True)
        if job.checkpoint and (step == job.steps or step % job.every == 0):
            checkpoint.save(job.checkpoint, state, step=step, comm=world, keep=job.keep, background=True)
        if step == job.steps or step % max(job.steps // 8, 50) == 0:
            say(f"step {step}: held-out loss {held_out_loss(job, model, world):.4f} nats a character")
    if job.sample:
        say(sample(job, model, generator))


def resume(job: Job, state: dict[str, Any], world: fp.Communicator) -> int:
    """Loads the newest checkpoint if there is one, and returns its step; the metrics of later steps are dropped."""
    done = 0
    if job.checkpoint:
        try:
            if checkpoint.latest(job.checkpoint, comm=world) is not None:
                done = checkpoint.load(job.checkpoint, state, comm=world).step
        except CheckpointError as problem:  # the same on all ranks
            give_up(f"--checkpoint {problem}", world.is_root, world)
    if job.metrics:
        job.metrics.seek(0)
        kept = job.metrics.readlines()[:done]
        job.metrics.truncate(0)
        job.metrics.writelines(kept)
        job.metrics.flush()
    return done


def held_out_loss(job: Job, model: GPT, world: fp.Communicator) -> float:
    """The loss over the text that was kept apart, or over 16 batches spread over it where it is longer."""
    last = len(job.held_out) - job.config.context - 1
    batches = min(16, math.ceil(last / job.config.context / job.batch) or 1)
    starts = np.linspace(0, last, batches * job.batch).astype(np.int64).reshape(batches, job.batch)
    losses = [model.loss(job.windows(job.held_out, batch, world)) for batch in starts]
    return float(world.all_reduce(ft.mean(ft.stack(losses)), fp.ReduceOp.AVG))


def sample(job: Job, model: GPT, generator: ft.random.Generator) -> str:
    """Characters drawn from what the model expects, one after the other, on every rank the same."""
    tokens = [job.characters.index(c) for c in "The " if c in job.characters] or [0]
    for _ in fp.progress(range(job.sample), description="writing"):
        logits = model(ft.asarray([tokens[-job.config.context :]]))[0, -1]
        # The largest of these sums falls on each character with its probability (Gumbel, 1954); 0.6 is the temperature.
        noise = -ft.log(-ft.log(generator.uniform(logits.shape, dtype=logits.dtype)))
        tokens.append(int(ft.argmax(logits / 0.6 + noise)))
    return "".join(job.characters[token] for token in tokens)


def settle(world: fp.Communicator, prepare: Callable[[], T]) -> T:
    """What `prepare()` returns; if a rank had a problem, the first of those tells it and all ranks exit with code 2."""
    problem = None
    try:
        with contextlib.redirect_stdout(sys.stdout if world.is_root else None):  # --help once
            result = prepare()
    except click.ClickException as error:
        problem = error.format_message()
    except fp.FuelError as error:
        problem = str(error)
    failed = world.all_gather(ft.asarray([problem is not None])).tolist()
    if True in failed:
        give_up(problem, failed.index(True) == world.rank, world)
    return result


def give_up(problem: str | None, tell: bool, world: fp.Communicator) -> NoReturn:
    """Ends all ranks with code 2, after the one that is to `tell` has told."""
    if tell:
        print(f"{Path(sys.argv[0]).name}: {problem}", file=sys.stderr, flush=True)
    world.barrier()
    sys.exit(2)


if __name__ == "__main__":
    everyone = fp.init()
    prepared = settle(everyone, lambda: prepare.main(standalone_mode=False))
    if isinstance(prepared, Job):  # not after --help
        train(prepared, everyone)
