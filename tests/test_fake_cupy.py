"""The stand-in for CuPy is as careless with captures and memory as CUDA is; what is tested on it would show there."""

from __future__ import annotations

import fake_cuda
import fake_cupy
import numpy as np
import pytest


@pytest.fixture
def cupy():
    with fake_cupy.installed() as module:
        yield module


@pytest.fixture
def stream(cupy):
    return cupy.cuda.Stream(non_blocking=True)


def captured(stream, work):
    with stream:
        stream.begin_capture()
        work()
        return stream.end_capture()


def test_a_capture_does_nothing_and_a_launch_reads_what_is_there_then(cupy, stream):
    x = cupy.asarray(np.array([1.0, 2.0]))
    out = cupy.empty(2)
    graph = captured(stream, lambda: cupy.multiply(x, 10, out=out))
    assert out.get().tobytes() == b"\xab" * 16 or not np.array_equal(out.get(), [10, 20])
    graph.launch()
    assert out.get().tolist() == [10, 20]
    x[...] = cupy.asarray(np.array([3.0, 4.0]))
    graph.launch()
    assert out.get().tolist() == [30, 40]


def test_a_launch_does_not_know_that_memory_was_let_go_of(cupy, stream):
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        held, out = [cupy.asarray(np.ones(4))], cupy.empty(4)
        graph = captured(stream, lambda: cupy.add(held[0], 0, out=out))
        held.clear()
        graph.launch()
        assert out.get().tobytes() == b"\xee" * 32
        other = cupy.asarray(np.full(4, 7.0))  # the pool hands the same memory out again
        graph.launch()
        assert out.get().tolist() == [7] * 4
    assert other.get().tolist() == [7] * 4
    assert pool.total_bytes() == 2 * 512


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        (lambda cupy, x: x.get(), RuntimeError, "D2H transfers are disallowed"),
        (lambda cupy, x: cupy.asarray(np.ones(3)), RuntimeError, "H2D transfers are disallowed"),
        (lambda cupy, x: cupy.matmul(x, x), RuntimeError, "calling cuBLAS API during stream capture"),
        (lambda cupy, x: cupy.nonzero(x), fake_cuda.CUDARuntimeError, "cudaErrorStreamCaptureUnsupported"),
        (lambda cupy, x: cupy.linalg.inv(x), RuntimeError, "during stream capture is currently unsupported"),
        (lambda cupy, x: cupy.concatenate([x] * 9), RuntimeError, "H2D transfers are disallowed"),
        (lambda cupy, x: cupy.cuda.get_current_stream().synchronize(), fake_cuda.CUDARuntimeError, "not permitted"),
    ],
)
def test_what_waits_is_refused_in_a_capture(cupy, stream, work, error, text):
    x = cupy.asarray(np.eye(2))
    with stream:
        stream.begin_capture()
        with pytest.raises(error, match=text):
            work(cupy, x)


def test_the_default_stream_cannot_be_captured(cupy):
    with pytest.raises(RuntimeError, match="cannot capture on the default"):
        cupy.cuda.Stream.null.begin_capture()


def test_arrays_of_the_host_or_of_another_device_are_refused(cupy):
    x = cupy.asarray(np.ones(2))
    with pytest.raises(TypeError, match="Unsupported type"):
        x + np.ones(2)
    with cupy.cuda.Device(1), pytest.raises(ValueError, match="same as the current device"):
        cupy.add(x, 1)


def test_other_imports_of_cupy_are_not_touched():
    import sys

    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "cupy"}
    with fake_cupy.installed():
        import cupy

        assert cupy is fake_cupy.module
    assert {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "cupy"} == before
