"""Generates text with a Llama on all ranks: many prompts at once, over a paged cache of keys and values.

    fuelrun -n 2 examples/generate.py --model FOLDER --prompt "Once upon a time"
    fuelrun -n 4 examples/generate.py --model FOLDER --mesh dp=2,tp=2 --prompts questions.txt --stats
    fuelrun -n 2 examples/generate.py --model FOLDER --mesh pp=2                   # asks for prompts
    fuelrun -n 2 examples/generate.py --prompt "anything" --temperature 1          # without weights: see below

FOLDER holds config.json, safetensors and tokenizer.json of a Llama, as they are on the Hugging Face hub; the tokenizer
needs the package tokenizers, which is in the extra `examples`. Without --model there is a small model of random weights
whose tokens are bytes: it writes nonsense, but everything else is as with a real one.

Prompts are lines of a file or of standard input, which may come while earlier ones are answered, up to a blank line or
the end (Open MPI 5 passes no end on to ranks: there, use --prompts or a blank line). One prompt is answered as tokens
come. Several are answered by lines of their number and text, each when it is
complete, or with --stream as tokens come.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from llama import ends, read_tokenizer
from models import llama
from models.config import read_json
from models.stage import Stage
from settling import settle

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint, tensor_parallel
from fuel_parallel.distributed_cache import KVPool
from fuel_parallel.errors import ArgumentError, DataError
from fuel_parallel.generation import Engine, GenerationRequest, Replicas, SamplingParameters, Update
from fuel_parallel.tensor_parallel import LayerParallelPlan, LayerRule

AXES = ("dp", "pp", "tp")
SMALL = llama.Config(257, 64, 172, 4, 4, 4096, num_key_value_heads=2)
END_OF_BYTES = 256


@dataclass(frozen=True)
class Tokens:
    """Text to tokens and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]

    @classmethod
    def read(cls, folder: Path) -> Tokens:
        """Those of a model's folder."""
        tokenizer = read_tokenizer(folder)
        return cls(lambda text: tokenizer.encode(text).ids, lambda tokens: tokenizer.decode(list(tokens)), ends(folder))

    @classmethod
    def of_bytes(cls) -> Tokens:
        """Each byte of UTF-8 is a token."""
        return cls(
            lambda text: list(text.encode()),
            lambda tokens: bytes(token for token in tokens if token < END_OF_BYTES).decode(errors="replace"),
            frozenset([END_OF_BYTES]),
        )


@dataclass(frozen=True)
class Job:
    """All that a run needs."""

    replicas: Replicas
    tokens: Tokens
    ask: Callable[[str], GenerationRequest]
    prompts: list[str] | None
    stream: bool
    stats: bool


COUNT = click.IntRange(min=1)
DTYPES = ["float32", "float64", "bfloat16", "float16"]


