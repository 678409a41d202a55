"""Ranks in jobs of a real SLURM: who they are, what they see, how they end."""

from __future__ import annotations

import json

import pytest

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR")
WHO = f"""\
import json, os, socket
import fuel_parallel as fp
world = fp.init()
total = world.all_reduce(fp.lazy.ones(2)).numpy()
mine = {{name: os.environ.get(name) for name in {VARIABLES!r}}}
mine |= {{"sum": float(total[0]), "node": socket.gethostname()}}
mine |= {{"visible": os.environ.get("CUDA_VISIBLE_DEVICES"), "cpus": os.environ.get("SLURM_CPUS_PER_TASK")}}
task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
open(f"rank{{task}}-{{world.rank}}.json", "w").write(json.dumps(mine))
"""
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]


def ranks(user, pattern: str = "rank-*.json") -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(user.folder.glob(pattern))]


def test_a_batch_script_runs_a_rank_for_each_task(user, cluster) -> None:
    options = ("--nodes", "2", "--gpus-per-node", "2", "--cpus-per-task", "2", "--time", "5", "--env", "MESSAGE=it's")
    job = user.submit(*options, "--log-dir", "logs", user.write(WHO), "an argument")
    assert cluster.wait_for_end(job) == "COMPLETED", user.log(job)
    found = ranks(user)
    names = [tuple(rank[name] for name in VARIABLES) for rank in found]
    assert names == [
        ("0", "4", "0", "2", "0", "n1"),
        ("1", "4", "1", "2", "0", "n1"),
        ("2", "4", "0", "2", "1", "n1"),
        ("3", "4", "1", "2", "1", "n1"),
    ]
    assert [rank["node"] for rank in found] == ["n1", "n1", "n2", "n2"]
    assert {rank["sum"] for rank in found} == {4.0}
    assert {rank["visible"] for rank in found} == {"0,1"}, "every rank sees the GPUs of its node"
    assert {rank["cpus"] for rank in found} == {"2"}
    assert user.log(job) == ""


def test_every_task_of_an_array_is_a_job_with_a_log_of_its_own(user, cluster) -> None:
    script = user.write(WHO + "print('task', task, 'rank', world.rank)\n")
    job = user.submit("--ntasks-per-node", "2", "--array", "3-4", script)
    for task in (3, 4):
        assert cluster.wait_for_end(f"{job}_{task}") == "COMPLETED", user.log(f"{job}_{task}")
        assert len(ranks(user, f"rank{task}-*.json")) == 2
        assert sorted(user.log(f"{job}_{task}").split("\n")) == ["", *(f"task {task} rank {rank}" for rank in (0, 1))]


def test_fewer_ranks_than_tasks_are_fine_and_more_are_an_error(user) -> None:
    user.write(WHO)
    done = user.in_shell(
        "-N2 --ntasks-per-node=2", "fuelrun -n 3 script.py || exit; fuelrun -n 5 script.py || echo status $?"
    )
    assert len(ranks(user)) == 3, done.stderr
    assert "-n 5 is more than the 4 tasks of SLURM job" in done.stderr
    assert "(n[1-2])" in done.stderr
    assert "status 2" in done.stdout


def test_ranks_on_each_node_and_a_part_of_the_nodes_can_be_asked_for(user) -> None:
    user.write(WHO)
    done = user.in_shell(
        "-N2 --ntasks-per-node=2", "fuelrun --ppn 1 script.py && fuelrun --nnodes 1 --dry-run script.py"
    )
    assert done.returncode == 0, done.stderr
    assert [rank["node"] for rank in ranks(user)] == ["n1", "n2"]
    assert "--nodes=1 --ntasks=2" in done.stdout


def test_one_task_of_a_shell_on_another_machine_runs_on_the_node(user) -> None:
    user.write(WHO)
    done = user.in_shell("-N1 -n1", "fuelrun script.py")
    assert done.returncode == 0, done.stderr
    assert [rank["node"] for rank in ranks(user)] == ["n1"]


def test_an_mpirun_that_was_asked_for_uses_the_nodes_too(user, mpirun: str) -> None:
    user.write(WHO)
    done = user.in_shell(
        "-N2 --ntasks-per-node=2 -c2", f"fuelrun -v --mpirun {mpirun} script.py", SLURM_EXPORT_ENV="NONE"
    )
    assert done.returncode == 0, done.stderr
    assert "not srun: an mpirun was asked for" in done.stderr
    found = ranks(user)
    assert [rank["sum"] for rank in found] == [4.0] * 4
    assert {rank["MASTER_ADDR"] for rank in found} == {"n1"}


