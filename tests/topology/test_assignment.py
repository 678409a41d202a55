"""What each process of a job is given: all of them together get the placement, each device once."""

from __future__ import annotations

import msgspec
import pytest

from fuel_parallel.errors import ArgumentError, TopologyError
from fuel_parallel.topology import DeviceInfo, DeviceKind, DeviceTopology, Interconnect, Link, MeshAxis, Nic, NumaDomain
from fuel_parallel.topology.assignment import Assignment, Job, assign, nearest_nics
from fuel_parallel.topology.mesh_axes import parse_axes
from tests.topology.machines import gpus, link, two_nodes


def whole_job(t: DeviceTopology, mesh: str, hosts: list[str], each: int, *, known: bool = False) -> list[Assignment]:
    """The assignments of all processes, host by host."""
    jobs = [
        Job(
            host=host,
            local_rank=rank,
            local_size=each,
            world_size=each * len(hosts),
            hosts=tuple(hosts) if known else (),
        )
        for host in hosts
        for rank in range(each)
    ]
    return [assign(t, parse_axes(mesh), job) for job in jobs]


def test_every_process_of_two_shuffled_machines_gets_one_device_and_tp_stays_inside() -> None:
    t = two_nodes(shuffled=3)
    found = whole_job(t, "dp=-1,tp=4", ["n1.cluster.org", "n0"], 4)
    assert sorted(one.device.id for one in found) == sorted(t.device_ids())
    assert sorted(one.position for one in found) == list(range(8))
    assert [one.device.node for one in found] == ["n1"] * 4 + ["n0"] * 4
    for group in range(2):
        assert len({one.device.node for one in found if one.position // 4 == group}) == 1


def test_the_position_of_a_device_does_not_depend_on_who_asks() -> None:
    t = two_nodes(shuffled=1)
    one_way = {a.device.id: a.position for a in whole_job(t, "tp=4,dp=2", ["n0", "n1"], 4)}
    other_way = {a.device.id: a.position for a in whole_job(t, "tp=4,dp=2", ["n1", "n0"], 4)}
    assert one_way == other_way


def test_fewer_ranks_than_devices_take_the_first_ones_of_each_machine() -> None:
    found = whole_job(two_nodes(), "dp=2,tp=2", ["n0", "n1"], 2)
    assert sorted(one.device.id for one in found) == ["n0/cuda:0", "n0/cuda:1", "n1/cuda:0", "n1/cuda:1"]


def test_a_job_of_some_machines_of_a_cluster() -> None:
    t = two_nodes(nodes=4)
    assert t.nodes == ["n0", "n1", "n2", "n3"]
    found = whole_job(t, "dp=-1,tp=4", ["n1", "n3"], 4, known=True)
    assert {one.device.node for one in found} == {"n1", "n3"}


def test_one_machine_may_be_called_anything() -> None:
    found = whole_job(gpus(2, "theirs", None), "dp=2", ["mine"], 2)
    assert [one.device.id for one in found] == ["theirs/cuda:0", "theirs/cuda:1"]
    assert [one.number for one in found] == ["0", "1"]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({"host": "n7"}, "this machine, n7, is not in the topology, whose machines are n0, n1"),
        (
            {"local_size": 8, "local_rank": 0},
            "the placement gives 4 of its 8 ranks to this machine, n0, but the launcher",
        ),
        ({"world_size": 12}, "the mesh has 12 ranks and each takes a device, but there are 8 usable devices"),
    ],
)
def test_jobs_that_do_not_fit(job: dict[str, object], said: str) -> None:
    fitting = Job(host="n0", local_rank=0, local_size=4, world_size=8)
    with pytest.raises((TopologyError, ArgumentError), match=said):
        assign(two_nodes(), parse_axes("dp=-1,tp=2"), msgspec.structs.replace(fitting, **job))


def test_a_mesh_of_another_size_is_refused() -> None:
    with pytest.raises(ArgumentError, match="the mesh dp=2,tp=2 has 4 ranks, but the job has 8"):
        whole_job(two_nodes(), "dp=2,tp=2", ["n0", "n1"], 4)


def test_too_few_cpus_say_how_to_describe_one_for_each_rank() -> None:
    t = DeviceTopology()
    t.add_device(DeviceInfo(id="cpu:0", kind=DeviceKind.CPU))
    with pytest.raises(ArgumentError, match="probe --per-rank -n N` describes one for each rank"):
        whole_job(t, "dp=2", ["laptop"], 2)


def test_ranks_whose_devices_are_near_the_same_cores_share_them() -> None:
    t = DeviceTopology()
    for n, cores in enumerate(["0-3", "0-3", "4-7", "4-7"]):
        t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA, cores=cores))
    axes = [MeshAxis(name="dp", size=4, count=0)]
    job = Job(host="here", local_rank=0, local_size=4, world_size=4)
    cores = [assign(t, axes, msgspec.structs.replace(job, local_rank=n)).cores for n in range(4)]
    assert sorted(core for mine in cores for core in mine) == list(range(8))
    assert {cores[0], cores[1]} == {(0, 1), (2, 3)}
    # Of a cpuset's cores only those count that there are; a device far from all of them has no near ones.
    assert assign(t, axes, job, allowed={0, 1, 9}).cores == (0,)
    assert assign(t, axes, job, allowed={9}).cores == ()


def test_the_nearest_card_is_the_one_behind_the_same_switch() -> None:
    t = DeviceTopology()
    t.add_numa(NumaDomain(id="numa:0", index=0))
    pcie = link(24, 0.5, Interconnect.PCIE)
    for n in range(2):
        t.add_device(DeviceInfo(id=f"cuda:{n}", kind=DeviceKind.CUDA))
        t.add_nic(Nic(id=f"nic:mlx5_{n}", name=f"mlx5_{n}"))
        t.add_link(f"cuda:{n}", "numa:0", pcie)
        t.add_link(f"nic:mlx5_{n}", "numa:0", pcie)
        t.add_link(f"cuda:{n}", f"nic:mlx5_{n}", pcie)
    assert [nearest_nics(t, f"cuda:{n}") for n in range(2)] == [("mlx5_0",), ("mlx5_1",)]
    far = DeviceTopology()
    far.add_device(DeviceInfo(id="cuda:0", kind=DeviceKind.CUDA))
    for n in range(2):
        far.add_nic(Nic(id=f"nic:{n}", name=f"mlx5_{n}"))
    assert nearest_nics(far, "cuda:0") == ()  # nothing is known of the way
    for n in range(2):
        far.add_link("cuda:0", f"nic:{n}", Link(bandwidth_mb_s=1000.0))
    assert nearest_nics(far, "cuda:0") == ()  # all alike: the MPI uses both
