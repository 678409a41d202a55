"""What a collective is to the other ranks: an entry, its digest, and its line in a message.

Two ranks may run a collective together only if what its shape rule needs to be equal is equal: for an all-reduce the
whole shape, for an all-gather the shape but for the gathered dimension, of which each rank knows all extents.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from fuel_parallel.lazy.node import Attrs, Op, Spec

Facts = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One collective. `shape` and `dtype` are my shard's; `facts` are the other arguments, as they must be everywhere.

    `open_dims` are the dimensions in which shards may differ.
    """

    kind: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    open_dims: tuple[int, ...] = ()
    facts: Facts = field(default_factory=dict)

    @cached_property
    def digest(self) -> int:
        """A positive number of 62 bits, the same for equal entries in every process."""
        shape = None if self.shape is None else [-1 if d in self.open_dims else n for d, n in enumerate(self.shape)]
        words = repr((self.kind, self.dtype, shape, sorted(self.facts.items())))
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little") >> 2 | 1

    def __str__(self) -> str:
        words = [self.kind]
        facts = dict(self.facts)
        if "op" in facts:
            words.append(facts.pop("op"))
        if self.shape is not None:
            words.append(f"{self.dtype}[{', '.join(map(str, self.shape))}]")
        words += [f"{name}={value}" for name, value in facts.items() if value is not False]
        return " ".join(words)


BARRIER = Entry("barrier")
SPLIT = Entry("split")
END = Entry("end of the script")


def packed(entries: Sequence[Entry]) -> memoryview:
    """The digests of entries, one after the other."""
    return memoryview(array("q", [entry.digest for entry in entries]))


def entry_of(op: Op, attrs: Attrs, spec: Spec) -> Entry:
    """The entry of a collective op. `spec` is my shard's; the first attribute is the communicator."""
    facts = dict(zip(op.attr_names[1:], map(_plain, attrs[1:]), strict=True))
    if spec.device != "cpu":
        # The kind only: ranks number their devices as they like, but arrays of another kind move by another way.
        facts["device"] = spec.device.partition(":")[0]
    return Entry(op.name, spec.dtype.name, spec.shape, _open_dims(op.name, facts), facts)


def _open_dims(kind: str, facts: Facts) -> tuple[int, ...]:
    if kind in ("all_gather", "all_to_all_sizes"):
        return (facts["dim"],)
    if kind.startswith("ring_attention"):
        return (0,)  # queries, keys and values of my part of the sequence, flat
    if kind == "gather_rows":
        return (0,)
    if kind == "all_to_all" and facts["concat_dim"] != facts["split_dim"]:
        return (facts["concat_dim"],)
    return ()


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, Enum) else value
