"""Names of devices, what is listed and why not, and backends of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.backends import registry
from fuel_parallel.errors import DeviceError
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages have registered backends; one of them is broken."""
    monkeypatch.setattr(backends, "_found", {"cpu": backends.backend_of("cpu")})
    entries = {
        "abacus": EntryPoint("abacus", "third_party:Abacus", registry.GROUP),
        "broken": EntryPoint("broken", "no_such_module:Backend", registry.GROUP),
        "wrong": EntryPoint("wrong", "third_party:Beads", registry.GROUP),
    }
    monkeypatch.setattr(registry, "_registered", lambda: entries)


@pytest.mark.usefixtures("registered")
def test_a_package_adds_a_kind_of_device() -> None:
    x = ft.asarray([1.0, 2.0]).to("abacus:1")
    assert (x + x).tolist() == [2.0, 4.0]
    assert (x + x).device == "abacus:1"
    assert "abacus:1" in fp.devices()
    assert [name for name in fp.devices() if name.startswith("abacus")] == ["abacus:0", "abacus:1"]


@pytest.mark.usefixtures("registered")
def test_what_cannot_be_used_has_a_reason() -> None:
    listed = fp.devices()
    assert "no_such_module" in listed.missing["broken"]
    assert "expected a subclass" in listed.missing["wrong"]
    assert "broken      none: the backend of 'broken', no_such_module:Backend, cannot be loaded" in str(listed)
    assert next(iter(listed)) == "cpu"
    if "cuda:0" not in listed:
        assert "CuPy" in listed.missing["cuda"] or "device" in listed.missing["cuda"]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("abacus:2", r"device 'abacus:2' is not there; expected one of abacus:0, abacus:1"),
        ("cpu:1", "device 'cpu:1' is not there; expected one of cpu"),
        ("abacus:x", "unknown device 'abacus:x'; expected a kind"),
        ("tpu", r"unknown device 'tpu'; expected a kind \(cpu, .*abacus.*these can be used: cpu"),
        ("broken:0", "cannot be loaded: ModuleNotFoundError"),
        (3, "a device is named by a string"),
    ],
)
def test_a_wrong_name_is_refused_with_the_choices(device: str, text: str) -> None:
    with pytest.raises(DeviceError, match=text):
        ft.ones(2).to(device)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("local_rank", "device"), [(0, "abacus:0"), (1, "abacus:1"), (2, "abacus:0")])
def test_a_kind_alone_is_this_ranks_device(monkeypatch: pytest.MonkeyPatch, local_rank: int, device: str) -> None:
    monkeypatch.setattr(backends, "_local_rank", lambda: local_rank)
    assert ft.ones(2).to("abacus").device == device
    assert ft.ones(2, device="cpu:0").device == "cpu"


def test_what_a_device_cannot_do_is_done_on_the_host_between_copies(abacus: str) -> None:
    x, y = (ft.asarray(np.ones((3, 3))).to(abacus).realize() for _ in range(2))
    result = ft.tanh(ft.exp(ft.sqrt(x + y)) * x)
    plan = make_plan(trace([result.node])[0], ())
    steps = [(step.op.name, step.spec.device) for step in plan.steps]
    assert steps == [
        ("add", abacus),
        ("copy", "cpu"),
        ("sqrt", "cpu"),
        ("exp", "cpu"),
        ("copy", abacus),
        ("multiply", abacus),
        ("tanh", abacus),
    ]
    np.testing.assert_allclose(result.numpy(), np.tanh(np.exp(np.sqrt(2)) * np.ones((3, 3))))
