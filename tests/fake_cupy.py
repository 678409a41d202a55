"""A stand-in for CuPy: `with installed():` the library's own CUDA backend runs on it, as `cuda:0` and `cuda:1`.

Arrays lie in host memory that only `__cuda_array_interface__` shows. Functions are numpy's. They are queued, and read
memory when their turn comes (see `fake_cuda`); those whose result's shape depends on values wait, as CuPy's do, and
those that CuPy hands to cuBLAS are refused while a stream captures. `RawModule` compiles for the host, see
`kernels_on_host`; the library's own calls of cuBLAS are those of `stand_in_cublas`, queued like all else.
"""

from __future__ import annotations

import atexit
import functools
import importlib.machinery
import math
import shutil
import sys
import tempfile
import types
from contextlib import contextmanager
from pathlib import Path

import fake_cuda
import fake_cuda_memory
import kernels_on_host
import numpy as np
import stand_in_cublas
from fake_arrays import Array, checked, harmless, memory_of, on_device
from fake_cuda import current_stream

from fuel_parallel import backends
from fuel_parallel.backends import cupy_backend
from fuel_parallel.backends.cublas import CupyWithProducts

BY_CUBLAS = {"dot", "einsum", "inner", "matmul", "outer", "tensordot", "vdot"}
"""CuPy asks the handle of cuBLAS for its stream in each of them, which refuses one that captures."""

WAITING = {
    "allclose", "argpartition", "argsort", "argwhere", "array_equal", "flatnonzero", "isin", "lexsort", "nonzero",
    "partition", "searchsorted", "sort", "unique", "unique_all", "unique_counts",
    "unique_inverse", "unique_values",
}  # fmt: skip
"""Functions that wait for their inputs, or queue what cannot be captured (Thrust)."""

VIEWS = {
    "array_split", "as_strided", "broadcast_arrays", "broadcast_to", "diagonal", "expand_dims", "flip",
    "matrix_transpose", "moveaxis", "permute_dims", "ravel", "real", "reshape", "rot90", "split", "squeeze", "swapaxes",
    "transpose",
}  # fmt: skip
"""Functions that give views where they can."""


