"""Buckets: the memory in which all-reduces happen in place.

The input of a large all-reduce is made right in memory of the communicator's transport, if the reduction is the last to
read it: inside a node that is a window which the other ranks see, and nothing is copied into it. Where that input is a
`concat`, as that of a bucket of gradients is, its parts are made in their places, and no `concat` is left to do.

A plan only says that there is a bucket. Its memory is asked for in each run: `Transport.borrow` has some on this rank,
or has none, and then the bucket is ordinary memory. So ranks whose plans differ agree all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.lazy.dtypes import is_half
from fuel_parallel.lazy.node import Op, Spec, define
from fuel_parallel.runtime.program import not_inferred

LEAST_BYTES = 64 << 10
"""Smaller all-reduces work on copies."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """So many bytes, reduced in place by the instruction at `position`."""

    comm: Communicator
    nbytes: int
    position: int

    def allocate(self) -> np.ndarray[Any, Any]:
        """Its memory for one run."""
        found = self.comm.transport.borrow(self.nbytes)
        return np.empty(self.nbytes, dtype=np.uint8) if found is None else found


def may_hold(spec: Spec) -> bool:
    """Whether an array is reduced as it is, and large enough. Bools and 16-bit floats are reduced as something else."""
    return spec.nbytes >= LEAST_BYTES and spec.device == "cpu" and spec.dtype.kind in "iufc" and not is_half(spec.dtype)


def _join_into(xp: Any, out: Any, parts: Sequence[Any], axis: int) -> None:
    """Copies those parts that are not in their places yet."""
    start = 0
    for part in parts:
        place = out[start : start + len(part)]
        if part.__array_interface__["data"] != place.__array_interface__["data"] or not part.flags.c_contiguous:
            place[...] = part
        start += len(part)


JOIN = define(
    Op(
        "join",
        not_inferred,
        kernel=lambda xp, parts, axis: xp.concatenate(parts, axis=axis),
        into=_join_into,
        variadic=True,
        aliases=False,
        attr_names=("axis",),
        shapes="[..., n, ...] of each -> [..., sum of n, ...] along axis",
    )
)
"""A `concat` whose parts are made in their places of a bucket, all or some of them."""
