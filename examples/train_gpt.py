"""Trains a small GPT that writes character by character, over all ranks.

    fuelrun -n 2 examples/train_gpt.py
    fuelrun -n 4 examples/train_gpt.py --text novel.txt --steps 2000 --sample 1000
    fuelrun -n 4 examples/train_gpt.py --mesh dp=2,tp=2 --sequence-parallel
    fuelrun -n 4 examples/train_gpt.py --mesh pp=2,dp=2 --schedule 1f1b --microbatches 8
    fuelrun -n 4 examples/train_gpt.py --checkpoint runs/novel --every 100     # started again, it goes on where it was

Without --text it learns from the help texts that come with Python. Every rank draws the same batch and computes its own
rows of it (dp), of the rows its own heads, features and characters (tp), between those its own positions
(--sequence-parallel), and of the layers its own (pp): more ranks change the speed and, but for rounding, nothing else.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click
import numpy as np
from settling import give_up, settle

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint, tensor_parallel
from fuel_parallel.errors import ArgumentError, CheckpointError, DataError
from fuel_parallel.pipeline_parallel import (
    PipelineModel,
    PipelineRunner,
    Schedule,
    ScheduleKind,
    StageAssignment,
    build,
)

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


@dataclass(frozen=True)
class Ranks:
    """Who works together: layer after layer (pp), on the rows of a batch (dp), and on one and the same row (tp)."""

    world: fp.Communicator
    pp: fp.Communicator
    dp: fp.Communicator
    tp: fp.Communicator
    sequence_dim: int | None


class Block(fp.Module):
    """Attention and a feed-forward layer, each added to what comes in; both start as zero."""

    def __init__(self, config: Config, generator: ft.random.Generator, ranks: Ranks) -> None:
        dim, heads, tp = config.dim, config.heads, ranks.tp
        options: dict[str, Any] = {"bias": False, "sequence_dim": ranks.sequence_dim, "dtype": config.dtype}
        self.attention_norm = norm(config, ranks)
        self.attention = tensor_parallel.ParallelAttention(dim, heads, generator, tp, causal=True, **options)
        self.norm = norm(config, ranks)
        self.hidden = tensor_parallel.ColumnParallel(dim, 4 * dim, generator, tp, **options)
        self.out = tensor_parallel.RowParallel(4 * dim, dim, generator, tp, **options)
        for weight in (self.attention.out.weight, self.out.weight):
            weight.assign(ft.zeros_like(weight))

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """[batch, length, dim] to the same, of which a rank may have some positions."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.out(ft.square(ft.relu(self.hidden(self.norm(x)))))


class Embed(fp.Module):
    """Tokens [batch, length] to vectors, each with its position in it."""

    def __init__(self, config: Config, generator: ft.random.Generator, ranks: Ranks) -> None:
        sizes, dtype = (config.vocabulary, config.dim), config.dtype
        self._ranks = ranks
        self.token = tensor_parallel.VocabParallelEmbedding(
            *sizes, generator, ranks.tp, sequence_dim=ranks.sequence_dim, dtype=dtype
        )
        self.position = fp.Embedding(config.context, config.dim, generator, dtype=dtype)

    def __call__(self, tokens: ft.Tensor) -> ft.Tensor:
        """[batch, length, dim], of which a rank may have some positions."""
        positions = self.position.weight[: tokens.shape[1]]
        if self._ranks.sequence_dim is not None:
            positions = tensor_parallel.scatter_to_ranks(positions, self._ranks.tp, 0)
        return self.token(tokens) + positions


class Head(fp.Module):
    """Vectors to what may come next, at every position: this rank's characters of [batch, length, vocabulary]."""

    def __init__(self, config: Config, generator: ft.random.Generator, ranks: Ranks) -> None:
        sizes, tp = (config.dim, config.vocabulary), ranks.tp
        self.norm = norm(config, ranks)
        self.out = tensor_parallel.ColumnParallel(
            *sizes, generator, tp, bias=False, sequence_dim=ranks.sequence_dim, dtype=config.dtype
        )

    def __call__(self, x: ft.Tensor) -> ft.Tensor:
        """Logits."""
        return self.out(self.norm(x))


