"""Sentences a second with all-MiniLM-L6-v2: examples/embed.py against sentence-transformers, in turns.

    python benchmarks/embed.py
    python benchmarks/embed.py --json --peer-python PATH_OF_ITS_PYTHON

The peer's Python needs sentence-transformers, ours the weights (docs/embed.md); without --peer-python ours runs alone.
Each round embeds all sentences, tokens included, 32 at a time. The sentences are paragraphs of Python's help, drawn at
random, of mixed length. Three races, with as many cores on both sides:

| ours | sentence-transformers |
|---|---|
| 1 rank | 1 process with 1 thread |
| dp=2: each rank half of the sentences | 2 processes with 1 thread, each half of the sentences |
| tp=2: each rank half of the matrices | 1 process with 2 threads |

Ratios are medians over neighbouring rounds, above 1 where ours is faster. The means of all vectors must agree.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import numpy as np
import race
from race import Workers

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

RACES = {"1 rank": ("dp=1", 1, 1), "2 ranks, dp": ("dp=2", 2, 1), "2 ranks, tp": ("tp=2", 1, 2)}
"""Our mesh; the peer's processes and the threads of each."""

AGREEMENT = 1e-7
"""Of the means over all elements, some 1e-3 large, of vectors that agree to 1e-6."""

PEER = "sentence-transformers"


def sentences(count: int) -> list[str]:
    """Different paragraphs of Python's help of more than 20 characters, white space made single blanks."""
    paragraphs = dict.fromkeys(" ".join(p.split()) for topic in topics.values() for p in topic.split("\n\n"))
    found = [paragraph for paragraph in paragraphs if len(paragraph) > 20]
    chosen = np.random.default_rng(0).permutation(len(found))[:count]
    return [found[i] for i in chosen]


def measure(folder: Path, mesh: str, processes: int, threads: int, rounds: int, peer: str | None) -> dict[str, Any]:
    """One race."""
    ranks = int(mesh.partition("=")[2])
    workers = {"ours": race.under_fuelrun("fuel-parallel", "embed_model.py", folder, ranks, "--mesh", mesh)}
    if peer:
        more = {"THREADS": str(threads), "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        script = "peers/sentence_transformers_embed.py"
        workers["peer"] = race.by_hand(PEER, peer, script, folder, processes, **more)
    with ExitStack() as stack:
        ready: dict[str, Workers] = {name: stack.enter_context(each) for name, each in workers.items()}
        means = {name: each.step(0)[1] for name, each in ready.items()}  # which also warms them up
        if max(means.values()) - min(means.values()) > AGREEMENT:
            raise click.ClickException(f"the vectors differ: their means are {means}")
        racers = [lambda number, each=each: each.step(number)[0] for each in ready.values()]
        times = dict(zip(ready, race.take_turns(racers, rounds), strict=True))
        report: dict[str, Any] = {"mesh": mesh, "ranks": ranks, "rounds": rounds, "means": means}
        for name, taken in times.items():
            report |= race.summary(name, taken)
        if peer:
            pairs = [theirs / ours for ours, theirs in zip(times["ours"], times["peer"], strict=True)]
            report |= {"ratio": statistics.median(pairs), "ratio_min": min(pairs), "ratio_max": max(pairs)}
        report["versions"] = {name: each.version for name, each in ready.items()}
    return report


def describe(title: str, report: dict[str, Any], count: int) -> Iterator[str]:
    """A race in words."""
    yield title
    for name in ("ours", "peer"):
        if f"{name}_ms" in report:
            fastest, middle, slowest = (count / report[f"{name}{kind}_ms"] * 1e3 for kind in ("_min", "", "_max"))
            label = PEER if name == "peer" else name
            spread = f"({slowest:.1f} to {fastest:.1f})"
            yield f"  {label:22} {middle:7.1f} sentences/s  {spread:18} {report['versions'][name]}"
    if "ratio" in report:
        yield f"  ours / {PEER}: {report['ratio']:.2f} ({report['ratio_min']:.2f} to {report['ratio_max']:.2f})"


@click.command(help="Time examples/embed.py against sentence-transformers.", context_settings={"show_default": True})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--peer-python", help="The Python that has sentence-transformers; nobody is raced if left out.")
@click.option("--sentences", "count", type=click.IntRange(min=2), default=512, help="Sentences of a round.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, help="Rounds that count.")
@click.option("--race", "chosen", type=click.Choice(list(RACES)), multiple=True, help="One race.  [default: all]")
def main(as_json: bool, peer_python: str | None, count: int, rounds: int, chosen: tuple[str, ...]) -> None:
    """Prints each race when it is over, or one report of all."""
    from models import bert

    from fuel_parallel.errors import FuelError

    try:
        with tempfile.TemporaryDirectory(prefix="embed-") as name:
            folder = Path(name)
            job = {"model": str(bert.sentence_model_folder()), "sentences": sentences(count - count % 2)}
            (folder / "job.json").write_text(json.dumps(job), "utf-8")
            races = {}
            for title in chosen or RACES:
                races[title] = measure(folder, *RACES[title], rounds, peer_python)
                if not as_json:
                    print("\n".join(describe(title, races[title], len(job["sentences"]))), flush=True)
    except (race.WorkerFailed, OSError, FuelError) as reason:
        raise click.ClickException(str(reason)) from None
    if as_json:
        print(json.dumps({"sentences": len(job["sentences"]), "races": races, "machine": asdict(race.Machine.this())}))


if __name__ == "__main__":
    main()
