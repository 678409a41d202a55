"""The axes of a mesh as placement sees them: how many ranks, and what those of a group send each other in a step."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fuel_parallel.errors import ArgumentError, DataError
from fuel_parallel.sizes import bytes_of
from fuel_parallel.topology.algorithms import Collective

if TYPE_CHECKING:
    from fuel_parallel.topology.network import Array


MESH, POSITION = "FUEL_MESH", "FUEL_POSITION"
"""What `fuelrun --mesh` asks for, and which place in it a rank has been given."""


class MeshAxis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A named axis. The last axis of a mesh has its ranks next to each other.

    Args:
        name: As in `Mesh(world, dp=2, tp=4)`.
        size: Ranks along it.
        nbytes: Size in bytes of the array of each collective; `Collective` says of which array.
        collective: What the ranks along it do.
        count: How many such collectives there are in a step.
        within_node: Whether all ranks of a group must be in one machine.
    """

    name: str
    size: int
    nbytes: int = 1 << 20
    collective: Collective = Collective.ALL_REDUCE
    count: float = 1.0
    within_node: bool = False


def parse_axis(text: str, option: str = "--axis") -> MeshAxis:
    """An axis from NAME=SIZE[:COLLECTIVE][:BYTES]. Raises `ArgumentError`, which names the `option`.

    >>> parse_axis("tp=8:16MiB").nbytes >> 20, parse_axis("pp=4:p2p").collective
    (16, <Collective.P2P: 'p2p'>)
    """
    first, *rest = text.strip().split(":")
    name, _, size = first.partition("=")
    if not name.isidentifier() or re.fullmatch(r"-1|0*[1-9][0-9]{0,8}", size) is None:
        raise ArgumentError(f"{option} {text}: expected NAME=SIZE[:COLLECTIVE][:BYTES], such as tp=8:16MiB")
    axis = MeshAxis(name=name, size=int(size))
    for word in rest:
        if word in {one.value for one in Collective}:
            axis = msgspec.structs.replace(axis, collective=Collective(word))
        else:
            axis = msgspec.structs.replace(axis, nbytes=_bytes(word, f"{option} {text}"))
    return axis


def parse_axes(text: str, option: str = "--mesh") -> tuple[MeshAxis, ...]:
    """The axes of a mesh such as dp=2,tp=4, outermost first; one size may be -1.

    An axis of which no bytes are said is taken to move eight times as much as the one before it: the last axis has the
    closest ranks.

    >>> [axis.size for axis in parse_axes("dp=-1,tp=4")]
    [-1, 4]
    """
    axes = [parse_axis(part, option) for part in text.split(",")]
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names) or sum(axis.size == -1 for axis in axes) > 1:
        raise ArgumentError(f"{option} {text}: each axis has a name of its own, and one at most the size -1")
    said = [":" in part and any(word[:1].isdigit() for word in part.split(":")[1:]) for part in text.split(",")]
    return tuple(
        axis if known else msgspec.structs.replace(axis, nbytes=axis.nbytes * 8 ** min(i, 8))
        for i, (axis, known) in enumerate(zip(axes, said, strict=True))
    )


def axes_text(axes: Sequence[MeshAxis]) -> str:
    """The axes as `parse_axes` reads them, with the bytes of all of a step's collectives together.

    >>> axes_text(parse_axes("dp=2,tp=4:p2p:16MiB"))
    'dp=2:all_reduce:1048576,tp=4:p2p:16777216'
    """
    return ",".join(f"{axis.name}={axis.size}:{axis.collective.value}:{int(axis.nbytes * axis.count)}" for axis in axes)


def read_axes(path: Path) -> str:
    """The mesh of a file that `fuelrun plan -o FILE` wrote, or of one with a table `[mesh]` of sizes, as text.

    Raises `DataError` when there is none.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as reason:
        raise DataError(f"cannot read {path}: {reason.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
        raise DataError(f"{path} is no TOML: {reason}") from None
    axes, sizes = found.get("axes"), found.get("mesh")
    if isinstance(axes, str):
        return axes
    if not isinstance(sizes, dict) or not sizes:
        raise DataError(f"{path} has no mesh; expected a table [mesh] with sizes such as dp = 2 and tp = 4")
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def filled(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The sizes with what is left over of `ranks` in place of -1; raises `ArgumentError` if nothing whole is.

    >>> filled({"dp": -1, "tp": 2}, 8)
    {'dp': 4, 'tp': 2}
    """
    known = math.prod(size for size in sizes.values() if size != -1)
    rest = [name for name, size in sizes.items() if size == -1]
    if len(rest) > 1:
        raise ArgumentError(f"one axis at most can have the size -1, but {' and '.join(rest)} do")
    if rest and ranks % known:
        others = ", ".join(f"{name}={size}" for name, size in sizes.items() if size != -1)
        raise ArgumentError(f"{ranks} ranks cannot be divided by {others}: {rest[0]}=-1 has no size; change a size")
    return {name: ranks // known if size == -1 else size for name, size in sizes.items()}


def ranks_of(axes: Sequence[MeshAxis]) -> int:
    """How many ranks a mesh has. Raises `ArgumentError` when it is none.

    >>> ranks_of([MeshAxis(name="dp", size=2), MeshAxis(name="tp", size=4)])
    8
    """
    names = [axis.name for axis in axes]
    if not axes or len(set(names)) < len(names):
        raise ArgumentError(f"a mesh has one or more axes, each with a name of its own; got {names}")
    for axis in axes:
        if axis.size < 1 or axis.nbytes < 0 or not 0 <= axis.count < math.inf:
            raise ArgumentError(
                f"axis {axis.name!r}: expected size >= 1, nbytes >= 0 and count >= 0, "
                f"got size {axis.size}, nbytes {axis.nbytes}, count {axis.count}"
            )
    return math.prod(axis.size for axis in axes)


def groups_of(axes: Sequence[MeshAxis]) -> list[Array]:
    """For each axis the ranks of its groups, a row for each group."""
    import numpy as np

    ranks = np.arange(ranks_of(axes)).reshape([axis.size for axis in axes])
    return [np.moveaxis(ranks, i, -1).reshape(-1, axis.size) for i, axis in enumerate(axes)]


def _bytes(word: str, where: str) -> int:
    nbytes = bytes_of(word)
    if nbytes is None:
        kinds = ", ".join(one.value for one in Collective)
        raise ArgumentError(f"{where}: {word!r} is neither a collective ({kinds}) nor a size such as 4096 or 16MiB")
    return nbytes
