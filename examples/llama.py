"""Lets a pretrained Llama (or GPT-2) go on with a text, its layers cut over all ranks.

    fuelrun -n 2 examples/llama.py FOLDER --prompt "Once upon a time"
    fuelrun -n 4 --mesh dp=1,tp=4 examples/llama.py FOLDER --tokens 1,450,6635 --new 8

FOLDER holds config.json, safetensors and, for --prompt, tokenizer.json, as they are on the Hugging Face hub. Each rank
reads its part of each weight and no other. --prompt needs the package tokenizers, which is in the extra `examples`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from models import gpt2, llama
from models.config import read_json
from settling import settle

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint, tensor_parallel
from fuel_parallel.errors import ArgumentError, DataError

MODELS = {"llama": (llama.Config, llama.Llama), "gpt2": (gpt2.Config, gpt2.GPT2)}


def load(folder: Path, tp: fp.Communicator, dtype: Any = None) -> tuple[Any, Any]:
    """The configuration and the model of a folder, cut over the ranks of `tp`.

    Raises `DataError` for a configuration that is not understood, `CheckpointError` for weights that do not fit.
    """
    name = read_json(folder / "config.json").get("model_type")
    if name not in MODELS:
        raise DataError(f"{folder / 'config.json'}: model_type is {name!r}; known are {', '.join(MODELS)}")
    read, build = MODELS[name]
    config = read.read(folder)
    model = build(config, ft.random.Generator(0), dtype)
    tensor_parallel.parallelize(model, tensor_parallel.LayerParallelPlan.ready(model.plan), tp)
    checkpoint.load_huggingface(model, folder, model.names)
    return config, model


def go_on(model: Any, tokens: list[int], count: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The `count` likeliest tokens, one after the other, that follow `tokens`; fewer where one of `stop` is among them.

    The length is that of the whole from the beginning on, and what comes later is not seen: there is one plan.
    """
    row = np.zeros((1, len(tokens) + count), np.int64)
    row[0, : len(tokens)] = tokens
    for place in range(len(tokens), row.shape[1]):
        last = ft.take(model.features(ft.asarray(row)), ft.asarray([place - 1]), axis=1)
        row[0, place] = int(ft.argmax(model.head(last)))
        if row[0, place] in stop:
            return row[0, len(tokens) : place + 1].tolist()
    return row[0, len(tokens) :].tolist()


@click.command(help="Let a pretrained model go on with a text.", context_settings={"show_default": True})
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompt", help="The text.")
@click.option("--tokens", help="Its tokens, as numbers with commas between them, in place of --prompt.")
@click.option("--new", type=click.IntRange(min=1), default=32, help="Tokens to add.")
@click.option("--dtype", type=click.Choice(["float32", "float64", "bfloat16"]), default="float32")
def prepare(folder: Path, prompt: str | None, tokens: str | None, new: int, dtype: str) -> Callable[[], None]:
    """Loads what was asked for."""
    mesh = fp.Mesh.from_environment()
    tp = mesh["tp"] if "tp" in mesh.axes else mesh.comm
    tokenizer = None if prompt is None else read_tokenizer(folder)
    start = numbers(tokens) if tokenizer is None else tokenizer.encode(prompt).ids
    began = time.perf_counter()
    config, model = load(folder, tp, dtype)
    if not 0 < len(start) <= config.context - new:
        raise ArgumentError(f"{len(start)} tokens and --new {new}: the model was made for 1 to {config.context} in all")
    if not all(0 <= token < config.vocab_size for token in start):
        raise ArgumentError(f"--tokens: the model knows 0 to {config.vocab_size - 1}; got {start}")
    held = sum(variable.nbytes for variable in model.named_variables().values())
    loaded = f"{held:,} bytes a rank, read in {time.perf_counter() - began:.2f} s; {tp.world_size} rank(s)"

    def run() -> None:
        found = go_on(model, start, new, ends(folder))
        if mesh.comm.is_root:
            print(loaded)
            print(found if tokenizer is None else prompt + tokenizer.decode(found))

    return run


def numbers(tokens: str | None) -> list[int]:
    """The numbers in a text."""
    if tokens is None:
        raise ArgumentError("say --prompt TEXT, or --tokens with numbers such as 1,450,6635")
    try:
        return [int(word) for word in tokens.split(",")]
    except ValueError:
        raise ArgumentError(f"--tokens: expected numbers with commas between them; got {tokens!r}") from None


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder."""
    try:
        import tokenizers
    except ImportError:
        raise ArgumentError(
            "--prompt needs the package tokenizers: pip install 'fuel-parallel[examples]'; --tokens does without"
        ) from None
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{file}: there is no such file; --tokens does without")
    return tokenizers.Tokenizer.from_file(str(file))


def ends(folder: Path) -> frozenset[int]:
    """The tokens that end a text."""
    said = read_json(folder / "config.json").get("eos_token_id")
    return frozenset([said] if isinstance(said, int) else said or [])


if __name__ == "__main__":
    everyone = fp.init()
    generate = settle(everyone, lambda: prepare.main(standalone_mode=False))
    if callable(generate):  # not after --help
        generate()
