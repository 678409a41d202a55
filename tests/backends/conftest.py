"""The devices that tests run on besides the CPU. What is missing is skipped with the reason of the library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import stand_in
import third_party

from fuel_parallel import backends
from fuel_parallel.errors import DeviceError


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
