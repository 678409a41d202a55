"""The kernels of attention give what the ops give on numpy, for any shape, mask and layout in memory."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuel_parallel import backends
from fuel_parallel.backends.numpy_backend import NumpyBackend
from fuel_parallel.errors import IndexingError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Spec, data_node
from fuel_parallel.lazy.ops.attention import ATTENTION, ATTENTION_BACKWARD, extended_attention
from fuel_parallel.lazy.ops.paged_attention import PAGED_ATTENTION
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.runtime.codegen import attention_paged
from fuel_parallel.runtime.codegen.attention_backward import BackwardWriter
from fuel_parallel.runtime.codegen.attention_forward import ForwardWriter
from fuel_parallel.runtime.codegen.attention_paged import PagedForm, PagedWriter
from fuel_parallel.runtime.codegen.attention_writer import Form, source_for
from fuel_parallel.runtime.codegen.dialect import CUDA, OPENCL
from fuel_parallel.runtime.codegen.expressions import Unsupported
from fuel_parallel.runtime.codegen.launch import CUDA_OPTIONS
from fuel_parallel.runtime.kernels import kernel_of, written_or_reason
from tests.lazy.ops.test_paged_attention import Ragged

DIMS = [(3, 2), (20, 24)]
"""Of keys and values."""


def specs_of(arrays):
    return tuple(Spec(a.shape, a.dtype) for a in arrays)


def by_kernel(cupy, op, arrays, *attrs):
    specs = specs_of(arrays)
    run = written_or_reason(op.name, specs, attrs, op.infer(specs, *attrs), "cuda")
    assert not isinstance(run, str), run
    return run(cupy, arrays, *attrs)


def agrees(cupy, arrays, causal, rtol=1e-11):
    """Compares both ops; gives the results of the kernels."""
    arrays = list(arrays)
    scale = arrays[0].shape[-1] ** -0.5
    wanted = ATTENTION.kernel(np, arrays, causal, scale, False)
    found = by_kernel(cupy, ATTENTION, arrays, causal, scale, False)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol)
    toward = np.random.default_rng(1).normal(size=wanted.shape).astype(wanted.dtype)
    inputs = [toward[..., : arrays[2].shape[-1]], wanted, *arrays]
    gradients = ATTENTION_BACKWARD.kernel(np, inputs, causal, scale)
    packed = by_kernel(cupy, ATTENTION_BACKWARD, inputs, causal, scale)
    assert packed.dtype == gradients.dtype
    wide = [x.astype(np.float64) for x in (packed, gradients)]
    np.testing.assert_allclose(*wide, rtol=rtol, atol=20 * rtol)
    return found, packed


@st.composite
def cases(draw):
    """Query, key, value and maybe a mask, and whether it is causal."""
    dim, value_dim = draw(st.sampled_from(DIMS))
    kv_heads, served = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2)]))
    heads = kv_heads * served
    batch = draw(st.sampled_from([(), (2,), (2, 3), (2, 1, 2)]))
    q, k = draw(st.integers(1, 20)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 99)))

    def array(heads, length, dim):
        if draw(st.booleans()):
            return rng.normal(size=(*batch, heads, length, dim))
        return rng.normal(size=(*batch, length, heads, dim + 1)).swapaxes(-3, -2)[..., :dim]

    arrays = [array(heads, q, dim), array(kv_heads, k, dim), array(kv_heads, k, value_dim)]
    if draw(st.booleans()):
        whole = (*batch, heads, q, k)
        shape = [draw(st.sampled_from([1, n])) for n in whole[draw(st.integers(0, len(whole) - 1)) :]]
        arrays.append(rng.random(shape) < draw(st.sampled_from([0.1, 0.8])))
    return arrays, draw(st.booleans())


@given(case=cases())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_case(host_cupy, case):
    agrees(host_cupy, *case)


@pytest.mark.parametrize("q", [5, 12, 30, 70])
def test_tiles_of_every_size(q, host_cupy):
    rng = np.random.default_rng(q)
    arrays = [rng.normal(size=(2, n, 8)) for n in (q, 75, 75)]
    found, packed = agrees(host_cupy, arrays, True)
    again = agrees(host_cupy, arrays, True)
    assert found.tobytes() == again[0].tobytes()
    assert packed.tobytes() == again[1].tobytes()
    rows = {block[0] for name, _, block, _ in host_cupy.launches[-3:]}
    assert rows <= {32, 64, 128}


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 3e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_other_dtypes(dtype, rtol, host_cupy):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, n, 8)).astype(getattr(dtypes, dtype)) for n in (9, 20, 20)]
    agrees(host_cupy, arrays, False, rtol)


def test_numbers_that_are_not_finite(host_cupy):
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(2, 6, 3)) for _ in range(3))
    query[0, 2] = np.nan
    query[1, 5] = 1e200
    with np.errstate(all="ignore"):
        agrees(host_cupy, [query, key, value], True)


def test_heads_and_positions_are_permuted_without_a_copy(host_cupy):
    """What `permute_dims` gives is read where it lies, and a mask is not broadcast."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(2, 6, 3, 4)).swapaxes(1, 2) for _ in range(3)]
    mask = rng.random((2, 1, 1, 6)) < 0.7
    agrees(host_cupy, [*arrays, mask], False)
    _, _, _, arguments = host_cupy.launches[-1]
    assert all(any(a is array for a in arguments) for array in (mask, *arrays))


