"""What SLURM sends to a job reaches every rank once, and a preempted job comes back."""

from __future__ import annotations

import os

import pytest

NOTES = """\
import os, signal, sys, time
rank = os.environ["RANK"]
notes = open(f"notes-{rank}", "a", buffering=1)
def note(number, frame):
    notes.write(signal.Signals(number).name + "\\n")
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, note)
open(f"up-{rank}", "w").close()
end = time.monotonic() + 100
while time.monotonic() < end:
    time.sleep(0.1)
"""
# Goes on where it was when it was told to stop; its end is told by the restart.
RESUMES = """\
import os, signal, sys, time
rank = os.environ["RANK"]
restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
def stop(number, frame):
    with open(f"saved-{rank}", "a") as saved:
        saved.write(f"restart {restart}\\n")
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
open(f"up-{rank}-{restart}", "w").close()
end = time.monotonic() + (60 if restart == 0 else 0)
while time.monotonic() < end:
    time.sleep(0.1)
print("rank", rank, "ends after restart", restart)
"""
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(180)]


def test_signals_to_the_batch_script_and_the_end_of_the_job_reach_each_rank_once(user, cluster) -> None:
    job = user.submit("--nodes", "2", "--run-args", "--grace 1", user.write(NOTES))
    user.wait_for("up-*", 2)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    cluster.run("scancel", "--signal=USR2", job)  # to the steps only
    user.wait_for("notes-*", 2)
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job) == "CANCELLED"
    for rank in (0, 1):
        assert user.lines(f"notes-{rank}") == ["SIGTERM", "SIGUSR1", "SIGUSR2"]
    assert not cluster.left_of_jobs()


@pytest.mark.skipif("FUEL_STRESS" not in os.environ, reason="waits for slurmctld's look at time limits: FUEL_STRESS=1")
def test_sigusr1_comes_before_the_time_limit(user, cluster) -> None:
    options = ("--nodes", "2", "--time", "1", "--signal-before", "58", "--run-args", "--grace 1")
    job = user.submit(*options, user.write(NOTES))
    user.wait_for("up-*", 2)
    user.wait_for_lines("notes-*", 2, 45)  # slurmctld looks at limits every 30 s
    assert user.lines("notes-*") == ["SIGUSR1", "SIGUSR1"]
    assert cluster.state(job) == "RUNNING"


def test_a_preempted_job_is_requeued_and_goes_on(user, cluster) -> None:
    job = user.submit("--nodes", "2", "--requeue", user.write(RESUMES))
    user.wait_for("up-*-0", 2)
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap=true")
    urgent_job = cluster.run("sbatch", "--parsable", "--output=/dev/null", *urgent).strip()
    assert cluster.wait_for_end(urgent_job) == "COMPLETED"
    user.wait_for("up-*-1", 2, 60)
    assert cluster.wait_for_end(job) == "COMPLETED", user.log(job)
    assert cluster.fields(job)["Restarts"] == "1"
    assert user.lines("saved-*") == ["restart 0"] * 2
    log = user.log(job)
    assert f"SLURM preempts job {job}: it is requeued" in log
    assert log.count("ends after restart 1") == 2


MAKES_ROOM = """\
import os, time
import fuel_parallel as fp
world, restart = fp.init(), os.environ.get("SLURM_RESTART_COUNT", "0")
notice = fp.on_preempt(lambda: print("rank", world.rank, "saved at start", restart, flush=True))
open(f"up-{world.rank}-{restart}", "w").close()
end = time.monotonic() + (60 if restart == "0" else 0)
while time.monotonic() < end:
    time.sleep(0.1)
    notice.check()
print("rank", world.rank, "ends after restart", restart)
"""


def test_a_job_that_made_room_ahead_of_its_time_limit_comes_back(user, cluster, pmi: str) -> None:
    if pmi == "pmi2":
        pytest.skip("MPICH's training runs fail or hang in this SLURM, see docs/slurm.md")
    job = user.submit("--nodes", "2", "--requeue", user.write(MAKES_ROOM))
    user.wait_for("up-*-0", 2)
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # as --signal-before has SLURM do
    user.wait_for("up-*-1", 2, 60)
    assert cluster.wait_for_end(job) == "COMPLETED", user.log(job)
    log = user.log(job)
    assert f"job {job} wants to go on later: it is requeued" in log
    assert log.count("saved at start 0") == log.count("ends after restart 1") == 2


def test_status_and_logs_of_a_running_and_of_an_ended_job(user, cluster) -> None:
    script = user.write(
        "import os, time\nprint('line one', flush=True)\nopen('up', 'w').close()\n"
        "while not os.path.exists('go'):\n    time.sleep(0.1)\nprint('line two')\n"
    )
    job = user.submit("--log-dir", "logs", "--job-name", "a name", script)
    user.wait_for("up", 1)
    line = user.fuelrun("status").stdout.split("\t")
    assert (line[0], line[1], line[5], line[7]) == (job, "RUNNING", "n1", "a name\n")
    assert user.fuelrun("status", job, "--json").stdout.count('"state": "RUNNING"') == 1
    follower = user.start("logs", "--follow", job)
    assert user.fuelrun("logs", job).stdout == "line one\n"
    (user.folder / "go").touch()
    assert cluster.wait_for_end(job) == "COMPLETED"
    out, err = follower.communicate(timeout=30)
    assert (follower.returncode, out) == (0, "line one\nline two\n"), err
    assert user.fuelrun("status", job).stdout.split("\t")[1:3] == ["COMPLETED", "0"]
    assert user.fuelrun("logs", job).stdout == "line one\nline two\n"


def test_a_job_that_slurm_does_not_know_is_named_with_the_reason(user) -> None:
    done = user.fuelrun("status", "4711")
    assert done.returncode == 2
    assert "do not know job 4711" in done.stderr
    assert "accounting storage is disabled" in done.stderr.lower()
    (user.folder / "train-4711.log").write_text("what it said\n")
    assert user.fuelrun("logs", "4711").stdout == "what it said\n"


def test_what_slurm_refuses_is_told_in_its_words(user) -> None:
    done = user.fuelrun("sbatch", "--submit", "--partition", "none", user.write("pass"))
    assert done.returncode == 2
    assert "SLURM refuses the job" in done.stderr
    assert "invalid partition" in done.stderr.lower()
