"""Parameters that several ranks of a pipeline hold copies of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, Shard
from fuel_parallel.runtime.realize import realize


class _Copy(msgspec.Struct):
    name: str
    shape: tuple[int, ...]
    dtype: str


class TiedParameters:
    """Copies of parameters, by name: made equal to that of the first rank, whose it is to be counted and saved.

    Making it is collective over `comm`. `parameters` are all of this rank's.
    """

    def __init__(self, comm: Communicator, tied: Mapping[str, Parameter], parameters: Sequence[Parameter]) -> None:
        self._holders: list[tuple[int, Communicator]] = []
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        for name, parameter in tied.items():
            if id(parameter) not in places:
                raise ArgumentError(f"PipelineRunner: tied[{name!r}] is no parameter of a stage of rank {comm.rank}")
        mine = [_Copy(name, p.shape, p.dtype.name) for name, p in sorted(tied.items())]
        copies = comm.all_gather_object(mine, type=list[_Copy])
        for name in sorted({copy.name for row in copies for copy in row}):
            holders = {rank: copy for rank, row in enumerate(copies) for copy in row if copy.name == name}
            if len({(copy.shape, copy.dtype) for copy in holders.values()}) > 1:
                found = ", ".join(f"{c.dtype}{list(c.shape)} on rank {rank}" for rank, c in holders.items())
                raise ArgumentError(f"PipelineRunner: tied[{name!r}] must be alike on all ranks; it is {found}")
            if len(holders) > 1:
                group = comm.split(0 if name in tied else None, comm.rank)
                if group is not None:
                    self._share(tied[name], places[id(tied[name])], group)

    def summed(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients in the order of the parameters, those of copies summed."""
        result = list(gradients)
        for place, group in self._holders if gradients else []:
            result[place] = group.all_reduce(gradients[place])
        return result

    def _share(self, parameter: Parameter, place: int, group: Communicator) -> None:
        parameter.assign(group.broadcast(parameter))
        realize(parameter)
        if not group.is_root:
            shard = parameter.shard or Shard(parameter.shape, (0,) * parameter.ndim)
            nothing = (slice(0, 0),) * parameter.ndim
            parameter.shard = Shard(shard.global_shape, shard.start, nothing)
        self._holders.append((place, group))
