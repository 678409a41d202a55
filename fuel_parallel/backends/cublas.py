"""Matrix products on CUDA by cuBLAS itself, on CuPy's library, handles, streams and memory.

CuPy has products of its own, but copies transposed operands of a batch, leaves the math mode to the environment, and
refuses to compute while a stream is being captured. Here:

- Transposes and broadcast batches are flags and strides. What is copied is only what lies in no order at all.
- float32 and complex64 are multiplied as `matmul_precision` says: exactly, or in TF32. 16-bit floats are summed in
  float32, always, and rounded once.
- The result goes into given memory (`out`).
- A workspace of each device and stream is set aside once, and nothing else is allocated. `prepare` sets one aside for
  all that is captured on a device: graphs run one after the other, as they share the plans' memory too.

Integers, and extents above 2**31, are left to CuPy.
"""

from __future__ import annotations

import ctypes
import os
from types import ModuleType
from typing import Any

import numpy as np

from fuel_parallel.backends.gemm import Gemm, Unfit, gemm_of
from fuel_parallel.backends.precision import matmul_precision
from fuel_parallel.errors import DeviceError

# Of cublas_api.h and library_types.h.
_HOST_POINTERS, _NO_SMALLER_SUMS, _USUAL_ALGORITHM = 0, 16, -1
_COMPUTE_32F, _COMPUTE_32F_FAST_TF32, _COMPUTE_64F = 68, 77, 70
_TYPES: dict[str, tuple[int, int, type[np.generic]]] = {
    "float16": (2, _COMPUTE_32F, np.float32),
    "bfloat16": (14, _COMPUTE_32F, np.float32),
    "float32": (0, _COMPUTE_32F, np.float32),
    "float64": (1, _COMPUTE_64F, np.float64),
    "complex64": (4, _COMPUTE_32F, np.complex64),
    "complex128": (5, _COMPUTE_64F, np.complex128),
}
"""For each dtype its number, what it is computed in, and the type of the factors."""
_CAPTURED = -1
"""In place of a stream, for all that is captured on a device."""
_STATUS = {1: "not initialized", 3: "allocation failed", 7: "invalid value", 8: "the GPU is too old", 11: "GPU memory",
           13: "execution failed", 14: "internal error", 15: "not supported"}  # fmt: skip

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_SIGNATURES: dict[str, list[type]] = {
    "cublasSetStream_v2": [_POINTER, _POINTER],
    "cublasSetWorkspace_v2": [_POINTER, _POINTER, ctypes.c_size_t],
    "cublasSetPointerMode_v2": [_POINTER, _INT],
    "cublasSetMathMode": [_POINTER, _INT],
    "cublasGemmEx": [_POINTER, *[_INT] * 5, _POINTER, *[_POINTER, _INT, _INT] * 2, _POINTER, _POINTER, *[_INT] * 4],
    "cublasGemmStridedBatchedEx": [
        *[_POINTER, *[_INT] * 5, _POINTER, *[_POINTER, _INT, _INT, _LONG] * 2],
        *[_POINTER, _POINTER, _INT, _INT, _LONG, *[_INT] * 3],
    ],
}