class Functions:
    """The module: numpy's functions."""

    __name__ = "cupy"
    ndarray = Array

    def __init__(self):
        self.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
        self.launches = []
        self._folder = None
        self.linalg, self.fft = Namespace(self, np.linalg), Namespace(self, np.fft)
        self.lib = types.SimpleNamespace(stride_tricks=Namespace(self, np.lib.stride_tricks))

    # Memory.

    def empty(self, shape, dtype=float, order="C"):
        shape = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        block = fake_cuda_memory.allocate(max(size, 1)).mem
        return Array(block, block.bytes[:size].view(dtype).reshape(shape), self)

    def empty_like(self, x, dtype=None):
        return self.empty(x.shape, dtype or x.dtype)

    def new(self, values):
        """An array with the values that a host array has now."""
        fake_cuda.refuse_in_capture("the current stream is capturing, so H2D transfers are disallowed")
        values = np.array(values, order="C")
        array = self.empty(values.shape, values.dtype)
        target = array.values

        def write():
            target[...] = values

        current_stream().add(write)
        return array

    def asarray(self, x, dtype=None, order=None):
        return self.array(x, dtype, copy=False)

    def array(self, x, dtype=None, copy=True, order="K"):
        if not isinstance(x, Array):
            return self.new(np.asarray(x, dtype))
        dtype = np.dtype(dtype or x.dtype)
        return x if not copy and dtype == x.dtype else self.queued(lambda v: v.astype(dtype), [x], {})

    def copyto(self, out, source, where=True):
        target, values, mask = out.values, memory_of(checked(source)), memory_of(checked(where))
        current_stream().add(lambda: np.copyto(target, values, where=mask))

    def ascontiguousarray(self, x):
        return (x if x.flags.c_contiguous else x.copy()).reshape(x.shape or (1,))

    def asnumpy(self, x):
        return x.get()

    # Functions.

    def call(self, function, inputs, options):
        return self.run(getattr(function, "__name__", ""), function, inputs, options)

    def run(self, name, function, inputs, options):
        if name in BY_CUBLAS:
            fake_cuda.refuse_in_capture("calling cuBLAS API during stream capture is currently unsupported")
        options = {key: value for key, value in options.items() if key != "device"}
        if name == "concatenate" and len(inputs[0]) > 8:
            fake_cuda.refuse_in_capture("the current stream is capturing, so H2D transfers are disallowed")
        if name in WAITING:
            result = function(*map(self.waited, inputs), **{k: self.waited(v) for k, v in options.items()})
            return _each(result, self.new)
        if name in VIEWS:
            return self._view(function, inputs, options)
        return self.queued(function, inputs, options)

    def waited(self, value):
        current_stream().synchronize()
        return memory_of(value)

    def queued(self, function, inputs, options):
        """Arrays that will have the function's results; `out` if that is one of the options."""
        options = dict(options)
        out = options.pop("out", None)
        out = out[0] if isinstance(out, tuple) else out
        checked([*inputs, *options.values()])
        if isinstance(function, np.ufunc) or "where" in options:
            options = {key: value for key, value in options.items() if value is not None}
        with np.errstate(all="ignore"):
            found = function(*map(harmless, inputs), **{k: harmless(v) for k, v in options.items()})
        made = _each(found, lambda one: self.empty(np.shape(one), np.asarray(one).dtype)) if out is None else out
        if out is not None and (out.shape != np.shape(found) or not np.can_cast(found.dtype, out.dtype, "same_kind")):
            raise TypeError(f"output of {found.dtype}{found.shape} cannot be {out.dtype}{out.shape}")
        arguments, targets = [memory_of(x) for x in inputs], memory_of(made)
        others = {key: memory_of(value) for key, value in options.items()}

        def work():
            with np.errstate(all="ignore"):
                results = function(*arguments, **others)
            if not isinstance(targets, list | tuple):
                targets[...] = results
            else:
                for target, result in zip(targets, results, strict=True):
                    target[...] = result

        current_stream().add(work)
        return made

    def _view(self, function, inputs, options):
        result = function(*map(memory_of, inputs), **options)
        owner = inputs[0]

        def shown(view):
            if function is np.lib.stride_tricks.as_strided:
                return Array(owner.block, view, self)  # CuPy's does not say what it looks at
            shares = not view.size or np.may_share_memory(view, owner.values)
            return owner._like(view) if shares else None

        if isinstance(result, list | tuple):
            return type(result)(map(shown, result))
        seen = shown(np.asarray(result))
        return self.queued(function, inputs, options) if seen is None else seen

    def __getattr__(self, name):
        return self.of(np, name)

    def of(self, namespace, name):
        function = getattr(namespace, name)
        if isinstance(function, type) or not callable(function):
            return function
        if namespace in (np.linalg, np.fft):
            return lambda *inputs, **options: self._by_a_library(function, inputs, options)

        def run(*inputs, **options):
            return self.run(name, function, inputs, options)

        run.at = self.add_at
        return run

    def _by_a_library(self, function, inputs, options):
        fake_cuda.refuse_in_capture("calling cuSOLVER API during stream capture is currently unsupported")
        result = function(*map(self.waited, inputs), **options)
        return _each(result, self.new)

    def add_at(self, out, index, value):
        target, at, source = out.values, memory_of(on_device(index, self)), memory_of(checked(value))
        current_stream().add(lambda: np.add.at(target, at, source))

    # Kernels.

    def RawModule(self, *, code, options=()):
        fake_cuda.refuse_in_capture("a module cannot be loaded while the stream is capturing")
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="kernels-"))
            atexit.register(shutil.rmtree, self._folder, ignore_errors=True)
        library = kernels_on_host.compiled(code, self._folder)
        return types.SimpleNamespace(get_function=lambda name: self._kernel(library, name))

    def _kernel(self, library, name):
        def launch(grid, block, args, *, shared_mem=0):
            cells = [kernels_on_host.cell(memory_of(checked(a))) for a in args]
            self.launches.append(name)
            current_stream().add(lambda: kernels_on_host.launch(library, name, grid, block, cells))

        return launch


