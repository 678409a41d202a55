"""Each way in which ranks can disagree, as a user meets it: one error, both lines, the cause, exit status 1, soon.

What else may differ in one collective (dtype, reduction, dimension) is tried in place, in tests/mpi/test_guard.py.
"""

from __future__ import annotations

import re
import time

import pytest

HEAD = """\
import fuel_parallel as fp
import fuel_parallel.lazy as ft
world = fp.init()
x = ft.ones(4)
world.all_reduce(x).numpy()
open(f'up-{world.rank}', 'w').close()
"""
FIRST = HEAD.count("\n") + 1
WITHIN_S = 2.0  # from when all ranks are up

MISMATCHES = {
    "a value that only one rank asks for": (
        "loss = world.all_reduce(x)\nif world.is_root:\n    print(loss.numpy())\nworld.barrier()",
        ["script.py:7, asked for at script.py:9", "script.py:10", "a value that only rank 0 asked for (script.py:9)"],
    ),
    "fewer collectives": (
        "a = world.all_reduce(x)\nb = [world.all_reduce(x * 2)] if world.is_root else []\nfp.realize(a, b)",
        ["all_reduce SUM float32[4]", "script.py:8", "(its script has ended)", "rank 1 ended the script"],
    ),
    "other order": (
        "def both(*ops):\n    return [op(x) for op in ops]\nops = [world.all_reduce, lambda x: world.broadcast(x, 0)]\n"
        "fp.realize(both(*ops[:: 1 if world.is_root else -1]))",
        ["script.py:8", "script.py:9", "the same collectives in another order"],
    ),
    "other shape": (
        "n = 5 if world.is_root else 4\nworld.all_reduce(ft.ones(n)).numpy()",
        ["float32[5]  script.py:8", "float32[4]  script.py:8", "a short last batch"],
    ),
    "other root": (
        "world.broadcast(x, world.rank).numpy()",
        ["root=0  script.py:7", "root=1  script.py:7", "root computed from the rank"],
    ),
    "a script that ends early": (
        "for step in range(3 - world.rank):\n    world.all_reduce(x).numpy()",
        ["rank 0  all_reduce SUM float32[4]  script.py:8", "rank 1  (its script has ended)", "number of steps"],
    ),
    "sys.exit(0) while others wait": (
        "import sys\nif world.rank:\n    sys.exit(0)\nworld.barrier()",
        ["rank 0  barrier", "script.py:10", "rank 1  (its script has ended)", "an early sys.exit"],
    ),
    "a send that nobody receives": (
        "if world.is_root:\n    world.send(x, 1, 7)",
        ["1 of 1 messages of rank 0 to rank 1, tag 7", "script.py:8", "were not received", "a recv under an `if`"],
    ),
    "a receive of what nobody sent": (
        "if world.is_root:\n    world.recv((4,), ft.float32, 1, 7).numpy()",
        ["rank 1 has ended its script, and rank 0 waits for it", "script.py:8", "a send under an `if`"],
    ),
    "receives that wait for each other": (
        "world.recv((4,), ft.float32, 1 - world.rank).numpy()\nworld.send(x, 1 - world.rank)",
        ["wait for each other in a circle", "rank 0 waits for rank 1 in recv", "rank 1 waits for", "script.py:7"],
    ),
    "a receive of what nobody sent, in one plan with what others wait for": (
        "total = world.all_reduce(x)\nif world.is_root:\n    got = world.recv((4,), ft.float32, 1, 7)\n"
        "    fp.realize(got, world.all_reduce(x * 2))\nworld.all_reduce(x * 2).numpy()",
        ["wait for each other in a circle", "rank 0 waits for rank 1 in recv", "script.py:9", "script.py:11"],
    ),
    "two communicators in another order in one plan": (
        "two = world.split(0)\nfp.realize([c.all_reduce(x) for c in (two, world)[:: 1 if world.rank else -1]])",
        ["wait for each other in a circle", "communicator 'world'", "communicator 'world.split1(0)'", "script.py:8"],
    ),
    "two communicators in another order": (
        "two = world.split(0)\n\nfor c in (two, world)[:: 1 if world.rank else -1]:\n    c.all_reduce(x).numpy()",
        ["wait for each other in a circle", "communicator 'world'", "communicator 'world.split1(0)'", "script.py:10"],
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatch_ends_the_job_with_both_lines_and_the_cause(fuelrun, what: str) -> None:
    script, shown = MISMATCHES[what]
    process = fuelrun.start("-n", "2", fuelrun.write(HEAD + script))
    fuelrun.wait_for("up-*", 2)
    begin = time.monotonic()
    _, err = process.communicate(timeout=30)
    took = time.monotonic() - begin
    assert process.returncode == 1, err
    assert "CollectiveMismatchError" in err
    assert err.count("Likely cause") == 1, err
    words = re.sub(r"  +", "  ", err)
    assert [text for text in shown if text not in words] == [], err
    assert took < WITHIN_S, f"took {took:.1f} s"
    assert not fuelrun.left()
