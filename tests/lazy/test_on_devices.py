"""Each op of the registry computes the same on every kind of device, on the device or between copies to the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import fake_cupy
import numpy as np
import pytest
import stand_in
import stand_in_cublas
import third_party

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.errors import DeviceError
from fuel_parallel.lazy.node import OPS
from fuel_parallel.lazy.outline import outline
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan

DEVICES = ("cpu", "plain:0", "products:0", "cuda:0", "abacus:0", "opencl:0")
"""Those of tests: a stand-in for a GPU, one with products as on CUDA, one for CuPy, and a backend with few kernels."""

ON_HOST = {
    "argsort", "astype", "cholesky", "complex_expm1", "complex_tanh", "copy_pages", "det", "eigh", "eigvalsh", "fft",
    "grouped_matmul", "grouped_outer", "ifft", "imag", "index_update", "inv", "irfft", "nll", "nll_backward", "pinv",
    "qr", "rfft", "searchsorted", "slogdet", "solve", "svd", "svdvals", "write_pages",
}  # fmt: skip
"""Cases that OpenCL does not compute itself; `index` with several axes too. That of `astype` is about complex."""

WAITS = {"grouped_matmul", "grouped_outer", "random_bits"}
"""Those during which the host reads what lies on a device: where groups end, the key of a stream of random numbers."""


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name: str = request.param
    monkeypatch.setitem(backends._found, "abacus:0", third_party.Abacus(0))
    if name == "products:0" and stand_in_cublas.COMPILER is None:
        pytest.skip(stand_in_cublas.NO_COMPILER)
    backend = stand_in_cublas.Backend if name == "products:0" else stand_in.StandInBackend
    memory = stand_in.StandInMemory(name if name == "products:0" else "plain:0")
    with stand_in.installed(memory, backend), fake_cupy.installed():
        try:
            yield backends.check_device(name)
        except DeviceError as reason:
            pytest.skip(str(reason))


def test_value(case: Any, device: str) -> None:
    built = case.build(*[ft.asarray(x).to(device) for x in case.inputs])
    wanted = np.asarray(case.oracle(*case.inputs))
    found = built.numpy()
    assert (found.shape, built.device) == (wanted.shape, "other:0" if case.op == "copy" else device)
    if wanted.dtype.kind in "biu":
        np.testing.assert_array_equal(found, wanted)
    else:
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_operands_on_two_devices_are_refused_or_copied_as_a_group_says(case: Any) -> None:
    several = [n for n in range(len(case.inputs)) if n not in (OPS[case.op].on_host or ())]
    if len(several) < 2:
        pytest.skip("has one operand")
    with stand_in.installed(stand_in.StandInMemory("plain:0")):
        for n in several:
            inputs = [ft.asarray(x).to("plain:0") if i == n else ft.asarray(x) for i, x in enumerate(case.inputs)]
            with pytest.raises(DeviceError, match=r"\w+: operands are on cpu and plain:0; move them"):
                case.build(*inputs)
            with fp.DeviceGroup(["plain:0", "cpu"]):
                built = case.build(*inputs)
            assert {e.device for e in outline([built]) if e.op == case.op} == {"plain:0"} or case.op == "call"
            np.testing.assert_allclose(built.numpy(), case.oracle(*case.inputs), rtol=1e-12, atol=1e-12)


def test_the_host_waits_for_no_device_within_a_kernel(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(name: str) -> Any:
        original = getattr(stand_in.Array, name)

        def method(array: Any) -> Any:
            if "fuel_parallel" in sys._getframe(1).f_code.co_filename:
                asked.append(name)
            return original(array)

        return method

    with stand_in.installed(stand_in.StandInMemory("plain:0")) as memory:
        built = case.build(*[ft.asarray(x).to(memory.device).realize() for x in case.inputs])
        for name in ("__bool__", "tolist", "get"):
            monkeypatch.setattr(stand_in.Array, name, noted(name))
        built.realize()
    assert bool(asked) == (case.op in WAITS)


def test_what_opencl_leaves_to_the_host_is_listed(case: Any) -> None:
    try:
        device = backends.check_device("opencl:0")
    except DeviceError as reason:
        pytest.skip(str(reason))
    inputs = [ft.asarray(x).to(device).realize() for x in case.inputs]
    plan = make_plan(trace([case.build(*inputs).node])[0], ())
    here = {step.op.name for step in plan.steps if step.op.name == case.op and step.spec.device == "cpu"}
    assert (case.op in here) == (case.op in ON_HOST or (case.op == "index" and len(inputs) == 2)) or case.op == "copy"
