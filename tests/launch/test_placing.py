"""Ranks with a topology file: device, cores and place in the mesh, under fuelrun -n and under mpirun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuel_parallel.errors import LaunchError
from fuelrun.launch import placing

SHOW = """
import os
import fuel_parallel as fp
mesh = fp.Mesh.from_environment()
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")}
print(mesh.coordinates, mesh["tp"].all_gather(fp.lazy.asarray([mesh.comm.rank])).tolist(), cores, seen, flush=True)
"""
CORES = sorted(os.sched_getaffinity(0))


def machine(kind: str, links: str = "") -> str:
    """Two devices, the second first, near one core each."""
    devices = "".join(
        f'[[node.device]]\nid = "{kind}:{n}"\nkind = "{kind}"\ncores = "{CORES[n % len(CORES)]}"\n' for n in (1, 0)
    )
    return f'format = "fuel-parallel 1"\n[[node]]\nname = "here"\n{devices}{links}'


@pytest.mark.parametrize("under_mpirun", [False, True])
def test_each_rank_gets_a_device_and_the_cores_near_it(fuelrun, mpirun: str, under_mpirun: bool) -> None:
    fuelrun.write(machine("cuda"), "node.toml")
    words = ("--topology", "node.toml", "--mesh", "dp=-1,tp=2", fuelrun.write(SHOW))
    if under_mpirun:
        done = fuelrun.run(*words, command=(mpirun, "-n", "2"))
    else:
        done = fuelrun.run("-n", "2", *words)
    assert done.returncode == 0, done.stderr
    first, second = CORES[1 % len(CORES)], CORES[0]
    assert sorted(done.stdout.splitlines()) == [
        f"{{'dp': 0, 'tp': 0}} [0, 1] {first} {{'CUDA_VISIBLE_DEVICES': '1', 'HIP_VISIBLE_DEVICES': None}}",
        f"{{'dp': 0, 'tp': 1}} [0, 1] {second} {{'CUDA_VISIBLE_DEVICES': '0', 'HIP_VISIBLE_DEVICES': None}}",
    ]


def test_one_rank_alone_gets_a_device_too(fuelrun) -> None:
    fuelrun.write(machine("rocm"), "node.toml")
    script = fuelrun.write("import os; print(os.environ['HIP_VISIBLE_DEVICES'], len(os.sched_getaffinity(0)))")
    assert fuelrun.run("--topology", "node.toml", script).stdout == f"1 {len(CORES)}\n"


def test_the_mesh_may_be_a_file(fuelrun) -> None:
    script = fuelrun.write("import fuel_parallel as fp; print(fp.Mesh.from_environment().coordinates)")
    for text in ('axes = "dp=1:all_reduce:64,tp=2:p2p:9"', "[mesh]\ndp = 1\ntp = 2"):
        fuelrun.write(text, "mesh.toml")
        done = fuelrun.run("-n", "2", "--mesh", "mesh.toml", script)
        assert sorted(done.stdout.splitlines()) == ["{'dp': 0, 'tp': 0}", "{'dp': 0, 'tp': 1}"]
    for text, said in (("x = 1", "mesh.toml has no mesh"), ("x =", "mesh.toml is no TOML")):
        fuelrun.write(text, "mesh.toml")
        done = fuelrun.run("-n", "2", "--mesh", "mesh.toml", script)
        assert done.returncode == 2
        assert said in done.stderr
    assert "cannot read no.toml" in fuelrun.run("--mesh", "no.toml", script).stderr


def test_gpus_count_among_those_that_are_visible_and_cores_are_left_alone_where_asked(fuelrun) -> None:
    fuelrun.write(machine("cuda"), "node.toml")
    words = ("--topology", "node.toml", "--mesh", "tp=2", "--bind", "none", fuelrun.write(SHOW))
    done = fuelrun.run("-n", "2", *words, CUDA_VISIBLE_DEVICES="4,GPU-abc")
    assert done.returncode == 0, done.stderr
    everywhere = ",".join(map(str, CORES))
    lines = sorted(done.stdout.splitlines())
    assert all(f"] {everywhere} {{" in line for line in lines)
    assert ["'GPU-abc'" in line for line in lines] == [True, False]


@pytest.mark.parametrize(
    ("words", "text", "said"),
    [
        (["-n", "2", "--mesh", "tp=3"], "", "--mesh tp=3 has not as many ranks as -n 2"),
        (["-n", "2", "--mesh", "tp=x"], "", "--mesh tp=x: expected NAME=SIZE[:COLLECTIVE][:BYTES]"),
        (["-n", "4"], "", "the mesh has 4 ranks and each takes a device, but there are 2 usable devices"),
        (["-n", "2"], "[[node]]\nname = 3", "node.toml, line"),
    ],
)
def test_what_does_not_fit_is_said_before_a_rank_starts(fuelrun, words, text: str, said: str) -> None:
    fuelrun.write(f"{machine('cuda')}{text}", "node.toml")
    done = fuelrun.run(*words, "--topology", "node.toml", fuelrun.write(SHOW))
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_gpu_that_the_launcher_hides_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(LaunchError, match=r"gives this rank GPU 3, but CUDA_VISIBLE_DEVICES=0 shows it 1 only"):
        placing._visible("CUDA_VISIBLE_DEVICES", "3")


def test_cards_of_infiniband_are_named_for_ucx_and_nccl(tmp_path: Path) -> None:
    for name in ("mlx5_0", "mlx5_1"):
        (tmp_path / name).mkdir()
    assert placing.card_variables(("mlx5_0", "mlx5_1"), tmp_path) == {
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "NCCL_IB_HCA": "=mlx5_0,mlx5_1",
    }
    assert placing.card_variables(("eth0",), tmp_path) == {}
    assert placing.card_variables(("mlx5_0", "eth0"), tmp_path) == {}
    assert placing.card_variables((), tmp_path) == {}


def test_threads_may_be_the_share_of_the_cores(fuelrun) -> None:
    script = fuelrun.write("import os; print(os.environ['OMP_NUM_THREADS'])")
    done = fuelrun.run("-n", "2", "--threads", "auto", script)
    assert done.stdout.splitlines() == [str(max(1, len(CORES) // 2))] * 2
    assert fuelrun.run("--threads", "auto", script).stdout.strip() == str(len(CORES))