class Cublas:
    """Products on arrays of a CuPy module. `library` is the loaded cuBLAS; found when it is first needed if None."""

    def __init__(self, cupy: Any, library: Any = None) -> None:
        self._cupy, self._library = cupy, library
        self._workspaces: dict[tuple[int, int], tuple[Any, int]] = {}
        self._factors = {name: (np.ones(1, kind), np.zeros(1, kind)) for name, (_, _, kind) in _TYPES.items()}
        if library is not None:
            _declare(library)

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """The product of the last two dimensions, broadcast over the others, as `numpy.matmul`; queued, not awaited.

        `out` must not share memory with an operand.
        """
        if not self.multiplies(a.dtype) or a.dtype != b.dtype or not a.ndim or not b.ndim:
            return self._cupy.matmul(a, b) if out is None else self._cupy.matmul(a, b, out=out)
        if a.ndim == 1 or b.ndim == 1:
            return self._with_a_vector(a, b, out)
        if out is None:
            batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2]) if a.ndim > 2 or b.ndim > 2 else ()
            out = self._cupy.empty((*batch, a.shape[-2], b.shape[-1]), dtype=a.dtype)
        elif out.dtype != a.dtype:
            out[...] = self.matmul(a, b)
            return out
        if not a.shape[-1]:
            out.fill(0)  # an empty sum
        elif out.size:
            self._product(a, b, out)
        return out

    def multiplies(self, dtype: Any) -> bool:
        """Whether products of a dtype are cuBLAS's, and not CuPy's."""
        return dtype.name in _TYPES

    def prepare(self) -> None:
        """Sets aside what products that are captured on the current device need."""
        self._library_and_handle()
        self._set_aside(self._cupy.cuda.runtime.getDevice(), _CAPTURED)

    def _with_a_vector(self, a: Any, b: Any, out: Any) -> Any:
        wide = self.matmul(a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b)
        narrow = wide[..., 0] if b.ndim == 1 else wide
        result = narrow[..., 0, :] if a.ndim == 1 and b.ndim > 1 else narrow[..., 0] if a.ndim == 1 else narrow
        if out is None:
            return result
        out[...] = result
        return out

    def _product(self, a: Any, b: Any, out: Any) -> None:
        gemm = gemm_of((a.shape, b.shape, out.shape), (a.strides, b.strides, out.strides), a.dtype.itemsize)
        if gemm is None:
            self._cupy.matmul(a, b, out=out)
        elif isinstance(gemm, Unfit):
            batch = out.shape[:-2]
            target = self._cupy.empty(out.shape, dtype=out.dtype) if gemm.out else out
            self._product(
                self._in_order(a, batch) if gemm.left else a, self._in_order(b, batch) if gemm.right else b, target
            )
            if gemm.out:
                out[...] = target
        else:
            self._run(gemm, a, b, out)

    def _in_order(self, x: Any, batch: tuple[int, ...]) -> Any:
        """A copy whose rows follow one another; of one that has that already, repeated over the whole batch."""
        if x.flags.c_contiguous:
            x = self._cupy.broadcast_to(x, (*batch, *x.shape[-2:]))
        return self._cupy.ascontiguousarray(x)

    def _run(self, gemm: Gemm, a: Any, b: Any, out: Any) -> None:
        cupy, dtype = self._cupy, a.dtype.name
        library, handle = self._library_and_handle()
        stream = cupy.cuda.get_current_stream()
        workspace, nbytes = self._workspace(cupy.cuda.runtime.getDevice(), stream)
        number, compute, _ = _TYPES[dtype]
        if dtype in ("float32", "complex64") and matmul_precision() == "high":
            compute = _COMPUTE_32F_FAST_TF32
        one, zero = (factor.ctypes.data for factor in self._factors[dtype])
        # The handle is CuPy's, too: what it was left with is unknown. A new stream takes the workspace away.
        _check(library.cublasSetStream_v2(handle, stream.ptr), "cublasSetStream")
        _check(library.cublasSetWorkspace_v2(handle, workspace.ptr, nbytes), "cublasSetWorkspace")
        _check(library.cublasSetPointerMode_v2(handle, _HOST_POINTERS), "cublasSetPointerMode")
        _check(library.cublasSetMathMode(handle, _NO_SMALLER_SUMS), "cublasSetMathMode")
        left, right, result = gemm.left, gemm.right, gemm.out
        flags = int(right.transposed), int(left.transposed), gemm.columns, gemm.rows, gemm.inner
        for to_left, to_right, to_out in gemm.starts:
            first, second, target = b.data.ptr + to_right, a.data.ptr + to_left, out.data.ptr + to_out
            if gemm.count == 1:
                status = library.cublasGemmEx(
                    *(handle, *flags, one, first, number, right.leading, second, number, left.leading),
                    *(zero, target, number, result.leading, compute, _USUAL_ALGORITHM),
                )
            else:
                status = library.cublasGemmStridedBatchedEx(
                    *(handle, *flags, one, first, number, right.leading, right.step),
                    *(second, number, left.leading, left.step, zero, target, number, result.leading, result.step),
                    *(gemm.count, compute, _USUAL_ALGORITHM),
                )
            _check(status, "cublasGemmEx" if gemm.count == 1 else "cublasGemmStridedBatchedEx")

    def _library_and_handle(self) -> tuple[Any, int]:
        """CuPy's handle, of this thread for the current device; with the first one the library is there."""
        try:
            handle = int(self._cupy.cuda.Device().cublas_handle)
            if self._library is None:
                major = self._cupy.cuda.runtime.runtimeGetVersion() // 1000
                # By the name that CuPy's own extension links to, and only if it is loaded already.
                self._library = ctypes.CDLL(f"libcublas.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                _declare(self._library)
        except (ImportError, OSError) as reason:
            raise DeviceError(
                f"cuBLAS, which multiplies matrices, is not there: {str(reason).splitlines()[0]}; install NVIDIA's "
                "CUDA toolkit, or pip install 'cupy-cuda13x[ctk]' (cupy-cuda12x[ctk] for CUDA 12)"
            ) from reason
        return self._library, handle

    def _workspace(self, device: int, stream: Any) -> tuple[Any, int]:
        """Memory for cuBLAS, of the size that NVIDIA recommends, and how large it is. Kept for good."""
        if stream.is_capturing():
            found = self._workspaces.get((device, _CAPTURED))
            if found is None:
                raise DeviceError(
                    f"cuda:{device}: nothing is set aside for matrix products that are captured; "
                    "call `prepare` before the capture begins"
                )
            return found
        return self._set_aside(device, stream.ptr)

    def _set_aside(self, device: int, stream: int) -> tuple[Any, int]:
        key = device, stream
        found = self._workspaces.get(key)
        if found is None:
            capability = int(self._cupy.cuda.Device(device).compute_capability)
            nbytes = (32 if capability >= 90 else 4) << 20
            found = self._workspaces[key] = self._cupy.cuda.alloc(nbytes), nbytes
        return found


class CupyWithProducts(ModuleType):
    """CuPy with `matmul` by `Cublas`; all else is CuPy's own."""

    sums_halves_in_float32 = True
    """Whether products of 16-bit floats are summed in float32 and rounded once; others need to be given float32."""

    def __init__(self, cupy: Any, library: Any = None) -> None:
        super().__init__("cupy")
        self.products = Cublas(cupy, library)
        self.matmul = self.products.matmul
        self._cupy = cupy

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._cupy, name)
        setattr(self, name, found)  # not searched for again
        return found


def _declare(library: Any) -> None:
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int


def _check(status: int, function: str) -> None:
    if status:
        raise RuntimeError(f"{function} of cuBLAS failed with status {status} ({_STATUS.get(status, 'unknown')})")