@click.command(
    help="Generate text with a Llama on all ranks.\n\nWithout --prompt and --prompts, prompts are the lines of "
    "standard input, up to a blank one (or the end, which Open MPI does not pass on to ranks). Without --model, the "
    "model is a small one of random weights.",
    context_settings={"show_default": True},
)
@click.option("--model", "folder", type=click.Path(path_type=Path), help="Folder of Hugging Face's layout.")
@click.option("--prompt", "given", multiple=True, help="A text to go on with; may be given several times.")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="File with a prompt a line.")
@click.option("--mesh", help="Ranks by what they share: dp, the requests; pp, layers; tp, a layer.  [default: tp]")
@click.option("--max-tokens", type=COUNT, default=64, help="Tokens to add to each.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, help="0: the likeliest token, always.")
@click.option("--top-k", type=click.IntRange(min=0), default=0, help="Only the k likeliest tokens; 0: all.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Only those that make up p.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=0)
@click.option("--n", "samples", type=COUNT, default=1, help="Continuations of each prompt.")
@click.option("--stop", multiple=True, help="Text before which a continuation ends; may be given several times.")
@click.option("--stream", is_flag=True, help="Several prompts: show tokens as they come, too.")
@click.option("--stats", is_flag=True, help="Say at the end what was computed, and how fast.")
@click.option("--dtype", type=click.Choice(DTYPES), default="float32", help="Of weights.")
@click.option("--kv-dtype", type=click.Choice([*DTYPES, "int8"]), help="Of keys and values.  [default: --dtype]")
@click.option("--page-size", type=COUNT, default=16, help="Tokens of a page.")
@click.option("--cache-bytes", type=COUNT, default=2**28, help="Memory of keys and values on each rank.")
@click.option("--token-budget", type=COUNT, default=512, help="Tokens of a step.")
@click.option("--max-rows", type=COUNT, default=32, help="Sequences of a step.")
@click.option("--no-prefix-cache", is_flag=True, help="Compute each prompt from its beginning.")
def prepare(
    folder: Path | None,
    given: tuple[str, ...],
    file: Path | None,
    mesh: str | None,
    max_tokens: int,
    samples: int,
    stop: tuple[str, ...],
    stream: bool,
    stats: bool,
    dtype: str,
    kv_dtype: str | None,
    page_size: int,
    cache_bytes: int,
    token_budget: int,
    max_rows: int,
    no_prefix_cache: bool,
    **sampling: Any,
) -> Job:
    """Loads what was asked for."""
    dp, pp, tp, group = who(mesh)
    if given and file:
        raise ArgumentError("--prompt and --prompts: say one of them")
    prompts = list(given) or (None if file is None else read(file))
    config, tokens = (SMALL, Tokens.of_bytes()) if folder is None else (read_config(folder), Tokens.read(folder))
    model = load(config, folder, pp, tp, dtype)
    pool = KVPool.for_model(model, budget_bytes=cache_bytes, page_size=page_size, dtype=kv_dtype or dtype, comm=group)
    engine = Engine(
        model,
        pool,
        vocabulary=config.vocab_size,
        comm=group,
        tp=tp,
        logits_from=group.world_size - tp.world_size,
        context=config.context,
        token_budget=token_budget,
        max_rows=max_rows,
        reuse_prefixes=not no_prefix_cache,
        decode=tokens.decode,
    )

    def ask(text: str) -> GenerationRequest:
        return GenerationRequest(
            prompt=tuple(tokens.encode(text)),
            max_tokens=max_tokens,
            sampling=SamplingParameters(**sampling),
            samples=samples,
            stop_tokens=tokens.ends,
            stop_strings=stop,
        )

    for text in prompts or []:
        engine.check(ask(text))
    return Job(Replicas(engine, dp), tokens, ask, prompts, stream, stats)


def who(text: str | None) -> tuple[fp.Communicator, fp.Communicator, fp.Communicator, fp.Communicator]:
    """The ranks of dp, pp and tp, and those of pp and tp together."""
    world = fp.init()
    if text is not None:
        mesh = fp.Mesh.from_text(text, world)
    elif "FUELRUN_MESH" in os.environ:
        mesh = fp.Mesh.from_environment(world)
    else:
        mesh = fp.Mesh(world, tp=-1)
    if strange := [name for name in mesh.axes if name not in AXES]:
        raise ArgumentError(f"--mesh: the axes here are dp, pp and tp, not {strange[0]!r}")
    dp, pp, tp = (mesh[name] if name in mesh else fp.IdentityComm() for name in AXES)
    inner = tuple(name for name in ("pp", "tp") if name in mesh)
    return dp, pp, tp, mesh[inner] if inner else fp.IdentityComm()


def read(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except OSError as reason:
        raise DataError(f"--prompts {path}: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise DataError(f"--prompts {path}: not UTF-8: {reason.reason} at byte {reason.start}") from None
    found = [line for line in lines if line.strip()]
    if not found:
        raise DataError(f"--prompts {path}: no line has text in it")
    return found


def read_config(folder: Path) -> llama.Config:
    """The configuration of a Llama's folder."""
    kind = read_json(folder / "config.json").get("model_type")
    if kind != "llama":
        raise DataError(f"{folder / 'config.json'}: model_type is {kind!r}; generate.py knows llama")
    return llama.Config.read(folder)


def load(config: llama.Config, folder: Path | None, pp: fp.Communicator, tp: fp.Communicator, dtype: str) -> Stage:
    """This rank's part of the model, read from a folder or random."""
    whole = llama.Llama(config, ft.random.Generator(0), dtype)
    # Each rank keeps the logits of its part of the vocabulary: they need not be gathered to choose from them.
    head = LayerRule("lm_head", "column", {"gather_output": False}, optional=True)
    ready = LayerParallelPlan.ready("llama").rules
    tensor_parallel.parallelize(
        whole, LayerParallelPlan([head, *(rule for rule in ready if rule.layers != head.layers)]), tp
    )
    model = Stage(whole, pp)
    if folder is not None:
        checkpoint.load_huggingface(model, folder, model.names)
    fp.realize(model)
    return model


PATIENCE_S = 20.0
"""Ranks wait for the next line of rank 0 no longer than that at one time, since what waits for long is ended."""


class Typed:
    """The lines of standard input, as they come."""

    def __init__(self) -> None:
        self.ended = False
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        if sys.stdin.isatty():
            print("prompts, one a line; a blank line ends:", file=sys.stderr, flush=True)

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line.strip())
        self._lines.put("")

    def take(self, patience: float) -> list[str]:
        """What has come; where nothing has, waits for a line."""
        found: list[str] = []
        with contextlib.suppress(queue.Empty):
            while not self.ended:
                line = self._lines.get(timeout=patience if patience and not found else 0.001)
                self.ended = not line
                found += [line] if line else []
        return found


@dataclass
class Writer:
    """What is shown of the texts."""

    alone: bool
    stream: bool

    def __call__(self, update: Update, samples: int) -> None:
        """Shows what is new, or a text that is complete."""
        done = update.completion
        if self.alone:
            print(update.text, end="" if done is None else "\n", flush=True)
            return
        name = f"{update.request + 1}" if samples == 1 else f"{update.request + 1}.{update.sample + 1}"
        text = update.text if self.stream else done.text if done is not None else ""
        if (self.stream and text) or (done is not None and not self.stream):
            print(name, text.replace("\\", r"\\").replace("\n", r"\n").replace("\r", r"\r"), sep="\t", flush=True)


def answer(job: Job, world: fp.Communicator) -> None:
    """Answers all prompts, and those that are typed meanwhile."""
    replicas = job.replicas
    typed = Typed() if world.is_root and job.prompts is None else None
    samples = job.ask("x").samples
    write = Writer(samples == 1 and job.prompts is not None and len(job.prompts) == 1, job.stream)
    for text in (job.prompts or []) if world.is_root else []:
        replicas.submit(job.ask(text))
    replicas.idle = job.prompts is None
    while True:
        if typed is not None:
            for line in typed.take(PATIENCE_S if replicas.idle else 0):
                try:
                    replicas.submit(job.ask(line))
                except fp.FuelError as problem:
                    print(f"generate.py: {problem}", file=sys.stderr, flush=True)
        over = typed is None or (typed.ended and not replicas.waiting)
        if replicas.idle and world.broadcast_object(over, type=bool):
            break
        for update in replicas.step():
            write(update, samples)
    if job.stats:
        every = replicas.statistics()
        if world.is_root:
            for number, one in enumerate(every):
                print(*([f"replica {number + 1}"] if len(every) > 1 else []), *one.lines(), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    everyone = fp.init()
    prepared = settle(everyone, lambda: prepare.main(standalone_mode=False))
    if isinstance(prepared, Job):  # not after --help
        answer(prepared, everyone)
