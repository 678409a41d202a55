"""Arrays of an OpenCL device, and the few functions of numpy that move and multiply them.

Arrays are contiguous buffers of a memory pool. All work of a device is queued in order, so a buffer that is let go may
be handed out again at once. Elementwise operations and reductions are no business of this module: they are generated,
see `RawModule`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyopencl as cl

from fuel_parallel.backends import opencl_kernels as sources

Shape = tuple[int, ...]
GROUP = 64
"""Work-items of a group, where the kernel does not ask for another number."""


class Array:
    """An array: a buffer that holds its elements in C order.

    One that is `turned` holds them with the last two dimensions exchanged, until something other than a product asks
    for its `buffer`: products read either order, and the gradients of products are products of turned operands.
    """

    def __init__(self, module: OpenClModule, buffer: Any, shape: Shape, dtype: Any, turned: bool = False) -> None:
        self.module, self.held, self.shape, self.turned = module, buffer, shape, turned
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    @property
    def buffer(self) -> Any:
        """The elements in C order; copied into it now, if the array is turned."""
        if self.turned:
            steps = _steps(_exchanged(self.shape))
            source = Array(self.module, self.held, self.shape, self.dtype)
            self.held = self.module.strided(source, self.shape, 0, _exchanged(steps)).held
            self.turned = False
        return self.held

    __hash__ = None  # type: ignore[assignment]
    flags = SimpleNamespace(c_contiguous=True)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * int(self.dtype.itemsize)

    def get(self) -> np.ndarray[Any, Any]:
        """The values on the host, when all that was queued before is done."""
        host = np.empty(self.shape, self.dtype)
        if host.nbytes:
            # As bytes: some dtypes have no buffer that others understand.
            cl.enqueue_copy(self.module.queue, host.reshape(-1).view(np.uint8), self.buffer, is_blocking=True)
        return host

    def reshape(self, *shape: Any) -> Array:
        """The same elements in another shape, in the same buffer."""
        wanted: Shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
        if -1 in wanted:
            known = -math.prod(wanted)
            wanted = tuple(self.size // known if extent == -1 else extent for extent in wanted)
        return Array(self.module, self.buffer, wanted, self.dtype)

    def transpose(self, axes: Sequence[int]) -> Array:
        """The dimensions in another order: copied, or turned if the last two change places."""
        if self.ndim > 1 and tuple(axes) == _exchanged(tuple(range(self.ndim))):
            return Array(self.module, self.held, _exchanged(self.shape), self.dtype, not self.turned)
        steps = _steps(self.shape)
        return self.module.strided(self, tuple(self.shape[a] for a in axes), 0, tuple(steps[a] for a in axes))

    def astype(self, dtype: Any, copy: bool = True) -> Array:
        """The same values in another floating dtype, rounded to even."""
        wanted = np.dtype(dtype)
        if wanted == self.dtype:
            return self
        result = self.module.empty(self.shape, wanted)
        run = self.module.kernel(sources.cast(self.dtype.name, wanted.name), "cast")
        self.module.launch(run, self.size, result.buffer, self.buffer, np.int64(self.size))
        return result

    def fill(self, value: int) -> None:
        """Sets all elements to 0."""
        if value:
            raise NotImplementedError("arrays are filled with zeros only")
        self.module.fill_bytes(self, 0)

    def __getitem__(self, keys: tuple[slice, ...]) -> Array:
        shape, start, steps = _window(self.shape, keys)
        return self.module.strided(self, shape, start, steps)

    def __setitem__(self, keys: tuple[slice, ...], value: Array) -> None:
        shape, start, steps = _window(self.shape, keys)
        value = self.module.broadcast_to(value, shape)
        self.module.copy(shape, self, start, steps, value, 0, _steps(shape))


class OpenClModule:
    """numpy's functions for the arrays of one device, as far as it has them; and CuPy's `RawModule`."""

    __name__ = "opencl"

    def __init__(self, device: Any) -> None:
        self.device = device
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context)
        self.pool = cl.tools.MemoryPool(cl.tools.ImmediateAllocator(self.queue))
        rounds = cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT & device.single_fp_config
        self.options = ["-cl-std=CL1.2", *(["-cl-fp32-correctly-rounded-divide-sqrt"] if rounds else [])]
        self.add = SimpleNamespace(at=self._add_at)
        self._programs: dict[str, Any] = {}
        self._kernels: dict[tuple[str, str], Any] = {}

    # Kernels.

    def program(self, source: str) -> Any:
        """A source, compiled once; pyopencl and the driver keep the result on disk."""
        found = self._programs.get(source)
        if found is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what a compiler says of code that it takes is of no use to the user
                found = self._programs[source] = cl.Program(self.context, source).build(options=self.options)
        return found

    def kernel(self, source: str, name: str) -> Any:
        """One kernel of a source."""
        found = self._kernels.get((source, name))
        if found is None:
            found = self._kernels[source, name] = cl.Kernel(self.program(source), name)
        return found

    def launch(self, kernel: Any, items: int, *arguments: Any) -> None:
        """Queues a kernel for at least so many work-items."""
        if items:
            kernel(self.queue, (-(-items // GROUP) * GROUP,), (GROUP,), *arguments)

    def RawModule(self, *, code: str, options: tuple[str, ...] = ()) -> _RawModule:
        """Generated kernels of a source, called as CuPy's are."""
        return _RawModule(self, code)

    # Memory.

    def empty(self, shape: Any, dtype: Any = np.float64) -> Array:
        """An array of no particular values."""
        extents = (shape,) if isinstance(shape, int) else tuple(shape)
        wanted = np.dtype(dtype)
        return Array(self, self.pool.allocate(max(1, math.prod(extents) * wanted.itemsize)), extents, wanted)

    def zeros(self, shape: Any, dtype: Any = np.float64) -> Array:
        """An array of zeros."""
        result = self.empty(shape, dtype)
        self.fill_bytes(result, 0)
        return result

    def fill_bytes(self, x: Array, byte: int) -> None:
        """Sets every byte of an array."""
        if x.nbytes:
            cl.enqueue_fill_buffer(self.queue, x.buffer, np.array([byte], np.uint8), 0, x.nbytes)

    def put(self, host: np.ndarray[Any, Any]) -> Array:
        """The values of a host array, which may be written as soon as this returns."""
        result = self.empty(host.shape, host.dtype)
        if host.nbytes:
            flat = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
            cl.enqueue_copy(self.queue, result.buffer, flat, is_blocking=True)
        return result

    def array(self, x: Array) -> Array:
        """A copy."""
        result = self.empty(x.shape, x.dtype)
        if x.nbytes:
            cl.enqueue_copy(self.queue, result.buffer, x.buffer, byte_count=x.nbytes)
        return result

    def asarray(self, x: Array | np.ndarray[Any, Any]) -> Array:
        """The array itself; the values of one of the host."""
        return x if isinstance(x, Array) else self.put(x)

    def ascontiguousarray(self, x: Array) -> Array:
        """The array itself."""
        return x

    # Functions that move elements.

    def copy(self, shape: Shape, out: Array, start: int, steps: Shape, x: Array, x_start: int, x_steps: Shape) -> None:
        """Copies a grid of elements; places are counted in elements from the beginning of each array."""
        if not shape:
            shape, steps, x_steps = (1,), (0,), (0,)
        run = self.kernel(sources.strided(x.dtype.itemsize, len(shape)), "strided")
        count = math.prod(shape)
        grid = [np.int64(n) for each in zip(shape, steps, x_steps, strict=True) for n in each]
        self.launch(run, count, out.buffer, np.int64(start), x.buffer, np.int64(x_start), np.int64(count), *grid)

    def strided(self, x: Array, shape: Shape, start: int, steps: Shape) -> Array:
        """The elements of `x` at a grid of places."""
        result = self.empty(shape, x.dtype)
        self.copy(shape, result, 0, _steps(shape), x, start, steps)
        return result

    def broadcast_to(self, x: Array, shape: Shape) -> Array:
        """numpy's, copied."""
        if x.shape == tuple(shape):
            return x
        extra = len(shape) - x.ndim
        steps = [0 if extent == 1 else step for extent, step in zip(x.shape, _steps(x.shape), strict=True)]
        return self.strided(x, tuple(shape), 0, (*[0] * extra, *steps))

    def concatenate(self, xs: Sequence[Array], axis: int) -> Array:
        """numpy's."""
        first = xs[0]
        extent = sum(x.shape[axis] for x in xs)
        result = self.empty((*first.shape[:axis], extent, *first.shape[axis + 1 :]), first.dtype)
        steps, at = _steps(result.shape), 0
        for x in xs:
            self.copy(x.shape, result, at * steps[axis], steps, x, 0, _steps(x.shape))
            at += x.shape[axis]
        return result

    def take(self, x: Array, indices: Array, axis: int) -> Array:
        """numpy's; an index out of bounds is an `IndexError`, for which the call waits until the kernel is done."""
        inner, extent = math.prod(x.shape[axis + 1 :]), x.shape[axis]
        result = self.empty((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype)
        outside = self.zeros((1,), np.int32)
        run = self.kernel(sources.take(x.dtype.itemsize, indices.dtype.name), "take")
        counts = [np.int64(n) for n in (result.size, inner, indices.size, extent)]
        self.launch(run, result.size, result.buffer, x.buffer, indices.buffer, outside.buffer, *counts)
        if outside.get()[0]:
            raise IndexError(f"an index is out of bounds for axis {axis} with size {extent}")
        return result

    def _add_at(self, out: Array, selector: tuple[Any, ...], values: Array) -> None:
        """numpy's `add.at` with one index array among whole slices: sums of equal indices in their order."""
        (axis,) = (d for d, key in enumerate(selector) if isinstance(key, Array))
        indices = selector[axis]
        inner, extent, count = math.prod(out.shape[axis + 1 :]), out.shape[axis], indices.size
        first, following = self.empty((extent,), np.int32), self.empty((count,), np.int32)
        self.fill_bytes(first, 0xFF)  # -1
        places = (first.buffer, following.buffer)
        run = self.kernel(sources.chain(indices.dtype.name), "chain")
        self.launch(run, count, *places, indices.buffer, np.int32(count), np.int64(extent))
        run = self.kernel(sources.add_rows(out.dtype.name), "add_rows")
        counts = [np.int64(n) for n in (out.size, inner, count, extent)]
        self.launch(run, out.size, out.buffer, values.buffer, *places, *counts)

    def cumsum(self, x: Array, axis: int) -> Array:
        """numpy's."""
        return self._scan(x, axis, "+")

    def cumprod(self, x: Array, axis: int) -> Array:
        """numpy's."""
        return self._scan(x, axis, "*")

    def _scan(self, x: Array, axis: int, sign: str) -> Array:
        wide = {"b": np.int64, "i": np.int64, "u": np.uint64}
        result = self.empty(x.shape, wide.get(x.dtype.kind, x.dtype))
        inner, extent = math.prod(x.shape[axis + 1 :]), x.shape[axis]
        lines = x.size // extent if extent else 0
        run = self.kernel(sources.scan(x.dtype.name, result.dtype.name, sign), "scan")
        self.launch(run, lines, result.buffer, x.buffer, np.int64(lines), np.int64(inner), np.int64(extent))
        return result

    # Products.

    def matmul(self, a: Array, b: Array) -> Array:
        """numpy's, for two dimensions or more."""
        (m, k), n = a.shape[-2:], b.shape[-1]
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (x if x.ndim == 2 else self.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
        if not k:
            return self.zeros((*batch, m, n), a.dtype)
        result = self.empty((*batch, m, n), a.dtype)
        if result.size:
            tile = sources.TILE
            run = self.kernel(sources.matmul(a.dtype.name), "matmul")
            grid = (-(-n // tile) * tile, -(-m // tile) * tile, math.prod(batch))
            steps = [np.int64(0 if x.ndim == 2 else x.shape[-2] * x.shape[-1]) for x in (a, b)]
            for x in (a, b):
                lines = (1, x.shape[-2]) if x.turned else (x.shape[-1], 1)
                steps += map(np.int64, lines)
            sizes = [np.int32(m), np.int32(n), np.int32(k)]
            run(self.queue, grid, (tile, tile, 1), result.buffer, a.held, b.held, *sizes, *steps)
        return result


class _RawModule:
    """A compiled source."""

    def __init__(self, module: OpenClModule, code: str) -> None:
        self.module, self.code = module, code
        module.program(code)

    def get_function(self, name: str) -> Any:
        """A kernel as a function of blocks, threads of a block, and arguments."""
        kernel, queue = self.module.kernel(self.code, name), self.module.queue

        def run(grid: tuple[int], block: tuple[int], arguments: Sequence[Any]) -> None:
            plain = [a.buffer if isinstance(a, Array) else a for a in arguments]
            kernel(queue, (grid[0] * block[0],), block, *plain)

        return run


def _steps(shape: Shape) -> Shape:
    """How many elements lie between neighbours along each dimension."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _exchanged(shape: Shape) -> Shape:
    """With the last two in each other's place."""
    return (*shape[:-2], shape[-1], shape[-2])


def _window(shape: Shape, keys: tuple[slice, ...]) -> tuple[Shape, int, Shape]:
    """Shape, first place and steps of a slice along every dimension."""
    ranges = [range(extent)[key] for extent, key in zip(shape, keys, strict=True)]
    steps = _steps(shape)
    start = sum(r.start * step for r, step in zip(ranges, steps, strict=True))
    return tuple(map(len, ranges)), start, tuple(r.step * step for r, step in zip(ranges, steps, strict=True))