class GPT:
    """The layers of this rank's stages, and what is done with them: learn, judge, and say what comes next."""

    def __init__(self, config: Config, generator: ft.random.Generator, ranks: Ranks, schedule: Schedule) -> None:
        blocks = [Block(config, generator, ranks) for _ in range(config.layers)]
        layers = [Embed(config, generator, ranks), *blocks, Head(config, generator, ranks)]
        assignment = StageAssignment.uniform(len(layers), schedule.num_stages)
        self.config, self.ranks = config, ranks
        self.model = PipelineModel(layers, assignment, schedule, ranks.pp.rank)
        self.pipeline = PipelineRunner(self.model.stages, schedule, ranks.pp, loss=self.loss, dp=ranks.dp)

    def loss(self, logits: ft.Tensor, targets: ft.Tensor) -> ft.Tensor:
        """Nats a character."""
        return tensor_parallel.vocab_parallel_cross_entropy(
            logits, targets, self.ranks.tp, classes=self.config.vocabulary
        )

    def learn(self, windows: Tokens) -> tuple[ft.Tensor, list[ft.Tensor]]:
        """The loss of windows [batch, context + 1] of text, and its gradients, both averaged over dp."""
        tokens, targets = windows[:, :-1], windows[:, 1:]
        if self.pipeline.schedule.num_stages > 1:
            step = self.pipeline.step(tokens, targets)
            return step.loss, step.gradients
        # Where nobody waits for a part of it, a step is one graph.
        loss, dp = self.loss(self.model.stages[0](ft.asarray(tokens)), ft.asarray(targets)), self.ranks.dp
        gradients = fp.data_parallel.average_gradients(ft.grad(loss, self.model.parameters()), dp)
        return dp.all_reduce(loss, fp.ReduceOp.AVG), gradients

    def judge(self, windows: Tokens) -> float:
        """The loss of windows of text."""
        return float(self.pipeline.evaluate(windows[:, :-1], windows[:, 1:]))

    def next(self, tokens: Tokens) -> ft.Tensor:
        """The logits [vocabulary] of what comes after the tokens, on every rank."""
        seen = tokens[-self.config.context :]
        # To the whole context, always: one shape is one plan, and positions see nothing that comes after them.
        padded = np.pad(seen, (0, self.config.context - len(seen)))
        logits = self.pipeline.predict(padded[None])
        if logits is None:  # on another stage
            whole = ft.zeros(self.config.vocabulary, dtype=self.config.dtype)
        else:
            mine = logits[0, len(seen) - 1]
            whole = tensor_parallel.gather_from_ranks(mine, self.ranks.tp, size=self.config.vocabulary)
        return self.ranks.pp.broadcast(whole, self.pipeline.schedule.placement[-1])


def norm(config: Config, ranks: Ranks) -> fp.RMSNorm:
    """On whole activations all ranks do the same; on some positions each, their gradients are to be added."""
    if ranks.sequence_dim is None:
        return fp.RMSNorm(config.dim, dtype=config.dtype)
    return tensor_parallel.RMSNorm(config.dim, ranks.tp, dtype=config.dtype)


@dataclass(frozen=True)
class Job:
    """All that a run needs; the text as numbers, the last twentieth of it held out."""

    config: Config
    ranks: Ranks
    schedule: Schedule
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

    def windows(self, text: Tokens, starts: Tokens) -> Tokens:
        """This rank's rows of the batch of windows that begin at `starts`."""
        mine = starts[fp.data_parallel.shard_rows(len(starts), self.ranks.dp)]
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
@click.option(
    "--mesh",
    help="Ranks by what they share: pp, the layers; dp, rows of the batch; tp, a row. Such as dp=-1,tp=2.  "
    "[default: dp]",
)
@click.option(
    "--schedule",
    type=click.Choice([kind.value for kind in ScheduleKind if kind is not ScheduleKind.INFERENCE]),
    default="1f1b",
    help="Order in which pp ranks work; `fuelrun schedule` draws it.",
)
@click.option("--microbatches", type=COUNT, default=8, help="Parts of a batch that pp ranks pass on one by one.")
@click.option("--sequence-parallel", is_flag=True, help="tp ranks share the positions between layers, too.")
@click.option("--metrics", type=click.Path(path_type=Path), help="File for loss and speed of each step, as JSON lines.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Folder to save to and to go on from.")
@click.option("--every", type=COUNT, default=100, help="Steps from one checkpoint to the next.")
@click.option("--keep", type=COUNT, default=3, help="Checkpoints that stay.")
def prepare(
    text: Path | None,
    dim: int,
    layers: int,
    heads: int,
    context: int,
    dtype: str,
    mesh: str | None,
    schedule: str,
    microbatches: int,
    sequence_parallel: bool,
    metrics: Path | None,
    **rest: Any,
) -> Job:
    """Reads and checks what was asked for."""
    ranks = who(mesh, sequence_parallel)
    world = ranks.world
    rows = len(fp.data_parallel.shard_rows(rest["batch"], ranks.dp))
    plan = build(schedule if ranks.pp.world_size > 1 else "gpipe", ranks.pp.world_size, microbatches)
    if plan.num_stages > layers + 2:
        raise ArgumentError(
            f"--schedule {schedule}: {plan.num_stages} stages on {plan.num_ranks} ranks need as many layers; there are "
            f"{layers + 2}, with --layers {layers} and one at each end"
        )
    if plan.num_ranks > 1 and rows < microbatches:
        raise ArgumentError(f"--microbatches {microbatches}: there are {rows} rows to pass on; raise --batch")
    if sequence_parallel and context % ranks.tp.world_size:
        raise ArgumentError(
            f"--sequence-parallel: --context {context} cannot be shared equally by {ranks.tp.world_size} ranks"
        )
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
    return Job(config, ranks, plan, "".join(map(chr, codes)), tokens[:cut], tokens[cut:], metrics=log, **rest)


