"""The stand-in's arrays multiplied as on CUDA: by the library's calls of cuBLAS, which is a stand-in on host memory."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
import types
from pathlib import Path

import numpy as np
import stand_in

from fuel_parallel.backends.cublas import CupyWithProducts

SOURCE = Path(__file__).parent / "backends" / "cublas_on_host.cpp"
COMPILER = shutil.which("g++") or shutil.which("clang++")
NO_COMPILER = "no C++ compiler: neither g++ nor clang++ is installed"


class Seen(ctypes.Structure):
    """What the stand-in saw of the last product."""

    _fields_ = [
        ("stream", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_size_t),
        *[(name, ctypes.c_int) for name in ("math_mode", "compute", "batch", "products")],
        *[(name, ctypes.c_longlong) for name in ("stride_a", "stride_b", "stride_c")],
    ]


class InOrder:
    """A function of the library that runs when the current stream has come to it."""

    def __init__(self, function):
        self.__dict__["function"] = function

    def __setattr__(self, name, value):
        setattr(self.function, name, value)

    def __call__(self, *arguments):
        stand_in.current().synchronize()
        return self.function(*arguments)


@functools.cache
def library():
    """The stand-in for cuBLAS, compiled."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "libcublas.so")
        command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", path, SOURCE]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(path))
    names = ("cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasSetPointerMode_v2", "cublasSetMathMode")
    functions = {name: getattr(loaded, name) for name in names}
    products = {name: InOrder(getattr(loaded, name)) for name in ("cublasGemmEx", "cublasGemmStridedBatchedEx")}
    return types.SimpleNamespace(**functions, **products, seen=Seen.in_dll(loaded, "seen"))


class Cupy:
    """The names of CuPy that products use, on a stand-in's array module."""

    def __init__(self, module, capability="80"):
        self.module = module
        self.capturing = False
        self.copies = self.allocations = 0
        self.left_to_cupy = 0
        self._handle = ctypes.create_string_buffer(b"\xff" * 64, 64)  # a state that nobody promised
        self.cuda = types.SimpleNamespace(
            Device=lambda number=0: types.SimpleNamespace(
                cublas_handle=ctypes.addressof(self._handle), compute_capability=capability
            ),
            runtime=types.SimpleNamespace(getDevice=lambda: 0, runtimeGetVersion=lambda: 13000),
            get_current_stream=lambda: types.SimpleNamespace(
                ptr=stand_in.current().ptr, is_capturing=lambda: self.capturing
            ),
            alloc=self._alloc,
        )

    def _alloc(self, nbytes):
        self.allocations += 1
        memory = np.empty(nbytes + 256, np.uint8)
        return types.SimpleNamespace(ptr=-(-memory.ctypes.data // 256) * 256, memory=memory)

    def ascontiguousarray(self, x):
        self.copies += 1
        return self.module.ascontiguousarray(x)

    def matmul(self, *arguments, **options):
        self.left_to_cupy += 1
        return self.module.matmul(*arguments, **options)

    def __getattr__(self, name):
        return getattr(self.module, name)


class Backend(stand_in.StandInBackend):
    """A device that has TF32."""

    has_tf32 = True

    def __init__(self, memory):
        super().__init__(memory)
        self.inner, self.cupy = memory.array_module, Cupy(memory.array_module)
        self.array_module = CupyWithProducts(self.cupy, library())
        self.array_module.__name__ = "stand_in"  # it compiles no kernels

    def holds(self, array):
        return isinstance(array, stand_in.Array) and array.module is self.inner