def test_srun_may_be_insisted_on(user, mpirun: str) -> None:
    user.write("print('a rank')")
    done = user.in_shell("-N2", f"fuelrun --engine srun script.py; fuelrun --engine srun --mpirun {mpirun} script.py")
    assert done.stdout == "a rank\n" * 2
    assert "--engine srun: an mpirun was asked for" in done.stderr


def test_a_shell_that_is_a_step_shares_its_cores_with_the_ranks(user) -> None:
    user.write(WHO)
    done = user.run("srun", "-n1", "-c2", "bash", "-c", "fuelrun -n 2 script.py")
    assert done.returncode == 0, done.stderr
    assert [rank["sum"] for rank in ranks(user)] == [2.0, 2.0]


def test_srun_can_start_fuelrun_itself(user, pmi: str) -> None:
    user.write(WHO)
    done = user.run("srun", f"--mpi={pmi}", "-N2", "-n2", "fuelrun", "script.py")
    assert done.returncode == 0, done.stderr
    found = ranks(user)
    assert [(rank["RANK"], rank["NODE_RANK"], rank["MASTER_ADDR"]) for rank in found] == [
        ("0", "0", "n1"),
        ("1", "1", "n1"),
    ]


def test_doctor_says_what_starts_ranks_in_a_job(user, pmi: str) -> None:
    done = user.in_shell("-N2", "cd / && fuelrun doctor --no-launch --json")
    assert "2 nodes (n[1-2]), 2 tasks; ranks are started by srun" in done.stdout, done.stderr
    assert f"--mpi={pmi}" in done.stdout


@pytest.mark.parametrize("wrong", ["none", "other"])
def test_ranks_that_each_believe_to_be_alone_are_an_error(user, pmi: str, wrong: str) -> None:
    if wrong == "other" and pmi == "pmi2":
        pytest.skip("MPICH ends by itself under pmix")
    user.write(WHO)
    done = user.run("srun", f"--mpi={'none' if wrong == 'none' else 'pmi2'}", "-n2", "fuelrun", "script.py")
    assert done.returncode != 0
    assert "started 2 ranks" in done.stderr, done.stderr
    assert "but the MPI library sees a world of 1" in done.stderr
    assert "srun --mpi=list" in done.stderr
    assert not ranks(user)


def test_fuelrun_in_a_rank_starts_no_more_ranks(user, pmi: str) -> None:
    user.write(WHO)
    done = user.run("srun", f"--mpi={pmi}", "-n2", "fuelrun", "-n", "4", "script.py")
    assert done.returncode == 2
    assert "this is already rank" in done.stderr


def test_variables_of_a_job_that_has_ended_are_left_alone(user) -> None:
    script = user.write("import os\nopen(f\"left-{os.environ['RANK']}-{'SLURM_JOB_ID' in os.environ}\", 'w').close()\n")
    left = {"SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = user.fuelrun("-n", "2", script, SLURM_JOB_ID="999999", **left)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in user.folder.glob("left-*")) == ["left-0-False", "left-1-False"]
    assert "SLURM_JOB_ID=999999 is left over from a job that is not running (SLURM does not know it" in done.stderr
    assert "unset" in done.stderr


def test_a_rank_that_fails_fails_the_job_with_its_status(user, cluster) -> None:
    script = user.write(
        "import fuel_parallel as fp, sys\nworld = fp.init()\nif world.rank == 1:\n    sys.exit(7)\nworld.barrier()\n"
    )
    job = user.submit("--nodes", "2", script)
    assert cluster.wait_for_end(job) == "FAILED"
    assert cluster.fields(job)["ExitCode"] == "7:0"
    assert "rank 1 of 2 failed: sys.exit(7)" in user.log(job)


def test_a_rank_that_is_killed_ends_all(user, cluster) -> None:
    script = user.write(
        "import os, signal, fuel_parallel as fp\nworld = fp.init()\nworld.barrier()\nif world.rank == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nworld.barrier()\n"
    )
    job = user.submit("--nodes", "2", script)
    assert cluster.wait_for_end(job) == "FAILED"
    # MPI in the other ranks ends them in the same moment, and srun tells first of whom it asks first.
    assert cluster.fields(job)["ExitCode"] != "0:0", user.log(job)
    assert "of 2" in user.log(job)
    assert not cluster.left_of_jobs()
