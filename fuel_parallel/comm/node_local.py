"""Collectives through the memory that the ranks of a node share, where that is faster than MPI.

`NodeLocalTransport` wraps the `MpiTransport` of a communicator. For each call it takes one of the two ways; which one
follows from kind, size, dtype, op and the place of the ranks only, so that all ranks take the same. How sizes are
judged is in `thresholds`; the memory is in `node_memory`.

**Within a node** an array is cut into one *section* for each rank, and a rank reduces its own section, over the arrays
of all ranks in the order of ranks: an element is computed once, so all ranks get the same bits.

- *All-reduce* happens in place in shared memory: each rank reduces its section of all arrays into all arrays. Arrays
  that are not born there are moved there first. It can go on while other work is done: see `shared_reduction`.
- *Small all-reduces* of two ranks: each hands in a copy and reduces all of it, so that one `meet` is enough.
- *The others* go piece by piece: see `node_collectives`.

**Across nodes** (with equally many ranks on each) all-reduce is a reduce-scatter inside, an all-reduce of each section
across, by MPI or `sections`, and an all-gather inside. Broadcast goes across once for each node. Everything else is the
`MpiTransport`'s.

`FUEL_NODE_LOCAL=0` turns all of it off. `FUEL_NODE_SIZE=2` pretends that a node has two ranks, for tests.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fuel_parallel.comm import sections
from fuel_parallel.comm.communicator import ReduceOp
from fuel_parallel.comm.node_collectives import all_gather, all_reduce_small, broadcast, reduce_scatter
from fuel_parallel.comm.node_memory import NodeMemory, memory_of
from fuel_parallel.comm.reduction import BY_MPI, averaged, same_bits_everywhere
from fuel_parallel.comm.shared_reduction import SharedReduction, SharedScatter, announced, settle
from fuel_parallel.comm.thresholds import KINDS, NEVER, least_bytes, read_table
from fuel_parallel.comm.transport import Done, Host, Pending, Receiving, Transport, check_buffers, check_host, filled
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Shape
from fuel_parallel.partitioning import partition

if TYPE_CHECKING:
    from mpi4py import MPI

    from fuel_parallel.comm.mpi import MpiTransport

FLOOR = 1 << 10
"""Below this many bytes MPI is faster everywhere, and nothing is asked."""

SMALL_BYTES = 64 << 10
"""Up to this size two ranks hand in copies of their arrays and each reduces all of it: less to agree on."""


@dataclass(frozen=True, slots=True)
class _Nodes:
    """How the ranks of a communicator lie on nodes. The same on all ranks but for `memory` and `across`."""

    memory: NodeMemory | None
    across: MpiTransport | None
    local_ranks: tuple[int, ...]
    node_of: tuple[int, ...]
    least: dict[str, int]


# Looked up on module and class they cost as much as the rest of a small call.
_ARRAY, _AVG = np.ndarray, ReduceOp.AVG
_NOWHERE = _Nodes(None, None, (), (), dict.fromkeys(KINDS, NEVER))


class NodeLocalTransport(Transport):
    """The transport of a communicator over MPI: shared memory for what is large and near, MPI for the rest."""

    def __init__(self, plain: MpiTransport) -> None:
        self.plain = plain
        self._nodes: _Nodes | None = None
        self.use_thresholds(dict.fromkeys(KINDS, FLOOR))  # until it is known how the ranks lie on nodes
        self._in_place, self._mpi_all_reduce = plain.in_place, plain.comm.Allreduce
        self._of_mpi = {op: (plain.ops[op], {d: plain.datatype(d) for d in dtypes}) for op, dtypes in BY_MPI.items()}

    def all_reduce(self, x: Host, op: ReduceOp, out: Host | None = None) -> Host:
        """See `Transport.all_reduce`."""
        if x is out and type(x) is _ARRAY and x.nbytes < self._shared_from and x.ndim == 1 and not announced:
            # Nothing is to be refused or settled: as `plain.all_reduce` without the calls, and mpi4py need not find out
            # the datatype. A third of the time of the smallest.
            mpi_op, datatypes = self._of_mpi[op]
            datatype = datatypes.get(x.dtype)
            if datatype is not None:
                reduce = self._mpi_all_reduce
                reduce(self._in_place, (x, datatype), mpi_op)
                return x if op is not _AVG else averaged(x, op, self.ranks)
        check_buffers(x, out)
        if x.nbytes < self._shared_from:
            settle()
            return self.plain.all_reduce(x, op, out)
        nodes = self._nodes or self._find_nodes()
        memory = nodes.memory
        copies = x.nbytes >= self._copied
        if memory is not None and self._is_in_place(nodes, x, op) and (out is None or out is x or copies):
            return SharedReduction(memory, self.plain, x, op, reuse=out is x, out=out, copied=self._copied).wait()
        settle()
        if memory is not None and nodes.across is not None and x.nbytes >= self._least["all_reduce_in_place"]:
            return self._all_reduce_across(memory, nodes.across, x, op, out)
        if memory is not None and self._is_handed_in(nodes, x, op):
            result = np.empty_like(x) if out is None else out
            all_reduce_small(memory, x.reshape(-1), op, result.reshape(-1))
            return result
        return self.plain.all_reduce(x, op, out)

    def start_all_reduce(self, x: Host, op: ReduceOp, *, reuse: bool = False) -> Pending:
        """See `Transport.start_all_reduce`. What is reduced in place goes on meanwhile; all else is done at once."""
        check_host(x)
        if x.nbytes < self._at_once_below:
            settle()
            mpi_op, datatypes = self._of_mpi[op]
            datatype = datatypes.get(x.dtype)
            if datatype is None:
                return Done(self.plain.all_reduce(x, op, x if reuse else None))
            result = x if reuse else x.copy()
            self._mpi_all_reduce(self._in_place, (result, datatype), mpi_op)
            return Done(result if op is not _AVG else averaged(result, op, self.ranks))
        nodes = self._nodes or self._find_nodes()
        if nodes.memory is None:
            return self.plain.start_all_reduce(x, op, reuse=reuse)
        if self._is_in_place(nodes, x, op):
            return SharedReduction(nodes.memory, self.plain, x, op, reuse=reuse)
        return super().start_all_reduce(x, op, reuse=reuse)

    def _is_in_place(self, nodes: _Nodes, x: Host, op: ReduceOp) -> bool:
        large = nodes.across is None and x.nbytes >= self._least["all_reduce_in_place"]
        return large and not self._is_handed_in(nodes, x, op)

    def _is_handed_in(self, nodes: _Nodes, x: Host, op: ReduceOp) -> bool:
        return (
            self._least["all_reduce_handed_in"] <= x.nbytes <= SMALL_BYTES
            and len(nodes.local_ranks) == 2
            and nodes.across is None
            and same_bits_everywhere(op, x.dtype)
        )

    @property
    def ranks(self) -> int:
        """See `Transport.ranks`."""
        return self.plain.ranks

    @property
    def rank(self) -> int:
        """See `Transport.rank`."""
        return self.plain.rank

    def borrow(self, nbytes: int) -> Host | None:
        """See `Transport.borrow`."""
        nodes = self._nodes
        if nodes is None or nodes.memory is None or nodes.across is not None:
            return None
        return nodes.memory.borrow(nbytes) if nbytes >= self._least["all_reduce_in_place"] else None

    def reduce_scatter(self, x: Host, op: ReduceOp, rows: Sequence[int], out: Host | None = None) -> Host:
        """See `Transport.reduce_scatter`."""
        settle()
        memory = self._one_node("reduce_scatter", x.nbytes)
        if memory is None:
            return self.plain.reduce_scatter(x, op, rows, out)
        check_host(x)
        result = np.empty((rows[memory.rank], *x.shape[1:]), dtype=x.dtype) if out is None else out
        reduce_scatter(memory, x.reshape(-1), op, _sections(rows, x.size), result.reshape(-1))
        return result

    def all_gather(self, x: Host, rows: Sequence[int], out: Host | None = None) -> Host:
        """See `Transport.all_gather`."""
        settle()
        total = sum(rows)
        # Not from my own bytes: a rank without rows must come to the same number.
        nbytes = total * x.itemsize * math.prod(x.shape[1:])
        memory = self._one_node("all_gather", nbytes)
        if memory is None:
            return self.plain.all_gather(x, rows, out)
        check_host(x)
        result = np.empty((total, *x.shape[1:]), dtype=x.dtype) if out is None else out
        all_gather(memory, x.reshape(-1), _sections(rows, result.size), result.reshape(-1))
        return result

    def start_reduce_scatter(self, x: Host, op: ReduceOp, rows: Sequence[int]) -> Pending:
        """See `Transport.start_reduce_scatter`. In place where an all-reduce is, and so added in the same order."""
        if x.nbytes < self._at_once_below:
            return Done(self.reduce_scatter(x, op, rows))
        nodes = self._nodes or self._find_nodes()
        if nodes.memory is None or not self._is_in_place(nodes, x, op):
            return Done(self.reduce_scatter(x, op, rows))
        check_host(x)
        return SharedScatter(nodes.memory, self.plain, x, op, rows)

    def start_all_gather(self, x: Host, rows: Sequence[int], out: Host | None = None) -> Pending:
        """See `Transport.start_all_gather`. By MPI, which goes on meanwhile."""
        settle()
        return _Settled(self.plain.start_all_gather(x, rows, out))

    def broadcast(self, x: Host, root: int, out: Host | None = None) -> Host:
        """See `Transport.broadcast`."""
        settle()
        if x.nbytes < self._least["broadcast"]:
            return self.plain.broadcast(x, root, out)
        nodes = self._nodes or self._find_nodes()
        memory = nodes.memory
        if memory is None or x.nbytes < self._least["broadcast"]:
            return self.plain.broadcast(x, root, out)
        check_host(x)
        if self.plain.comm.rank == root:
            result = filled(x, out)
        else:
            result = np.empty_like(x) if out is None else out
        local_root = nodes.local_ranks[root]
        if nodes.across is not None and memory.rank == local_root:
            nodes.across.fill(result, nodes.node_of[root])
        broadcast(memory, result.reshape(-1), local_root)
        return result

    def allocate(self, nbytes: int) -> Host | None:
        """See `Transport.allocate`."""
        settle()
        memory = self._find_nodes().memory
        return None if memory is None else memory.allocate(nbytes)

    # What shared memory does not help.

    def reduce(self, x: Host, op: ReduceOp, root: int) -> Host | None:
        """See `Transport.reduce`."""
        settle()
        return self.plain.reduce(x, op, root)

    def all_to_all(self, blocks: Sequence[Host], shapes: Sequence[Shape], most_bytes: int) -> list[Host]:
        """See `Transport.all_to_all`."""
        settle()
        return self.plain.all_to_all(blocks, shapes, most_bytes)

    def exchange(self, x: Host, dest: int | None, source: int | None, out: Host | None = None) -> Host | None:
        """See `Transport.exchange`."""
        settle()
        return self.plain.exchange(x, dest, source, out)

    def start_exchange(self, x: Host, dest: int, source: int) -> Pending:
        """See `Transport.start_exchange`."""
        settle()
        return self.plain.start_exchange(x, dest, source)

    def send(self, x: Host, dest: int, tag: int, *, final: bool = False) -> None:
        """See `Transport.send`."""
        self.plain.send(x, dest, tag, final=final)

    def recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Host:
        """See `Transport.recv`."""
        settle()
        return self.plain.recv(shape, dtype, source, tag)

    def start_recv(self, shape: Shape, dtype: DType, source: int, tag: int) -> Receiving:
        """See `Transport.start_recv`."""
        return self.plain.start_recv(shape, dtype, source, tag)

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        settle()
        self.plain.barrier()

    # Decisions.

    def _one_node(self, kind: str, nbytes: int) -> NodeMemory | None:
        """The memory to go through; None for MPI: the array is small, or not all ranks share a node."""
        if nbytes < self._least[kind]:
            return None
        nodes = self._nodes or self._find_nodes()
        return None if nodes.across is not None or nbytes < self._least[kind] else nodes.memory

    def _find_nodes(self) -> _Nodes:
        """How the ranks lie on nodes, asked once. The first call is collective."""
        if self._nodes is None:
            settle()
            self._nodes = find_nodes(self.plain.comm)
            self.use_thresholds(self._nodes.least)
        return self._nodes

    @property
    def shares_one_node(self) -> bool:
        """Whether all ranks have the memory of one node in common. The first call is collective."""
        nodes = self._find_nodes()
        return nodes.memory is not None and nodes.across is None

    def use_thresholds(self, least: dict[str, int]) -> None:
        """Judges sizes by these from now on, which must be the same on all ranks; a number for each of `KINDS`."""
        self._least, self._copied = least, least["all_reduce_copied"]
        self._shared_from = min(least["all_reduce_handed_in"], least["all_reduce_in_place"])
        self._at_once_below = min(self._shared_from, self.plain.nonblocking_from)

    def _all_reduce_across(
        self, memory: NodeMemory, across: MpiTransport, x: Host, op: ReduceOp, out: Host | None
    ) -> Host:
        # The totals of nodes are not rounded: of 16-bit floats the total of all nodes is, once.
        flat = x.reshape(-1).astype(dtypes.accumulated_in(x.dtype), copy=False)
        plain = ReduceOp.SUM if op is ReduceOp.AVG else op
        parts = partition(x.size, memory.ranks)
        own = np.empty(len(parts[memory.rank]), flat.dtype)
        reduce_scatter(memory, flat, plain, parts, own)
        if x.dtype in BY_MPI[op]:
            across.all_reduce(own, plain, own)
        else:
            sections.all_reduce(across, own, plain, own)
        result = np.empty_like(x) if out is None else out
        whole = result.reshape(-1) if flat.dtype == x.dtype else np.empty_like(flat)
        all_gather(memory, averaged(own, op, self.ranks), parts, whole)
        if whole.dtype != x.dtype:
            result[...] = whole.reshape(x.shape)
        return result


class _Settled(Pending):
    """An operation of MPI, before whose end this rank does its part of all that others may wait for."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending

    def progress(self) -> None:
        """See `Pending.progress`."""
        self.pending.progress()

    def wait(self) -> Any:
        """See `Pending.wait`."""
        settle()
        return self.pending.wait()


