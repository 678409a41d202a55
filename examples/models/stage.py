"""The part of a Llama that a rank of a pipeline has, for generating.

That is some of its layers, on the first rank the table of tokens as well, on the last one the head.
"""

from __future__ import annotations

from models.llama import Llama

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.checkpoint import NameTable
from fuel_parallel.distributed_cache import KVPool, PagedBatch
from fuel_parallel.errors import ArgumentError


class Stage(fp.Module):
    """This rank's part of a Llama, which may be cut over other ranks by `parallelize` already.

    Args:
        model: The whole; nothing of it need have been computed, and what other stages have never is.
        pp: The ranks that have the stages, in order; layers are cut by `partition`.

    >>> from models.llama import Config
    >>> model = Llama(Config(97, 16, 32, 5, 4, 64), ft.random.Generator(0))
    >>> list(Stage(model, fp.SymbolicComm(1, 2)).layers)
    ['3', '4']
    """

    def __init__(self, model: Llama, pp: fp.Communicator) -> None:
        if len(model.layers) < pp.world_size:
            raise ArgumentError(f"Stage: {len(model.layers)} layers cannot be cut into pp={pp.world_size} stages")
        self._pp = pp
        self._dim, self._dtype = model.norm.weight.shape[0], model.norm.weight.dtype
        self._is_first, self._is_last = pp.rank == 0, pp.rank == pp.world_size - 1
        tied = model.lm_head is None
        self.embed_tokens = model.embed_tokens if self._is_first or (self._is_last and tied) else None
        self.layers = {str(i): model.layers[i] for i in fp.partition(len(model.layers), pp.world_size)[pp.rank]}
        self.norm = model.norm if self._is_last else None
        self.lm_head = model.lm_head if self._is_last else None
        others = model.named_variables().keys() - self.named_variables().keys()
        elsewhere = {tensor for binding in model.names.bindings(sorted(others)) for tensor in binding.tensors}
        elsewhere |= {tensor.removeprefix(model.names.prefix) for tensor in elsewhere}
        ignored = [pattern.text for pattern in model.names.ignored]
        self._names = NameTable(model.names.lines, ignored=[*ignored, *elsewhere], prefix=model.names.prefix)

    @property
    def names(self) -> NameTable:
        """What the variables are called in the files of Hugging Face, where other stages' are there as well."""
        return self._names

    def __call__(self, tokens: ft.Tensor, *, cache: KVPool, batch: PagedBatch) -> ft.Tensor | None:
        """Tokens [size] to this rank's part of the logits [rows, vocabulary]; None on all stages but the last."""
        if self._is_first:
            x = self.embed_tokens(tokens)
        else:
            x = self._pp.recv((batch.size, self._dim), self._dtype, self._pp.rank - 1)
        for number, layer in enumerate(self.layers.values()):
            x = layer(x, cache.layer(number, batch))
        if not self._is_last:
            self._pp.send(x, self._pp.rank + 1)
            return None
        x = self.norm(x)[batch.last]
        if self.lm_head is not None:
            return self.lm_head(x)
        if isinstance(self.embed_tokens, fp.Embedding):
            return self.embed_tokens.logits(x)
        return self.embed_tokens.logits(x, gather_output=False)