def test_where_a_kernel_is_declined():
    query = Spec((2, 4, 5000), dtypes.float64)
    assert "KiB of shared memory" in reason(ATTENTION, (query, query, query), False, 1.0, False)
    assert "float64 are too large" in reason(ATTENTION, (query, query, query), False, 1.0, False)
    small = Spec((2, 4, 8), dtypes.float64)
    assert reason(ATTENTION, (small, small, small), False, 1.0, True) == "the weights are to be kept"
    empty = Spec((2, 0, 8), dtypes.float64)
    assert reason(ATTENTION, (small, empty, empty), False, 1.0, False) == "there is nothing to compute"
    kept = Spec((2, 4, 8 + 1 + 4), dtypes.float64)
    assert reason(ATTENTION_BACKWARD, (small, kept, small, small, small), False, 1.0) == "the weights were kept"


def reason(op, specs, *attrs):
    found = written_or_reason(op.name, specs, attrs, op.infer(specs, *attrs), "cuda")
    assert isinstance(found, str)
    return found


@pytest.mark.parametrize(
    ("writer", "dialect", "largest"),
    [
        (ForwardWriter, CUDA, 1016),
        (BackwardWriter, CUDA, 496),
        (ForwardWriter, OPENCL, 664),
        (BackwardWriter, OPENCL, 328),
    ],
)
def test_heads_up_to_a_size_fit(writer, dialect, largest):
    for dim in (1, 64, 96, 128, 256, largest):
        assert "atomic" not in source_for(writer, Form(dtypes.float32, dim, dim, True, 2), 1000, dialect).text
    with pytest.raises(Unsupported, match=f"heads of {largest + 1} and {largest + 1} float32 are too large for tiles"):
        source_for(writer, Form(dtypes.float32, largest + 1, largest + 1, True, 2), 1000, dialect)


class Compiling(NumpyBackend):
    """Runs every op by the registry, as CuPy does, and compiles."""

    dialect = "cuda"


def test_the_kernel_in_c_comes_before_that_of_the_registry(monkeypatch):
    monkeypatch.setitem(backends._found, "cuda:77", Compiling())
    for dim, declined in ((8, False), (5000, True)):
        query = Spec((2, 4, dim), dtypes.float64, "cuda:77")
        extended = extended_attention([Tensor(data_node(None, query))] * 3, False, 1.0).node
        assert (extended.attrs, extended.spec.shape) == ((False, 1.0, False), (2, 4, dim + 1))
        inputs = [query, extended.spec, query, query, query]
        for op, specs, attrs in ((ATTENTION, inputs[2:], extended.attrs), (ATTENTION_BACKWARD, inputs, (False, 1.0))):
            kernel = kernel_of(op, specs, attrs, op.infer(tuple(specs), *attrs))
            assert (kernel is op.kernel) == declined


# Over pages.


def by_pages(cupy, batch, keys, values, *scales):
    """What the kernel gives for a batch, after a look that it agrees with the op on numpy."""
    inputs = [batch.query, keys, values, batch.table, np.array(batch.lengths), batch.starts, *scales]
    found = by_kernel(cupy, PAGED_ATTENTION, inputs, 0.4, tuple(batch.groups))
    wanted = PAGED_ATTENTION.kernel(np, inputs, 0.4, tuple(batch.groups))
    assert found.dtype == wanted.dtype
    # Rounded sums of terms as large as the values, which may cancel.
    rtol = {8: 1e-11, 4: 3e-6, 2: 2e-2}[found.dtype.itemsize]
    atol = rtol * max(1.0, np.abs(wanted.astype(float)).max(initial=0))
    np.testing.assert_allclose(found.astype(float), wanted.astype(float), rtol=rtol, atol=atol)
    return found


@given(data=st.data())
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_batch_over_pages(host_cupy, data):
    batch = Ragged(data.draw, even=data.draw(st.booleans()))
    if batch.query.size:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_paged, "CHUNK", data.draw(st.sampled_from([1, 3, 256])))
            by_pages(host_cupy, batch, batch.keys, batch.values)