def who(text: str | None, sequence_parallel: bool) -> Ranks:
    """The ranks by what they share, as --mesh says, of this script or of fuelrun."""
    world = fp.init()
    mesh = fp.Mesh.from_environment(world) if text is None else fp.Mesh.from_text(text, world)
    if strange := [name for name in mesh.axes if name not in ("pp", "dp", "tp")]:
        raise ArgumentError(f"--mesh: the axes here are pp, dp and tp, not {strange[0]!r}")
    pp, dp, tp = (mesh[name] if name in mesh else fp.IdentityComm() for name in ("pp", "dp", "tp"))
    return Ranks(world, pp, dp, tp, 1 if sequence_parallel and tp.world_size > 1 else None)


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


def train(job: Job) -> None:
    """The training loop, then a sample of what was learned."""
    world = job.ranks.world
    say = print if world.is_root else lambda *_: None
    generator = ft.random.Generator(job.seed)
    draw = np.random.default_rng(job.seed)
    gpt = GPT(job.config, generator, job.ranks, job.schedule)
    model = gpt.model
    optimizer = fp.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
    state = {"model": model, "optimizer": optimizer, "generator": generator, "draw": draw}
    done = resume(job, state, world)
    fp.realize(model, optimizer)
    here = sum(math.prod(p.shard.global_shape) if p.shard else p.size for p in model.parameters())
    size = int(job.ranks.pp.all_reduce(ft.asarray(here)))
    say(f"{size:,} parameters, {len(job.training):,} characters, {world.world_size} rank(s)")
    if done:
        say(f"going on after step {done}, from {job.checkpoint}")
    step = done

    def save(background: bool = False) -> None:
        if job.checkpoint:
            checkpoint.save(job.checkpoint, state, step=step, comm=world, keep=job.keep, background=background)

    notice = fp.on_preempt(save, comm=world) if job.checkpoint else None
    bar = fp.progress(range(done + 1, job.steps + 1), description="training")
    for step in bar:
        began = time.perf_counter()
        optimizer.lr = job.lr * min(step / 50, 0.55 + 0.45 * math.cos(math.pi * step / job.steps))
        starts = draw.integers(0, len(job.training) - job.config.context, job.batch)
        loss, gradients = gpt.learn(job.windows(job.training, starts))
        optimizer.update(gradients)
        fp.realize(loss, model, optimizer)
        speed = job.batch * job.config.context / (time.perf_counter() - began)
        bar.show(loss=loss, tokens_per_s=speed)
        if job.metrics:
            record = {"step": step, "loss": loss.item(), "tokens_per_s": speed}
            print(json.dumps(record), file=job.metrics, flush=True)
        if step == job.steps or step % job.every == 0:
            save(background=True)
        if step == job.steps or step % max(job.steps // 8, 50) == 0:
            say(f"step {step}: held-out loss {held_out_loss(job, gpt):.4f} nats a character")
        if notice:
            notice.check()
    if job.sample:
        say(sample(job, gpt, generator))


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


def held_out_loss(job: Job, gpt: GPT) -> float:
    """The loss over the text that was kept apart, or over 16 batches spread over it where it is longer."""
    last = len(job.held_out) - job.config.context - 1
    batches = min(16, math.ceil(last / job.config.context / job.batch) or 1)
    starts = np.linspace(0, last, batches * job.batch).astype(np.int64).reshape(batches, job.batch)
    return sum(gpt.judge(job.windows(job.held_out, batch)) for batch in starts) / batches


def sample(job: Job, gpt: GPT, generator: ft.random.Generator) -> str:
    """Characters drawn from what the model expects, one after the other, on every rank the same."""
    tokens = [job.characters.index(c) for c in "The " if c in job.characters] or [0]
    for _ in fp.progress(range(job.sample), description="writing"):
        logits = gpt.next(np.array(tokens))
        # The largest of these sums falls on each character with its probability (Gumbel, 1954); 0.6 is the temperature.
        noise = -ft.log(-ft.log(generator.uniform(logits.shape, dtype=logits.dtype)))
        tokens.append(int(ft.argmax(logits / 0.6 + noise)))
    return "".join(job.characters[token] for token in tokens)


if __name__ == "__main__":
    everyone = fp.init()
    prepared = settle(everyone, lambda: prepare.main(standalone_mode=False))
    if isinstance(prepared, Job):  # not after --help
        train(prepared)
