"""The devices that tests run on besides the CPU. What is missing is skipped with the reason of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import stand_in
import third_party

import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.errors import DeviceError
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan


@pytest.fixture(autouse=True)
def abacus(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(backends._found, "abacus:0", third_party.Abacus(0))
    return "abacus:0"


@pytest.fixture
def stand_in_device() -> Iterator[str]:
    with stand_in.installed(stand_in.StandInMemory("plain:0")):
        yield "plain:0"


@pytest.fixture(scope="session")
def opencl() -> str:
    try:
        return backends.check_device("opencl:0")
    except DeviceError as reason:
        pytest.skip(str(reason))


@pytest.fixture
def hops() -> Callable[..., list[tuple[str, str]]]:
    """Where each Copy step of the plan for some tensors comes from and goes to."""

    def of(*results: ft.Tensor) -> list[tuple[str, str]]:
        graph, leaves, _ = trace([t.node for t in results])
        plan = make_plan(graph, ())
        specs = [*(leaf.spec for leaf in leaves), *(step.spec for step in plan.steps)]
        return [(specs[s.inputs[0]].device, s.spec.device) for s in plan.steps if s.op.name == "copy"]

    return of
