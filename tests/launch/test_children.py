"""Processes that a rank starts: they end for themselves, and are told when they take themselves for the rank."""

from __future__ import annotations

import pytest

HEAD = """\
import multiprocessing, os, subprocess, sys
import fuel_parallel as fp
import fuel_parallel.lazy as ft
"""
INIT = "world = fp.init()\nworld.all_reduce(ft.ones(4)).numpy()\n"
REFUSED = "fp.init() was called in a process that"

CHILDREN = {
    "fork, sys.exit": (
        HEAD + INIT + "pid = os.fork()\nif pid == 0: sys.exit(5)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\nworld.barrier()",
        "child 5",
        "",
    ),
    "fork, a caught sys.exit, the end of the script": (
        HEAD + INIT + "pid = os.fork()\nif pid == 0:\n    try: sys.exit(5)\n    except SystemExit: pass\n"
        "else:\n    print('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n    world.barrier()",
        "child 0",
        "",
    ),
    "fork, init": (
        HEAD + INIT + "pid = os.fork()\nif pid == 0: fp.init()\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\nworld.barrier()",
        "child 1",
        f"{REFUSED} was forked from a rank",
    ),
    "spawn": (
        HEAD + "def double(x): return 2 * x\nif __name__ == '__main__':\n    world = fp.init()\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool: print('child', pool.map(double, [2]))\n"
        "    world.barrier()",
        "child [4]",
        "",
    ),
    "spawn, init": (
        HEAD + INIT + "def work(): pass\nif __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=work)\n    child.start()\n    child.join()\n"
        "    print('child', child.exitcode)\n    world.barrier()",
        "child 1",
        f"{REFUSED} was started by a rank",
    ),
    "a script of its own, init": (
        HEAD + INIT + "child = [sys.executable, '-c', 'import fuel_parallel as fp; fp.init()']\n"
        "print('child', subprocess.run(child).returncode)\nworld.barrier()",
        "child 1",
        f"{REFUSED} was started by a rank",
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", CHILDREN)
def test_what_a_rank_starts_does_not_end_the_job(fuelrun, how: str) -> None:
    script, out, err = CHILDREN[how]
    done = fuelrun.run("-n", "2", fuelrun.write(script))
    assert (done.returncode, done.stdout) == (0, f"{out}\n" * 2), done.stderr
    assert done.stderr.count(REFUSED) == (2 if err else 0)
    assert err in done.stderr
