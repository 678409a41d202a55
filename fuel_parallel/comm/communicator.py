"""The Communicator: what ranks can do together.

Every method takes *my* shard, builds a node and returns a lazy tensor; the bytes move when a plan runs. Collectives
on a communicator run in the order in which the script made them, on every rank. Shapes and dtypes are checked when the
node is built. A collective runs once: its value is kept as long as somebody holds the tensor.

**Derivatives.** The vjp of a collective is the derivative of the *sum of the losses of all ranks*: the true adjoint.
Where a tensor is replicated and all ranks compute one and the same loss from it (tensor parallelism), that sum would
count the loss once a rank; `replicated=True` says so, and the vjp is then that of the one loss. `replicate` and `shard`
are the other halves of these pairs (Shoeybi et al., 2019, arXiv:1909.08053, section 3; functions f and g).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Self

from fuel_parallel.arguments import checked
from fuel_parallel.backends import check_device, memory_of
from fuel_parallel.backends.device_memory import DeviceMemory
from fuel_parallel.comm.arguments import (
    CommInfo,
    ReduceOp,
    check_differentiable,
    check_dim,
    check_peer,
    check_rank,
    check_reduction,
    equal_rows,
    given_rows,
    size_table,
)
from fuel_parallel.comm.entries import BARRIER, Entry
from fuel_parallel.errors import ArgumentError, CommunicatorError, ShapeError
from fuel_parallel.lazy import dtypes, effects
from fuel_parallel.lazy.node import Op, apply, script_line
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition

if TYPE_CHECKING:
    from fuel_parallel.comm.device import Choice
    from fuel_parallel.comm.guard import Guard
    from fuel_parallel.comm.transport import Transport

__all__ = ["CommInfo", "Communicator", "ReduceOp"]


class Communicator(ABC):
    """An ordered group of ranks. See the module's text; `fp.init()` gives the one of all ranks."""

    how_to_get: ClassVar[str] = "such as fp.init() or mesh['dp']"

    def __init__(self, info: CommInfo, transport: Transport, name: str) -> None:
        self.info = info
        self.transport = transport
        self.name = name
        self.guard: Guard | None = None
        self.device_choice: Choice | None = None
        """How arrays of devices move, and why; None before the first collective on one."""

    @property
    def rank(self) -> int:
        """My number, from 0."""
        return self.info.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.info.world_size

    @property
    def is_root(self) -> bool:
        """Whether I am rank 0."""
        return self.info.is_root

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}: rank {self.rank} of {self.world_size})"

    # A copy of a model talks to the same ranks.

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise CommunicatorError(
            f"{self!r} cannot be pickled: it is a group of running ranks; "
            "what a model holds besides is written by fp.checkpoint"
        )

    # How arrays move.

    def transport_of(self, array: Any) -> Transport:
        """The transport of a collective on an array: `transport` for a host array.

        For the first array of a device the ranks choose one together: a collective call.
        """
        memory = memory_of(array)
        return self.transport if memory is None else self._device_transport(memory)

    def messenger_of(self, memory: DeviceMemory | None) -> Transport:
        """The transport of sends and receives of arrays in a device's memory, None for the host's; not collective."""
        return self.transport

    def _device_transport(self, memory: DeviceMemory) -> Transport:
        return self.transport

    # Collectives.

    def all_reduce(self, x: Tensor, op: ReduceOp = ReduceOp.SUM, *, replicated: bool = False) -> Tensor:
        """The reduction of the shards of all ranks, on every rank; all shards have one shape and dtype.

        vjp: SUM and AVG, the all-reduce of the cotangents by the same op; PRODUCT, MIN and MAX, the sum of the
        cotangents times the local derivative. With `replicated` (SUM and AVG only): the cotangent itself.
        """
        x = self._operand("all_reduce", x)
        check_reduction("all_reduce", x, op)
        if replicated and op not in (ReduceOp.SUM, ReduceOp.AVG):
            raise ArgumentError(f"all_reduce: replicated=True goes with SUM and AVG, not with {op.name}")
        return x if self.world_size == 1 else self._collect(collectives.ALL_REDUCE, x, op, replicated)

    def reduce(self, x: Tensor, op: ReduceOp = ReduceOp.SUM, root: int = 0) -> Tensor:
        """The reduction of the shards of all ranks on rank `root`, zeros on the others.

        vjp (SUM and AVG only): the cotangent of `root`, broadcast.
        """
        x = self._operand("reduce", x)
        check_reduction("reduce", x, op)
        check_rank(self.info, "reduce", "root", root)
        return x if self.world_size == 1 else self._collect(collectives.REDUCE, x, op, root)

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """The tensor of rank `root`, on every rank; the others give one of the same shape and dtype.

        vjp: on `root` the sum of the cotangents of all ranks, elsewhere zero.
        """
        x = self._operand("broadcast", x)
        check_rank(self.info, "broadcast", "root", root)
        return x if self.world_size == 1 else self._collect(collectives.BROADCAST, x, root)

    def all_gather(
        self,
        x: Tensor,
        dim: int = 0,
        *,
        size: int | None = None,
        sizes: Sequence[int] | None = None,
        replicated: bool = False,
    ) -> Tensor:
        """The shards of all ranks joined along `dim`, on every rank.

        Shards are equal, or the parts of `partition(size, world_size)` when the extent `size` of the whole is given, or
        of any extents, `sizes[r]` on rank r. vjp: the reduce-scatter of the cotangents. With `replicated`: my part of
        the cotangent.
        """
        x = self._operand("all_gather", x)
        dim = check_dim("all_gather", x, dim)
        if sizes is None:
            rows = equal_rows(self.info, "all_gather", x.shape[dim], size)
        else:
            rows = given_rows(self.info, "all_gather", sizes)
            if size is not None or rows[self.rank] != x.shape[dim]:
                raise ShapeError(
                    f"all_gather: sizes={list(rows)} goes without size=, and gives rank {self.rank} an extent of "
                    f"{rows[self.rank]}; got size={size} and a shard that has {x.shape[dim]}"
                )
        return x if self.world_size == 1 else self._collect(collectives.ALL_GATHER, x, dim, rows, replicated)

    def reduce_scatter(
        self, x: Tensor, op: ReduceOp = ReduceOp.SUM, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """My part along `dim` of the reduction of all ranks' tensors: that of `partition`, or of extents `sizes`.

        vjp (SUM and AVG only): the all-gather of the cotangents; for AVG divided by the number of ranks.
        """
        x = self._operand("reduce_scatter", x)
        check_reduction("reduce_scatter", x, op)
        dim = check_dim("reduce_scatter", x, dim)
        if sizes is None:
            rows = tuple(len(part) for part in partition(x.shape[dim], self.world_size))
        else:
            rows = given_rows(self.info, "reduce_scatter", sizes)
            if sum(rows) != x.shape[dim]:
                raise ShapeError(
                    f"reduce_scatter: sizes={list(rows)} cover {sum(rows)}, but dimension {dim} of x has an extent of "
                    f"{x.shape[dim]}"
                )
        return x if self.world_size == 1 else self._collect(collectives.REDUCE_SCATTER, x, op, dim, rows)

    def scan(self, x: Tensor, op: ReduceOp = ReduceOp.SUM, *, reverse: bool = False) -> Tensor:
        """The reduction of the tensors of ranks 0 up to mine; with `reverse`, from mine up to the last.

        vjp: SUM, the scan of the cotangents from the other end; PRODUCT, MIN and MAX, the cotangents of those ranks,
        each times its local derivative, for which the tensors of all ranks are gathered.
        """
        return self._scan("scan", x, op, exclusive=False, reverse=reverse)

    def exscan(self, x: Tensor, op: ReduceOp = ReduceOp.SUM, *, reverse: bool = False) -> Tensor:
        """The reduction of the tensors of the ranks before mine; with `reverse`, of those after mine.

        Where there are none it is what changes nothing: 0 for SUM, 1 for PRODUCT, the greatest value of the dtype for
        MIN, the least for MAX (infinities, if it has them). vjp: as that of `scan`.
        """
        return self._scan("exscan", x, op, exclusive=True, reverse=reverse)

    def all_to_all(
        self,
        x: Tensor,
        split_dim: int,
        concat_dim: int,
        *,
        size: int | None = None,
        sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Part r of my tensor, cut along `split_dim`, goes to rank r; what comes is joined along `concat_dim`.

        Cuts are by `partition`. The extents along `concat_dim` of all ranks are equal, or the parts of
        `partition(size, world_size)` when the whole `size` is given. vjp: the all-to-all back.

        With `sizes`, cuts are free: `sizes[s][r]` is the extent of the part that goes from rank s to rank r, the same
        table on all ranks, and both dimensions are one. `all_gather_object` makes it of each rank's own row.

        >>> import fuel_parallel.lazy as ft
        >>> from fuel_parallel import SymbolicComm
        >>> SymbolicComm(1, 2).all_to_all(ft.zeros((5, 8)), 0, 0, sizes=[[1, 3], [4, 1]]).shape
        (4, 8)
        """
        x = self._operand("all_to_all", x)
        split_dim = check_dim("all_to_all", x, split_dim)
        concat_dim = check_dim("all_to_all", x, concat_dim)
        if sizes is not None:
            if split_dim != concat_dim or size is not None:
                raise ArgumentError(
                    "all_to_all: sizes= is for parts along one dimension and without size=; got split_dim="
                    f"{split_dim}, concat_dim={concat_dim}, size={size}"
                )
            table = size_table(self.info, x.shape[split_dim], sizes)
            return x if self.world_size == 1 else self._collect(collectives.ALL_TO_ALL_SIZES, x, split_dim, table)
        if split_dim == concat_dim and x.shape[split_dim] % self.world_size:
            raise ShapeError(
                f"all_to_all: along one dimension ({split_dim}) the extent {x.shape[split_dim]} must be a multiple of "
                f"{self.world_size} ranks"
            )
        rows = equal_rows(self.info, "all_to_all", x.shape[concat_dim], size)
        return x if self.world_size == 1 else self._collect(collectives.ALL_TO_ALL, x, split_dim, concat_dim, rows)

    def shift(self, x: Tensor, offset: int = 1, *, wrap: bool = True) -> Tensor:
        """The tensor of rank `rank - offset`: everybody's tensor moves up by `offset` ranks.

        Without `wrap` the ranks at the end that nobody sends to get zeros. vjp: the shift by `-offset`.
        """
        x = self._operand("shift", x)
        if not isinstance(offset, int):
            raise ArgumentError(f"shift: offset is an int, not {offset!r}")
        if wrap and offset % self.world_size == 0:
            return x
        if not wrap and abs(offset) >= self.world_size:
            return creation.zeros_like(x)
        return self._collect(collectives.SHIFT, x, offset, wrap)

    def replicate(self, x: Tensor) -> Tensor:
        """`x` itself, which all ranks hold alike and from here on use differently. vjp: the sum over ranks."""
        x = self._operand("replicate", x)
        return x if self.world_size == 1 else Tensor(apply(collectives.REPLICATE, (x.node,), self))

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """My part, by `partition` along `dim`, of an `x` that all ranks hold alike. vjp: the all-gather."""
        x = self._operand("shard", x)
        dim = check_dim("shard", x, dim)
        return x if self.world_size == 1 else Tensor(apply(collectives.SHARD, (x.node,), self, dim))

    # Point to point.

    def send(self, x: Tensor, dest: int, tag: int = 0, *, differentiable: bool = False) -> None:
        """Sends `x` to rank `dest` when the next plan runs; does not wait for it to be received.

        If both sides say `differentiable`, `grad` receives the cotangent of `x` from `dest`.
        """
        x = self._operand("send", x)
        check_peer(self.info, "send", "dest", dest)
        check_differentiable("send", x.dtype, differentiable)
        op = point_to_point.SEND_DIFFERENTIABLE if differentiable else point_to_point.SEND
        effects.keep(self._collect(op, x, dest, tag).node)

    def recv(
        self,
        shape: Sequence[int],
        dtype: Any,
        source: int,
        tag: int = 0,
        *,
        differentiable: bool = False,
        device: str = "cpu",
    ) -> Tensor:
        """What rank `source` sends, which must have this shape and dtype, on `device`, wherever it was before.

        If both sides say `differentiable`, `grad` sends the cotangent back to `source`.
        """
        check_peer(self.info, "recv", "source", source)
        check_differentiable("recv", dtypes.dtype(dtype), differentiable)
        op = point_to_point.RECV_DIFFERENTIABLE if differentiable else point_to_point.RECV
        extents = creation.check_shape("recv", shape)
        return self._collect(op, None, extents, dtypes.dtype(dtype), source, tag, check_device(device))

    # At once, not in the graph.

    def barrier(self) -> None:
        """Returns when all ranks have called it. Pending sends are started first."""
        effects.run_pending()
        with self.together(BARRIER):
            self.transport.barrier()

    def together(self, entry: Entry) -> AbstractContextManager[None]:
        """Around a collective call that is made at once: begins when all ranks are there, with the same one."""
        return nullcontext() if self.guard is None else self.guard.at_once(entry, script_line())

    def broadcast_object(self, value: Any = None, root: int = 0, *, type: Any = Any) -> Any:
        """The object of rank `root`, on every rank, at once; the others may leave theirs out.

        For small control data: whatever MessagePack holds. It comes as that, tuples as lists and dataclasses as dicts,
        on `root` too, unless `type` says what to make of it. Collectives that the script made earlier run first.

        >>> from fuel_parallel import IdentityComm
        >>> IdentityComm().broadcast_object({"seed": 7, "layers": (2, 3)})
        {'seed': 7, 'layers': [2, 3]}
        """
        check_rank(self.info, "broadcast_object", "root", root)
        return objects.broadcast_object(self, value, root, type)

    def all_gather_object(self, value: Any, *, type: Any = Any) -> list[Any]:
        """The objects of all ranks, by rank, on every rank, at once; see `broadcast_object`."""
        return objects.all_gather_object(self, value, type)

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """The communicator of all ranks that give the same `color`, ordered by `key`, then by rank.

        A collective call, made at once. `None` takes part in no group and gets None.
        """

    @checked
    def group(self, ranks: Sequence[int], name: str = "group") -> Communicator:
        """The communicator of these ranks of this one, in this order.

        A collective call, made at once: each rank lists the group that it is in, all ranks of a group alike.
        """
        if self.rank not in ranks or len(set(ranks)) < len(ranks):
            raise ArgumentError(
                f"group: rank {self.rank} lists a group that it is in, each rank once; got {list(ranks)}"
            )
        for rank in ranks:
            check_rank(self.info, "group", "each rank", rank)
        return self._group(tuple(ranks), name)

    @abstractmethod
    def _group(self, ranks: tuple[int, ...], name: str) -> Communicator:
        """`group`, of ranks that have been checked."""

    def _scan(self, function: str, x: Tensor, op: ReduceOp, *, exclusive: bool, reverse: bool) -> Tensor:
        x = self._operand(function, x)
        check_reduction(function, x, op)
        if op is ReduceOp.AVG:
            raise ArgumentError(f"{function}: AVG is no scan; take that by SUM, and divide by how many it sums")
        if self.world_size == 1:
            return creation.full_like(x, reduction.identity(op, x.dtype).item()) if exclusive else x
        return self._collect(collectives.SCAN, x, op, exclusive, reverse)

    def _collect(self, op: Op, x: Tensor | None, *attrs: Any) -> Tensor:
        node = apply(op, () if x is None else (x.node,), self, *attrs)
        effects.note(node)
        return Tensor(node)

    def _operand(self, function: str, x: Any) -> Tensor:
        return creation.to_tensor(function, x)


# The ops are built on the communicator's methods, for their vjps are collectives again.
from fuel_parallel.comm import collectives, objects, point_to_point, reduction  # noqa: E402
