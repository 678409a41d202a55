"""What each launcher's variables mean. The values are as launchers set them for rank 1 of 3 on one host."""

from __future__ import annotations

import pytest

from fuel_parallel.environment import LauncherClaim, detect, explain_mismatch, without_launcher

OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "2",  # more ranks than cores: not the order of ranks
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "OMPI_MCA_num_procs": "3",
    "PMIX_NAMESPACE": "prterun-host-18173@1",
    "PMIX_RANK": "1",
    "PRTE_LAUNCHED": "1",
}
HYDRA = {
    "HYDI_CONTROL_FD": "7",
    "MPI_LOCALNRANKS": "3",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "11",
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
}
INTEL = {
    "HYDRA_BSTRAP_LOCALHOST": "host",
    "MPI_LOCALNRANKS": "3",
    "MPI_LOCALRANKID": "1",
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "3",
    "SLURM_NTASKS": "9",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
}
LAUNCHERS = {
    "Open MPI": OPEN_MPI_5,
    "MPICH (Hydra)": HYDRA,
    "Intel MPI": INTEL,
    "srun --mpi=none": SRUN,
    "srun --mpi=pmi2": {**SRUN, "PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "9"},
    "srun --mpi=pmix": {**SRUN, "PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.7.0"},
    "MVAPICH": {
        "MV2_COMM_WORLD_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "3",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
        "MV2_COMM_WORLD_LOCAL_SIZE": "3",
        "PMI_RANK": "1",
        "PMI_SIZE": "3",
    },
    "jsrun": {
        "JSM_NAMESPACE_RANK": "1",
        "JSM_NAMESPACE_SIZE": "3",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "3",
        "OMPI_COMM_WORLD_RANK": "1",
    },
}
SIZE_ONLY = {
    "IBM POE": {"MP_CHILD": "1", "MP_PROCS": "3"},
    "Cray PALS": {"PALS_APID": "x", "PALS_RANKID": "1", "PALS_LOCAL_RANKID": "1", "PMI_RANK": "1", "PMI_SIZE": "3"},
    "Flux": {
        "FLUX_TASK_RANK": "1",
        "FLUX_JOB_SIZE": "3",
        "FLUX_TASK_LOCAL_ID": "1",
        "PMI_RANK": "1",
        "PMI_SIZE": "3",
    },
    "MPICH (gforker)": {"PMI_RANK": "1", "PMI_SIZE": "3", "PMI_FD": "5"},
}


def claimed(environ: dict[str, str]) -> LauncherClaim:
    claim = detect(environ)
    assert claim is not None
    return claim


@pytest.mark.parametrize("name", LAUNCHERS)
def test_rank_and_sizes_of_each_launcher(name: str) -> None:
    claim = claimed(LAUNCHERS[name])
    assert (claim.launcher, claim.rank, claim.world_size, claim.local_size) == (name, 1, 3, 3)
    assert claim.parallel


@pytest.mark.parametrize("name", SIZE_ONLY)
def test_what_a_launcher_does_not_say_is_none(name: str) -> None:
    claim = claimed(SIZE_ONLY[name])
    assert (claim.launcher, claim.rank, claim.world_size, claim.local_size) == (name, 1, 3, None)


def test_prrte_says_the_rank_alone() -> None:
    claim = claimed({"PRTE_LAUNCHED": "1", "PMIX_NAMESPACE": "prterun-host-1@1", "PMIX_RANK": "4"})
    assert (claim.launcher, claim.rank, claim.world_size, claim.parallel) == ("PRRTE", 4, None, True)


def test_no_variables_no_claim() -> None:
    assert detect({"PATH": "/bin", "HOME": "/"}) is None


@pytest.mark.parametrize("inner", [OPEN_MPI_5, HYDRA, INTEL])
def test_mpirun_inside_of_srun_wins(inner: dict[str, str]) -> None:
    daemon = {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert claimed({**daemon, **inner}) == claimed(inner)


@pytest.mark.parametrize(
    "step", [{}, {"SLURM_STEP_ID": "batch"}, {"SLURM_STEP_ID": "4294967291"}, {"SLURM_STEP_ID": "4294967290"}]
)
def test_a_batch_shell_is_not_a_task(step: dict[str, str]) -> None:
    shell = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    assert detect({**shell, "SLURM_PROCID": "0", **step}) is None


def test_a_pbs_job_is_not_a_launcher() -> None:
    assert detect({"PBS_JOBID": "7", "PBS_NODEFILE": "/var/nodes"}) is None


def test_one_rank_is_not_parallel() -> None:
    assert not claimed({"PMI_RANK": "0", "PMI_SIZE": "1"}).parallel


def test_a_rank_that_is_no_number_is_no_claim() -> None:
    assert detect({**HYDRA, "PMI_RANK": "two"}) is None


@pytest.mark.parametrize(("node", "tasks"), [("0", 2), ("2", 2), ("3", 1), ("4", None)])
def test_tasks_of_a_node_from_slurms_list(node: str, tasks: int | None) -> None:
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": node}
    assert claimed(environ).local_size == tasks


def test_the_evidence_is_kept() -> None:
    assert ("PMI_SIZE", "3") in claimed(HYDRA).evidence


def test_on_one_host_the_local_rank_is_the_rank() -> None:
    assert claimed(OPEN_MPI_5).local_rank == 2
    assert claimed(OPEN_MPI_5).rank_variables() == {
        "RANK": "1",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "NODE_RANK": "0",
    }


def test_on_several_hosts_the_local_rank_is_the_launchers() -> None:
    environ = {**HYDRA, "PMI_RANK": "5", "PMI_SIZE": "6"}
    assert claimed(environ).rank_variables()["LOCAL_RANK"] == "1"


def test_the_node_is_the_launchers_where_there_are_several() -> None:
    environ = {**SRUN, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"}
    assert claimed(environ).rank_variables()["NODE_RANK"] == "1"
    assert "NODE_RANK" not in claimed({**HYDRA, "PMI_SIZE": "6"}).rank_variables()


def test_unknown_sizes_are_not_exported() -> None:
    assert set(claimed(SIZE_ONLY["MPICH (gforker)"]).rank_variables()) == {"RANK", "WORLD_SIZE"}


@pytest.mark.parametrize("name", [*LAUNCHERS, *SIZE_ONLY])
def test_nothing_is_claimed_any_more_without_the_launchers_variables(name: str) -> None:
    environ = {**LAUNCHERS, **SIZE_ONLY}[name]
    assert detect(without_launcher(environ)) is None


def test_tuning_and_allocation_are_kept() -> None:
    kept = {"OMPI_MCA_btl": "self,tcp", "PRTE_MCA_plm": "ssh", "SLURM_JOB_ID": "7", "PATH": "/bin", "I_MPI_PIN": "1"}
    assert without_launcher({**OPEN_MPI_5, **kept}) == kept


def test_the_mismatch_names_both_numbers_the_library_and_the_remedy() -> None:
    text = explain_mismatch(claimed(HYDRA), 1, "Open MPI v5.0.11, package: Open MPI distribution, ident: 5.0.11\0")
    for part in ("MPICH (Hydra) started 3 ranks", "PMI_SIZE=3", "world of 1", "Open MPI v5.0.11)", "fuelrun -n N"):
        assert part in text


def test_the_mismatch_under_srun_speaks_of_pmi() -> None:
    assert "srun --mpi=list" in explain_mismatch(claimed(SRUN), 1, "MPICH Version: 5.0.2")


def dealt(rank: int, hosts: str, local_size: str = "2") -> LauncherClaim | None:
    """A rank of four under Hydra, which does not tell machines apart."""
    environ = {"PMI_RANK": str(rank), "PMI_SIZE": "4", "MPI_LOCALRANKID": "9", "MPI_LOCALNRANKS": local_size}
    return detect({**environ, "FUEL_HOSTS": hosts})


@pytest.mark.parametrize(("rank", "place"), [(0, (0, 2, 0)), (1, (1, 2, 0)), (2, (0, 2, 1)), (3, (1, 2, 1))])
def test_ranks_that_fuelrun_has_dealt_know_their_machine(rank: int, place: tuple[int, int, int]) -> None:
    claim = dealt(rank, "a:2,b:2")
    assert claim is not None
    assert (claim.local_rank, claim.local_size, claim.node_rank) == place


@pytest.mark.parametrize("hosts", ["a:2,b:1", "a:2", "a:x,b:2", "", "a:1,b:3"])
def test_hosts_of_another_job_are_left_out(hosts: str) -> None:
    claim = dealt(0, hosts)
    assert claim is not None
    assert (claim.local_rank, claim.node_rank) == (9, None)


@pytest.mark.parametrize(
    "environ",
    [
        {"PBS_JOBID": "7.server", "PBS_NODEFILE": "/var/spool/aux/7", "PBS_TASKNUM": "1", "PBS_NODENUM": "0"},
        {"LSB_JOBID": "7", "LSB_DJOB_RANKFILE": "/tmp/7", "LSB_DJOB_NUMPROC": "8", "LSB_HOSTS": "a a b b"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"FLUX_URI": "local:///run/flux/local", "FLUX_JOB_ID": "f7"},
    ],
)
def test_an_allocation_is_not_a_rank(environ: dict[str, str]) -> None:
    assert detect(environ) is None
