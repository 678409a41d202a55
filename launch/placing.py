"""Giving a rank the place that a topology file and a mesh give it: device, cores and network card.

`fuelrun --topology FILE --mesh dp=2,tp=4` sets the variables; each rank does the rest for itself, so it is the same
under `fuelrun -n`, mpirun and srun. The rank keeps its number; `fp.Mesh.from_environment` orders the ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fuel_parallel.environment import LauncherClaim
from fuel_parallel.errors import LaunchError

if TYPE_CHECKING:
    from fuel_parallel.topology.mesh_axes import MeshAxis

TOPOLOGY = "FUEL_TOPOLOGY"
CARDS = Path("/sys/class/infiniband")
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES"}


def place_rank(claim: LauncherClaim, allowed: frozenset[int]) -> tuple[int, ...]:
    """Sets what the environment of this rank needs; returns the cores near its device, () if there is no such wish.

    `allowed` are the cores that this machine's ranks may use. Raises `FuelError` when file and job do not fit.
    """
    file = os.environ.get(TOPOLOGY)
    if not file:
        return ()
    from fuel_parallel.topology import files
    from fuel_parallel.topology.assignment import Job, assign
    from fuel_parallel.topology.mesh_axes import MESH, POSITION

    known = claim.rank_variables()
    if claim.world_size is None or "LOCAL_RANK" not in known or "LOCAL_WORLD_SIZE" not in known:
        raise LaunchError(
            f"{claim.launcher} does not say which rank of this machine this is, which a placement needs; "
            "start the ranks with fuelrun -n, mpirun or srun, or leave --topology out"
        )
    job = Job(
        host=os.uname().nodename,
        local_rank=int(known["LOCAL_RANK"]),
        local_size=int(known["LOCAL_WORLD_SIZE"]),
        world_size=claim.world_size,
        hosts=hosts_of_the_job(os.environ),
    )
    mine = assign(files.read(file), _axes(os.environ.get(MESH)), job, allowed)
    os.environ[POSITION] = str(mine.position)
    variable = VISIBLE.get(mine.device.kind.value)
    if variable is not None:
        os.environ[variable] = _visible(variable, mine.number)
    for name, value in card_variables(mine.nics).items():
        os.environ.setdefault(name, value)
    return mine.cores


def check(file: str, mesh: str | None, ranks: int) -> None:
    """Whether so many ranks of this machine can be placed: before any of them is started. Raises `FuelError` if not."""
    from fuel_parallel.topology import files
    from fuel_parallel.topology.assignment import Job, assign

    job = Job(host=os.uname().nodename, local_rank=0, local_size=ranks, world_size=ranks)
    assign(files.read(file), _axes(mesh), job)


def card_variables(nics: tuple[str, ...], cards: Path = CARDS) -> dict[str, str]:
    """What UCX and NCCL read, for cards that are InfiniBand devices of this machine; nothing for others."""
    names = [name for name in nics if (cards / name).is_dir()]
    if not names or len(names) < len(nics):
        return {}
    return {"UCX_NET_DEVICES": ",".join(f"{name}:1" for name in names), "NCCL_IB_HCA": "=" + ",".join(names)}


def hosts_of_the_job(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The machines of a SLURM job step, in its order; () elsewhere."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        return ()
    from ClusterShell.NodeSet import NodeSet, NodeSetException

    try:
        return tuple(NodeSet(nodes))
    except NodeSetException:
        return ()


def _axes(mesh: str | None) -> tuple[MeshAxis, ...]:
    from fuel_parallel.topology.mesh_axes import MESH, parse_axes

    return parse_axes(mesh or "dp=-1", MESH)


def _visible(variable: str, number: str) -> str:
    """The device's name for the driver: topologies count what the variable showed when they were made."""
    shown = [word.strip() for word in os.environ.get(variable, "").split(",") if word.strip()]
    if not shown:
        return number
    if int(number) >= len(shown):
        raise LaunchError(
            f"the placement gives this rank GPU {number}, but {variable}={','.join(shown)} shows it {len(shown)} only; "
            "let every rank see all GPUs of its machine (srun --gpus-per-node, not --gpus-per-task; --gpu-bind=none)"
        )
    return shown[int(number)]
