"""What is read from the variables of a job, and the srun that follows from it: no SLURM is needed here."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuel_parallel.errors import LaunchError
from fuelrun.launch import allocation, jobs, preemption, srun
from fuelrun.launch.allocation import Allocation
from fuelrun.launch.engine import Death, Job
from fuelrun.launch.rendezvous import of_nodes
from fuelrun.launch.srun import Srun, choose_pmi, plugins

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "gpu[08-10]",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
    "SLURM_CPUS_PER_TASK": "4",
}
JOB = Job(ranks=5, command=("python",))


def read(**changes: str) -> Allocation:
    found = allocation.read({**BATCH, **changes})
    assert found is not None
    return found


def test_a_batch_script_has_nodes_tasks_and_cores() -> None:
    assert read() == Allocation("7", ("gpu08", "gpu09", "gpu10"), 5, (2, 2, 1), (8, 8, 4), cpus_per_task=4)


@pytest.mark.parametrize("missing", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_without_job_or_nodes_there_is_no_allocation(missing: str) -> None:
    assert allocation.read({name: value for name, value in BATCH.items() if name != missing}) is None


@pytest.mark.parametrize(
    ("changes", "tasks"),
    [
        ({"SLURM_NTASKS": ""}, 3),
        ({"SLURM_NTASKS": "", "SLURM_NTASKS_PER_NODE": "2"}, 6),
        ({"SLURM_NTASKS": "", "SLURM_GPUS_ON_NODE": "4"}, 12),
        ({"SLURM_NTASKS": "", "SLURM_GPUS_PER_NODE": "a100:2"}, 6),
    ],
)
def test_tasks_that_nobody_asked_for_are_one_a_gpu_or_one_a_node(changes: dict[str, str], tasks: int) -> None:
    assert read(**changes).tasks == tasks


def test_gpus_by_task_are_advised_against() -> None:
    found = read(SLURM_GPUS_PER_TASK="1")
    assert found.gpus_per_node == 2
    assert "ask SLURM for --gpus-per-node instead" in found.advice()[0]
    assert read().advice() == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"SLURM_HET_SIZE": "2"}, "SLURM job 7 is heterogeneous \\(SLURM_HET_SIZE=2"),
        ({"SLURM_PACK_SIZE": "2"}, "--het-group"),
        ({"SLURM_JOB_NODELIST": "gpu[08-"}, "is no list of nodes such as"),
        ({"SLURM_TASKS_PER_NODE": "two"}, "expected a number for each node"),
        ({"SLURM_TASKS_PER_NODE": "2(x4)"}, "is about 4 nodes, but SLURM_JOB_NODELIST names 3"),
        ({"SLURM_TASKS_PER_NODE": "1(x999999)"}, "unset those that begin with SLURM_"),
    ],
)
def test_what_cannot_be_used_is_an_error(changes: dict[str, str], expected: str) -> None:
    with pytest.raises(LaunchError, match=expected):
        read(**changes)


def test_more_ranks_than_tasks_are_refused_with_both_numbers() -> None:
    read().check(5)
    with pytest.raises(LaunchError, match=r"-n 6 is more than the 5 tasks of SLURM job 7 on 3 nodes \(gpu\[08-10\]\)"):
        read().check(6)


def test_a_part_of_the_nodes_can_be_used() -> None:
    part = read().on_nodes(2)
    assert (part.nodes, part.tasks, part.slots, part.cpus) == (("gpu08", "gpu09"), 4, (2, 2), (8, 8))
    assert read().on_nodes(3) == read()
    with pytest.raises(LaunchError, match=r"--nnodes 4 is more than the 3 nodes of SLURM job 7"):
        read().on_nodes(4)


def test_a_step_has_the_cores_of_its_job_and_shares_them() -> None:
    found = read(SLURM_STEP_ID="0", SLURM_TASKS_PER_NODE="1(x3)")
    assert (found.in_step, found.slots, found.cpus_per_task) == (True, (8, 8, 4), None)
    assert not read(SLURM_STEP_ID="4294967291").in_step, "the batch script is no step of its own"


def fake_squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, says: str, status: int = 0) -> None:
    (folder / "squeue").write_text(
        f"#!/bin/sh\nprintf '{says}'\n[ {status} = 0 ] || echo 'Invalid job id' >&2\nexit {status}\n"
    )
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("says", "status", "reason"),
    [
        ("7 RUNNING gpu[08-10]\\n", 0, ""),
        ("8 RUNNING gpu01\\n7 RUNNING gpu[08-10]\\n", 0, ""),  # the last task of array 7
        ("7 COMPLETING gpu[08-10]\\n", 0, ""),
        ("", 0, "it has ended"),
        ("7 PENDING \\n", 0, "its state is PENDING"),
        ("7 RUNNING other1\\n", 0, "it has other nodes now (other1)"),
        ("", 1, "SLURM does not know it any more"),
    ],
)
def test_a_job_that_does_not_run_is_none(tmp_path, monkeypatch, says: str, status: int, reason: str) -> None:
    fake_squeue(tmp_path, monkeypatch, says, status)
    assert allocation.why_stale(read()) == reason
    found, note = allocation.find(BATCH)
    assert (found is None) == bool(reason) == bool(note)


def test_where_slurm_is_not_installed_the_host_tells(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "is none of its nodes" in allocation.why_stale(read())
    monkeypatch.setattr("socket.gethostname", lambda: "gpu09.cluster")
    assert allocation.why_stale(read()) == ""


def test_the_environment_of_srun_does_not_contradict_its_options() -> None:
    environ = {**BATCH, "SRUN_CPUS_PER_TASK": "2", "SLURM_TRES_PER_TASK": "cpu=4", "SLURM_EXPORT_ENV": "NONE", "A": "1"}
    for_job = read().cleaned({**environ, "SLURM_NTASKS_PER_NODE": "2"}, 3)
    assert not {"SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_NODE"} & set(
        for_job
    )
    assert (for_job["SLURM_EXPORT_ENV"], for_job["A"]) == ("ALL", "1")
    assert allocation.without_job({**environ, "SLURM_CONF": "c"}) == {"A": "1", "SLURM_CONF": "c"}


def test_srun_is_told_everything() -> None:
    engine = Srun(Path("/bin/srun"), "22.05.8", "pmix", read(), "Open MPI 5")
    assert " ".join(engine.command(JOB)) == (
        "/bin/srun --mpi=pmix --nodes=3 --ntasks=5 --cpus-per-task=4 --cpu-bind=none --kill-on-bad-exit=1 "
        "--export=ALL --input=0 python"
    )
    assert "--nodes=1" in engine.command(Job(ranks=2, command=("python",)))
    assert {"--nodes=2", "--ntasks-per-node=2"} <= set(engine.command(Job(ranks=4, command=("python",), per_node=2)))
    assert engine.command(Job(ranks=5, command=("p",), arguments=("--mem=0",)))[-2:] == ["--mem=0", "p"]


@pytest.mark.parametrize(
    ("version", "overlaps"), [("20.02.7", False), ("20.11.0", True), ("25.05.1", True), ("", False)]
)
def test_overlap_is_said_to_those_that_know_it(version: str, overlaps: bool) -> None:
    engine = Srun(Path("srun"), version, "pmi2", read(SLURM_STEP_ID="0"))
    assert ("--overlap" in engine.command(JOB)) == overlaps


LISTS = {
    "22.05": "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions available: pmix_v4\n",
    "20.02": "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\n",
    "bare": "MPI plugin types are...\n\tnone\n",
}


@pytest.mark.parametrize(
    ("flavour", "list_", "environ", "pmi"),
    [
        ("Open MPI", "22.05", {}, "pmix"),
        ("MPICH", "22.05", {}, "pmi2"),
        ("Open MPI", "20.02", {}, "pmix_v3"),
        ("MPICH", "20.02", {}, "pmi2"),
        ("Open MPI", "bare", {}, ""),
        ("MPICH", "bare", {}, ""),
        ("Intel MPI", "22.05", {}, ""),
        ("Intel MPI", "22.05", {"I_MPI_PMI_LIBRARY": "/lib/libpmi2.so"}, "pmi2"),
        (None, "22.05", {}, ""),
    ],
)
def test_the_pmi_is_the_one_that_both_speak(flavour: str | None, list_: str, environ: dict[str, str], pmi: str) -> None:
    found, reason = choose_pmi(flavour, environ, plugins(LISTS[list_]))
    assert found == pmi
    assert bool(reason) != bool(pmi)


@pytest.mark.parametrize(
    ("message", "death"),
    [
        ("srun: error: n1: task 1: Killed", Death(1, signal=9)),
        ("srun: error: n2: tasks 0-1: Segmentation fault (core dumped)", Death(signal=11)),
        ("srun: error: n1: task 3: Exited with exit code 7", Death(3)),
        ("srun: Job step aborted: Waiting up to 10 seconds for job step to finish.", None),
    ],
)
def test_srun_says_who_died(message: str, death: Death | None) -> None:
    assert Srun(Path("srun"), "22.05", "pmi2", read()).death(message) == death


def test_ranks_of_several_nodes_meet_on_the_first() -> None:
    assert of_nodes(("n1", "n2"), "7", {})["MASTER_ADDR"] == "n1"
    assert of_nodes(("n1",), "7", {})["MASTER_ADDR"] == "127.0.0.1"
    assert of_nodes(("n1", "n2"), "7", {"MASTER_ADDR": "here"}) == {}


def test_only_a_preempted_batch_script_is_requeued(monkeypatch) -> None:
    asked: list[tuple[str, ...]] = []
    batch = {**BATCH, "ENVIRONMENT": "BATCH"}
    told = {"JobState": "RUNNING", "Requeue": "1", "PreemptTime": "2026-01-02T10:00:00"}
    monkeypatch.setattr(preemption, "_scontrol", lambda *words: asked.append(words) or "")
    monkeypatch.setattr(preemption.time, "sleep", lambda seconds: None)
    for environ, fields in (
        (BATCH, told),
        (batch, {**told, "PreemptTime": "None"}),
        (batch, {**told, "Requeue": "0"}),
        (batch, {}),
    ):
        monkeypatch.setattr(preemption, "show", lambda job, fields=fields: fields)
        assert not preemption.requeue_if_preempted(read(), environ)
    assert asked == []
    monkeypatch.setattr(preemption, "show", lambda job: told)
    assert preemption.requeue_if_preempted(read(), batch)
    assert asked == [("requeue", "7")]
    own = {**told, "PreemptTime": "None"}
    monkeypatch.setattr(preemption, "show", lambda job: own)
    assert preemption.requeue_if_preempted(read(), batch, wants_more=True)
    assert asked == [("requeue", "7")] * 2
    own["JobState"] = "CANCELLED"  # who ends a job has it ended
    assert not preemption.requeue_if_preempted(read(), batch, wants_more=True)
    assert len(asked) == 2


def test_a_name_cannot_pass_for_what_slurm_says() -> None:
    line = (
        "JobId=8 ArrayJobId=7 ArrayTaskId=3 JobName=x JobState=FAILED StdOut=/etc/passwd UserId=me(1) "
        "JobState=COMPLETED ExitCode=0:9 Restarts=2 NodeList=n[1-2] NumNodes=2 StdErr=/a b.log "
        "StdIn=/dev/null StdOut=/a b.log Power="
    )
    job = jobs.read_scontrol(line)
    assert (job.id, job.state, job.output, job.exit_code) == ("7_3", "COMPLETED", "/a b.log", 137)
    assert (job.restarts, job.node_list, job.over) == (2, "n[1-2]", True)


def test_a_job_id_is_a_number() -> None:
    with pytest.raises(LaunchError, match="'--help' is no job: expected a number"):
        jobs.named(["--help"])


def test_without_srun_there_is_a_reason(tmp_path: Path) -> None:
    library = srun.Library("4", "Open MPI v5.0.1", None)
    assert srun.srun_for(library, read(), {"PATH": str(tmp_path)}) == (None, "there is no srun on PATH")
