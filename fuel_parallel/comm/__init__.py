"""Communication between ranks: collectives as nodes of the lazy graph."""

from fuel_parallel.comm.communicator import CommInfo, Communicator, ReduceOp
from fuel_parallel.comm.identity import IdentityComm
from fuel_parallel.comm.mpi import MpiComm
from fuel_parallel.comm.symbolic import SymbolicComm
from fuel_parallel.comm.world import init

__all__ = ["CommInfo", "Communicator", "IdentityComm", "MpiComm", "ReduceOp", "SymbolicComm", "init"]
