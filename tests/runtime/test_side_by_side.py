"""Lanes at work: devices that overlap, fail and are interrupted, and give the bits of one thread alone."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_devices
import third_party
from hypothesis import given, settings
from tapped_devices import SECONDS, TappedAbacus, abaci, chain, meeting, nothing, on_host

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.errors import DeviceError, FuelError, RealizeError
from fuel_parallel.runtime import passes, workers
from fuel_parallel.runtime.execute import execute
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan

EXAMPLES = 1000 if os.environ.get("FUEL_STRESS") else 50
ROWS = np.arange(6.0).reshape(2, 3) / 7


@pytest.fixture(autouse=True)
def overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """All passes are on, whatever the environment says."""
    monkeypatch.delenv(passes.VARIABLE, raising=False)


def on(device: str) -> ft.Tensor:
    return ft.asarray(ROWS).to(device).realize()


# What overlaps. Each of these ends only if all who meet are at work at the same time.


def test_two_devices_compute_at_the_same_time() -> None:
    tap = meeting(2)
    with abaci(tap, tap):
        x, y = (chain(on(f"abacus:{n}"), 3) for n in range(2))
        fp.realize(x, y)
        wanted = np.tanh(np.tanh(np.tanh(ROWS)))
        assert x.tolist() == y.tolist() == wanted.tolist()


def test_the_host_computes_while_a_device_does() -> None:
    tap = meeting(2)
    with abaci(tap):
        x, y = ft.tanh(on("abacus:0")), on_host(tap)(on("cpu"))
        fp.realize(x, y)
        assert y.tolist() == (ROWS + 1).tolist()


def test_one_device_copies_while_another_computes() -> None:
    tap = meeting(2)
    with random_devices.installed(("abacus:0", TappedAbacus(0, tap_copy=tap)), ("abacus:1", TappedAbacus(1, tap=tap))):
        here, there = on("abacus:0").to("cpu"), ft.tanh(on("abacus:1"))
        fp.realize(here, there)
        assert here.tolist() == ROWS.tolist()


def test_an_opencl_device_copies_while_the_host_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        device = backends.check_device("opencl:0")
    except DeviceError as reason:
        pytest.skip(str(reason))
    tap = meeting(2)
    group = fp.DeviceGroup(["cpu", device])
    shards = [on("cpu"), on(device)]
    copy = type(backends.backend_of(device)).to_host

    def to_host(backend: Any, array: Any) -> Any:
        tap()
        return copy(backend, array)

    monkeypatch.setattr(type(backends.backend_of(device)), "to_host", to_host)
    total = group.all_reduce([on_host(tap)(shards[0]), ft.exp(shards[1])])
    np.testing.assert_allclose(total.numpy(), ROWS + 1 + np.exp(ROWS))


def test_each_device_has_its_thread_and_the_host_has_none() -> None:
    seen: list[str] = []
    with abaci(nothing, nothing):
        here = on_host(lambda: seen.append(threading.current_thread().name))(on("cpu"))
        fp.realize(chain(on("abacus:0"), 2), chain(on("abacus:1"), 2), here)
        for number in range(2):
            module = backends.backend_of(f"abacus:{number}").array_module
            assert module.threads == {f"fuel-parallel abacus:{number}"}
        assert seen == [threading.current_thread().name]


# What comes out.


@pytest.fixture
def _often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_often")
def test_random_programs_have_the_bits_of_one_thread() -> None:
    lanes = 0

    @settings(max_examples=EXAMPLES)
    @given(random_devices.steps)
    def check(program: Any) -> None:
        nonlocal lanes
        tensors = random_devices.values_of(program)
        graph, nodes, computed = trace([t.node for t in tensors])
        plan = make_plan(graph, ("fusion", "overlap"))
        lanes += plan.lanes is not None

        def values(which: Any) -> list[Any]:
            leaves = [node.value.copy() if isinstance(node.value, np.ndarray) else node.value for node in nodes]
            spare = frozenset(n for n, leaf in enumerate(leaves) if isinstance(leaf, np.ndarray))
            results = execute(which, leaves, computed, spare)
            return [r.read().copy() if hasattr(r, "read") else np.array(r) for r in results]

        for found, wanted in zip(values(plan), values(replace(plan, lanes=None)), strict=True):
            np.testing.assert_array_equal(found, wanted)

    with random_devices.two_abaci():
        check()
    assert lanes > EXAMPLES // 3


def test_values_are_let_go_when_their_last_reader_is_done_whichever_it_is() -> None:
    alive: list[int] = []

    def count() -> None:
        alive.append(sum(type(o) is third_party.Beads for o in gc.get_objects()))

    with abaci(count, nothing):
        x, y = chain(on("abacus:0"), 30), chain(on("abacus:1"), 30)
        both = x.to("abacus:1") + y, x.to("cpu")
        fp.realize(*both)
        assert len(alive) == 30
        assert max(alive[10:]) - min(alive) <= 6  # some of each chain at a time, and not all that were made
        before = len([o for o in gc.get_objects() if type(o) is third_party.Beads])
        assert before <= min(alive) + 2


def test_where_no_thread_starts_any_more_one_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    workers.leave()
    monkeypatch.setattr(threading.Thread, "start", start)
    with abaci(nothing, nothing):
        x, y = chain(on("abacus:0"), 3), chain(on("abacus:1"), 3)
        fp.realize(x, y)
        assert x.tolist() == y.tolist() == np.tanh(np.tanh(np.tanh(ROWS))).tolist()


def test_the_callers_errstate_holds_on_all_threads() -> None:
    seen: list[str] = []
    with abaci(lambda: seen.append(np.geterr()["over"]), nothing), np.errstate(over="call"):
        fp.realize(chain(on("abacus:0"), 1), chain(on("abacus:1"), 1))
    assert seen == ["call"]


def test_threads_are_kept_from_run_to_run() -> None:
    with abaci(nothing, nothing):
        x, y = (on(f"abacus:{n}") for n in range(2))
        fp.realize(ft.tanh(x), ft.tanh(y))
        kept, count = dict(workers._workers), threading.active_count()
        for _ in range(20):
            fp.realize(ft.tanh(x), ft.tanh(y))
        assert workers._workers == kept
        assert threading.active_count() == count


class Notes(list[str]):
    """Notes who writes them."""

    def append(self, what: str) -> None:
        super().append(f"{what} by {threading.current_thread().name}")


def test_a_collective_begins_and_ends_in_the_thread_that_realizes(late: Any) -> None:
    late.transport.events = Notes()
    me = threading.current_thread().name
    with abaci(nothing, nothing):
        x = ft.asarray(np.linspace(0, 1, 10_000)).realize()
        total = late.all_reduce(ft.exp(x))
        there = ft.tanh(total.to("abacus:0"))  # its first reader
        beside = chain(x.to("abacus:1"), 5)
        here = ft.exp(ft.flip(ft.exp(x)))
        plan = make_plan(trace([t.node for t in (total, there, beside, here)])[0], ("fusion", "overlap"))
        assert plan.lanes is not None
        assert any(not task.runs for task in plan.lanes.tasks)
        fp.realize(total, there, beside, here)
        np.testing.assert_array_equal(total.numpy(), 2 * np.exp(x.numpy()))
        np.testing.assert_array_equal(there.numpy(), np.tanh(2 * np.exp(x.numpy())))
    assert {note.partition(" by ")[2] for note in late.transport.events} == {me}
    assert [note.partition(" ")[0] for note in late.transport.events if "progress" not in note] == ["start", "wait"]


# What fails.


class Broken(Exception):
    pass


def break_down() -> None:
    raise Broken("no more")


@pytest.mark.parametrize("where", ["cpu", "abacus:0", "abacus:1"])
def test_the_failure_of_any_lane_names_its_step_and_ends_the_others(where: str) -> None:
    broken = threading.Event()

    def fail() -> None:
        broken.set()
        break_down()

    def slow() -> None:
        assert broken.wait(SECONDS)
        time.sleep(0.001)

    taps = {device: fail if device == where else slow for device in random_devices.DEVICES}
    with abaci(taps["abacus:0"], taps["abacus:1"]):
        # The step that fails is the first of the plan.
        broken_one = {"cpu": lambda: on_host(fail)(on("cpu"))}.get(where, lambda: ft.tanh(on(where)))()
        here = on("cpu")
        for _ in range(300):
            here = on_host(nothing if where == "cpu" else slow)(here)
        there = [chain(on(f"abacus:{n}"), 300) for n in range(2) if where != f"abacus:{n}"]
        op = "tapped" if where == "cpu" else "tanh"
        with pytest.raises(RealizeError, match=rf"{op}\(.*failed: Broken: no more\n  built at .*py:\d+"):
            fp.realize(broken_one, here, *there)
        for number in range(2):
            assert backends.backend_of(f"abacus:{number}").array_module.computed < 300
        works = [ft.square(on(f"abacus:{n}")) for n in range(2)]
        fp.realize(*works)
        assert works[0].tolist() == works[1].tolist() == (ROWS**2).tolist()


def test_of_two_failures_the_first_in_the_plan_is_told() -> None:
    both = meeting(2)

    def fail(number: int) -> None:
        both()
        raise Broken(f"device {number}")

    for order in ([0, 1], [1, 0]):
        with abaci(lambda: fail(0), lambda: fail(1)):
            results = [ft.tanh(on(f"abacus:{n}")) for n in order]
            for _ in range(5):
                with pytest.raises(RealizeError, match=f"Broken: device {order[0]}"):
                    fp.realize(*results)


def test_steps_before_one_that_fails_are_done_and_so_the_first_is_told_whenever_it_fails() -> None:
    late = threading.Event()

    def fail_late() -> None:
        assert late.wait(SECONDS)
        time.sleep(0.01)
        raise Broken("the first")

    def fail_early() -> None:
        late.set()
        raise Broken("the second")

    with abaci(fail_late, fail_early):
        results = [chain(on("abacus:0"), 2), ft.tanh(on("abacus:1"))]
        with pytest.raises(RealizeError, match="Broken: the first"):
            fp.realize(*results)


def test_an_error_of_the_library_is_told_as_it_is() -> None:
    def fail() -> None:
        raise DeviceError("out of beads")

    with abaci(fail, nothing), pytest.raises(FuelError) as caught:
        fp.realize(ft.tanh(on("abacus:0")), ft.tanh(on("abacus:1")))
    assert (type(caught.value), str(caught.value)) == (DeviceError, "out of beads")


def test_an_interrupt_ends_all_lanes() -> None:
    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)

    with abaci(interrupt, nothing):
        x, y = chain(on("abacus:0"), 100), chain(on("abacus:1"), 2)
        with pytest.raises(KeyboardInterrupt):
            fp.realize(x, y)
        module = backends.backend_of("abacus:0").array_module
        assert module.computed < 5
        module.tap = nothing
        fp.realize(x, y)  # and again, by the same threads
        assert module.computed >= 100


def test_a_second_interrupt_leaves_a_kernel_that_does_not_end() -> None:
    free, over = threading.Event(), threading.Event()

    def hang() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        free.wait(SECONDS)
        over.set()

    with abaci(hang, nothing):
        x, y = ft.tanh(on("abacus:0")), ft.tanh(on("abacus:1"))
        with pytest.raises(KeyboardInterrupt):
            fp.realize(x, y)
        assert not over.is_set()
        backends.backend_of("abacus:0").array_module.tap = nothing
        fp.realize(x, y)
        assert x.tolist() == np.tanh(ROWS).tolist()
        free.set()
        assert over.wait(SECONDS)


# Processes that begin and end.

SCRIPT = """
import atexit, os, sys
sys.path.insert(0, {tests!r})
import numpy as np
import fuel_parallel as fp, fuel_parallel.lazy as ft
import tapped_devices
from fuel_parallel import backends
from tapped_devices import TappedAbacus, chain, meeting, nothing