_erf = np.vectorize(math.erf, otypes=[float])


def _each(result, make):
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*map(make, result))
    if isinstance(result, list | tuple):
        return type(result)(map(make, result))
    return make(result) if isinstance(result, np.ndarray | np.generic) else result


class Namespace:
    """`linalg`, `fft` and the like."""

    def __init__(self, module, namespace):
        self._module, self._namespace = module, namespace

    def __getattr__(self, name):
        return self._module.of(self._namespace, name)


class OnStream(stand_in_cublas.InOrder):
    """A product of cuBLAS, queued on the current stream or captured with the addresses that it works on."""

    def __call__(self, *arguments):
        def work():
            status = self.function(*arguments)
            assert not status, f"cuBLAS: status {status}"

        fake_cuda.current_stream().add(work)
        return 0


module = Functions()
module.cuda = types.SimpleNamespace(
    __spec__=importlib.machinery.ModuleSpec("cupy.cuda", None),
    Device=fake_cuda.Device,
    Event=fake_cuda.Event,
    Graph=fake_cuda.Graph,
    MemoryPool=fake_cuda_memory.MemoryPool,
    Stream=fake_cuda.Stream,
    alloc=fake_cuda_memory.allocate,
    alloc_pinned_memory=fake_cuda_memory.alloc_pinned_memory,
    get_current_stream=fake_cuda.current_stream,
    memory=types.SimpleNamespace(OutOfMemoryError=fake_cuda_memory.OutOfMemoryError),
    runtime=types.SimpleNamespace(
        CUDARuntimeError=fake_cuda.CUDARuntimeError,
        is_hip=False,
        getDevice=fake_cuda.current_device,
        getDeviceCount=lambda: fake_cuda.DEVICES,
        runtimeGetVersion=lambda: 13000,
        getDeviceProperties=lambda n: {"name": b"stand-in", "totalGlobalMem": 1 << 30},
        deviceCanAccessPeer=lambda a, b: True,
        deviceEnablePeerAccess=lambda n: None,
        deviceGetPCIBusId=lambda n: f"0000:0{n}:00.0",
        memcpyPeerAsync=fake_cuda_memory.memcpy_peer_async,
    ),
    using_allocator=fake_cuda_memory.using_allocator,
)
module.get_default_memory_pool = lambda: fake_cuda_memory.default_pool


@functools.cache
def _with_products():
    return CupyWithProducts(module, stand_in_cublas.library(OnStream))


@contextmanager
def installed():
    """Within it, `import cupy` finds the stand-in, and `cuda:0` and `cuda:1` are devices of the library."""
    others = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("cupy", "cupyx")}
    special = types.SimpleNamespace(erf=lambda x: module.queued(_erf, [x], {}))
    mine = {
        "cupy": module,
        "cupy.cuda": module.cuda,
        "cupyx": types.SimpleNamespace(),
        "cupyx.scipy": types.SimpleNamespace(special=special),
    }
    sys.modules.update(mine)
    found = {name: backends._found.pop(name) for name in list(backends._found) if name.startswith("cuda:")}
    with_products, cupy_backend._with_products = cupy_backend._with_products, _with_products
    try:
        yield module
    finally:
        cupy_backend._with_products = with_products
        for name in list(backends._found):
            if name.startswith("cuda:"):
                del backends._found[name]
        backends._found.update(found)
        for name in mine:
            del sys.modules[name]
        sys.modules.update(others)