def _sections(rows: Sequence[int], size: int) -> list[range]:
    """The elements of each rank's rows, in a flat array of `size` elements."""
    width = size // sum(rows) if sum(rows) else 0
    ends = [width * end for end in itertools.accumulate(rows)]
    return [range(end - width * extent, end) for extent, end in zip(rows, ends, strict=True)]


def find_nodes(comm: MPI.Comm) -> _Nodes:
    """Asks MPI which ranks share a node, and makes their memory. A collective call."""
    from mpi4py import MPI

    from fuel_parallel.comm.mpi import MpiTransport

    wanted = os.environ.get("FUEL_NODE_LOCAL", "1") != "0"
    table = read_table()
    everywhere = np.array([wanted], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, everywhere, MPI.MIN)
    if not everywhere[0]:
        return _NOWHERE
    local = ranks_of_my_node(comm)
    places = comm.allgather((local.bcast(comm.rank), local.rank, local.size))
    leaders = sorted({leader for leader, _, _ in places})
    sizes = {size for _, _, size in places}
    if len(sizes) > 1 or sizes == {1}:
        local.Free()
        return _NOWHERE
    memory = memory_of(local)
    # Each rank read its table, and got its memory or did not, on its own: the greatest thresholds hold for all.
    thresholds = [max(FLOOR, least_bytes(table, kind, memory.ranks)) for kind in KINDS]
    agreed = np.array([*thresholds, not memory.usable], dtype=np.int64)
    comm.Allreduce(MPI.IN_PLACE, agreed, MPI.MAX)
    if agreed[-1]:
        return _NOWHERE
    return _Nodes(
        memory=memory,
        across=MpiTransport(comm.Split(memory.rank, comm.rank)) if len(leaders) > 1 else None,
        local_ranks=tuple(rank for _, rank, _ in places),
        node_of=tuple(leaders.index(leader) for leader, _, _ in places),
        least=dict(zip(KINDS, agreed.tolist(), strict=False)),
    )


def ranks_of_my_node(comm: MPI.Comm) -> MPI.Intracomm:
    """The ranks of `comm` that share this node, in their order. A collective call."""
    from mpi4py import MPI

    local = MPI.Intracomm(comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank))
    pretended = int(os.environ.get("FUEL_NODE_SIZE", "0"))
    if pretended <= 0:
        return local
    part = MPI.Intracomm(local.Split(local.rank // pretended, local.rank))
    local.Free()
    return part