def test_a_long_context_is_divided_and_many_queries_are_not(host_cupy):
    rng = np.random.default_rng(0)
    pages = rng.normal(size=(80, 16, 2, 4))
    for tokens, kernels, blocks in ((1, ["paged_attention", "put_together"], 2 * 5), (40, ["paged_attention"], 2 * 2)):
        query = rng.normal(size=(tokens, 4, 4))
        inputs = [query, pages, -pages, np.arange(80)[None], np.array([1200]), np.array([0, tokens])]
        host_cupy.launches.clear()
        found = by_kernel(host_cupy, PAGED_ATTENTION, inputs, 0.4, None)
        np.testing.assert_allclose(found, PAGED_ATTENTION.kernel(np, inputs, 0.4, None), rtol=1e-11, atol=1e-12)
        assert [name for name, *_ in host_cupy.launches] == kernels
        assert host_cupy.launches[0][1] == (blocks,)


@given(data=st.data(), stored=st.sampled_from(["int8", "bfloat16"]), asked=st.sampled_from(["float32", "float16"]))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_pages_of_fewer_bits(host_cupy, data, stored, asked):
    batch = Ragged(data.draw, dtype=getattr(dtypes, asked))
    pages = [batch.keys, batch.values]
    scales = [np.abs(x[..., 0]).astype(np.float32) for x in pages] if stored == "int8" else []
    pages = [np.round(x * 40).clip(-127, 127) for x in pages] if scales else pages
    if batch.query.size:
        by_pages(host_cupy, batch, *(x.astype(getattr(dtypes, stored)) for x in pages), *scales)


def test_a_page_or_token_that_is_not_there_is_the_user_s_error(host_cupy):
    pages, query = np.ones((2, 4, 1, 3)), np.ones((2, 1, 3))
    run = [query, pages, pages, np.array([[5]]), np.array([3]), np.array([0, 2])]
    with pytest.raises(IndexingError, match="there is no page 5"):
        by_kernel(host_cupy, PAGED_ATTENTION, run, 1.0, None)
    run[3:5] = np.array([[1]]), np.array([1])
    with pytest.raises(ShapeError, match="sequence 0 has 2 query tokens, 1 tokens"):
        by_kernel(host_cupy, PAGED_ATTENTION, run, 1.0, None)


# What CUDA's compiler makes of them. It needs no driver.


def ptx_of(source, architecture):
    """The source as PTX."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as why:
        pytest.skip(f"no NVRTC: {type(why).__name__}: {why}")
    program = nvrtc.createProgram(source, "attention.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*CUDA_OPTIONS, f"-arch={architecture}"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    return nvrtc.getPTX(program).decode()


@pytest.mark.parametrize(
    ("form", "piece", "architectures"),
    [
        (Form(dtypes.float32, 64, 64, True, None), "v4.f32", ["compute_80", "compute_90"]),
        (Form(dtypes.bfloat16, 128, 80, False, 2), "v4.f32", ["compute_80", "compute_90"]),
        (Form(dtypes.float64, 64, 48, False, 0), "v2.f64", ["compute_80"]),
    ],
    ids=["float32", "bfloat16", "float64"],
)
def test_nvrtc_takes_the_source(form, piece, architectures):
    entries = {ForwardWriter: ["attention"], BackwardWriter: ["attention_of_queries", "attention_of_keys"]}
    for writer, names in entries.items():
        for architecture in architectures:
            check_ptx(ptx_of(source_for(writer, form, 1000, CUDA).text, architecture), names, piece)


@pytest.mark.parametrize("stored", [dtypes.float32, dtypes.int8, dtypes.bfloat16], ids=str)
def test_nvrtc_takes_the_source_over_pages(stored):
    form = PagedForm(dtypes.bfloat16, 128, 128, False, None, stored, 16)
    check_ptx(
        ptx_of(source_for(PagedWriter, form, 8, CUDA).text, "compute_90"), ["paged_attention", "put_together"], "v4.f32"
    )


def check_ptx(ptx, names, piece):
    """Tiles are read 16 bytes at a time and fit into a block's memory; what a thread has is in registers."""
    assert re.findall(r"\.entry (\w+)", ptx) == names
    assert f"ld.shared.{piece}" in ptx
    assert "local" not in ptx
    tiles = re.findall(r"\.shared \.align 16 \.b8 _ZZ\d+([a-z_]+)E\d+\w+\[(\d+)\]", ptx)
    memory = [sum(int(nbytes) for kernel, nbytes in tiles if kernel == name) for name in names]
    assert 1024 < max(memory) <= CUDA.shared_bytes