for n in range(2):
    backends._found[f"abacus:{{n}}"] = TappedAbacus(n)

def both(length=3):
    x, y = (chain(ft.asarray(np.ones(3)).to(f"abacus:{{n}}"), length) for n in range(2))
    fp.realize(x, y)
    return x.numpy().sum() + y.numpy().sum()
"""


def run(folder: Path, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT.format(tests=str(Path(__file__).parent.parent)) + script)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder, env={"PATH": "/usr/bin:/bin", **environ}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_process_ends_as_it_should(tmp_path: Path) -> None:
    done = run(tmp_path, "atexit.register(lambda: print(both()))\nprint(both())\n")
    assert (done.returncode, done.stderr) == (0, "")
    first, last = done.stdout.split()
    assert first == last


def test_a_process_that_begins_at_its_end_still_computes(tmp_path: Path) -> None:
    done = run(tmp_path, "atexit.register(lambda: print(both()))\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert float(done.stdout) == pytest.approx(6 * np.tanh(np.tanh(np.tanh(1.0))))


def test_a_forked_child_has_threads_of_its_own(tmp_path: Path) -> None:
    script = (
        "before = both()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if both() == before else 3)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), both() == before)\n"
    )
    done = run(tmp_path, script)
    assert (done.returncode, done.stdout) == (0, "0 True\n")


def test_the_trace_shows_who_was_at_work_at_the_same_time(tmp_path: Path) -> None:
    script = (
        "tap = meeting(2)\nfor n in range(2): backends._found[f'abacus:{n}'] = TappedAbacus(n, tap)\nboth()\nboth()\n"
    )
    done = run(tmp_path, script, FUEL_TRACE=str(tmp_path / "out.json"))
    assert (done.returncode, done.stderr) == (0, "")
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    kernels = [
        [e for e in events if e.get("cat") == "kernel" and e["tid"] == tracks[f"kernels on abacus:{n}"]]
        for n in range(2)
    ]
    assert [sum(e["name"] == "tanh" for e in lane) for lane in kernels] == [6, 6]
    for first, second in zip(*([e for e in lane if e["name"] == "tanh"] for lane in kernels), strict=True):
        assert first["ts"] < second["ts"] + second["dur"]
        assert second["ts"] < first["ts"] + first["dur"]
    assert all(".py:" in e["args"]["line"] for lane in kernels for e in lane)
