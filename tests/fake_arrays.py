"""Arrays of the stand-in for CuPy: `fake_cupy` has the functions, `fake_cuda` the streams."""

from __future__ import annotations

import fake_cuda
import fake_cuda_memory
import numpy as np
import stand_in
from fake_cuda import current_stream


class Flags:
    def __init__(self, array):
        self.c_contiguous = array.values.flags.c_contiguous
        self.f_contiguous = array.values.flags.f_contiguous
        self.owndata = array.base is None


class Array(stand_in.Array):
    """An array; `base` is the one that a view looks at."""

    def __init__(self, block, values, module, base=None):
        super().__init__(block, values, module)
        self.base = base

    flags = property(Flags)
    device = property(lambda self: fake_cuda.Device(self.block.device_id))

    @property
    def data(self):
        return fake_cuda_memory.MemoryPointer(self.block, self.values.ctypes.data - self.block.own if self.size else 0)

    def __len__(self):
        return len(self.values)

    def __bool__(self):
        return bool(self.get())

    def __iter__(self):
        return (self[n] for n in range(len(self)))

    def _like(self, values):
        return Array(self.block, values, self.module, self if self.base is None else self.base)

    def __getitem__(self, index):
        index = on_device(index, self.module)
        if not _has_array(index):
            found = self.values[index if isinstance(index, tuple) else (index,)]
            return self._like(np.asarray(found)) if isinstance(found, np.ndarray) else self._like(_element(self, index))
        if _has_mask(index):
            return self.module.new(self.module.waited(self)[_waited_for(index)])
        return self.module.queued(lambda x, at: x[at], [self, index], {})

    def __setitem__(self, index, value):
        index, value = on_device(index, self.module), checked(value)
        if isinstance(value, np.ndarray):
            raise TypeError("Unsupported type <class 'numpy.ndarray'>")
        at, source, target = memory_of(index), memory_of(value), self.values

        def write():
            target[at] = source

        current_stream().add(write)

    def reshape(self, *shape, order="C"):
        return self.module.reshape(self, shape[0] if len(shape) == 1 else shape, order=order)

    def transpose(self, *axes):
        return self._like(self.values.transpose(*axes))

    def ravel(self):
        return self.reshape(-1)

    flatten = ravel

    def copy(self, order="C"):
        return self.module.queued(np.copy, [self], {"order": "C"})

    def astype(self, dtype, copy=True, order="K"):
        if not copy and self.dtype == np.dtype(dtype):
            return self
        return self.module.queued(lambda x: x.astype(dtype), [self], {})

    def get(self, stream=None, order="C", out=None, blocking=True):
        fake_cuda.refuse_in_capture("the current stream is capturing, so D2H transfers are disallowed")
        (stream or current_stream()).synchronize()
        if out is None:
            return self.values.copy(order="C")
        out[...] = self.values
        return out

    def item(self, *at):
        return self.get().item(*at)

    real = property(lambda self: self._like(self.values.real), lambda self, x: self.real.fill(x))
    imag = property(
        lambda self: self._like(self.values.imag) if self.dtype.kind == "c" else self.module.zeros_like(self),
        lambda self, x: self.imag.fill(x),
    )


def _method(name):
    def method(self, *arguments, **options):
        return self.module.queued(lambda x, *a, **o: getattr(x, name)(*a, **o), [self, *arguments], options)

    return method


for _name in (
    "all",
    "any",
    "argmax",
    "argmin",
    "conj",
    "cumprod",
    "cumsum",
    "max",
    "mean",
    "min",
    "prod",
    "round",
    "sum",
):
    setattr(Array, _name, _method(_name))


def _element(array, index):
    """A view of one element, without dimensions."""
    ones = tuple(slice(None) if i is Ellipsis else slice(i, i + 1 or None) for i in _tuple(index))
    return array.values[ones].reshape(())


def _tuple(index):
    return index if isinstance(index, tuple) else (index,)


def _has_array(index):
    return any(isinstance(i, Array) for i in _tuple(index))


def _has_mask(index):
    return any(isinstance(i, Array) and i.dtype == bool for i in _tuple(index))


def _waited_for(index):
    current_stream().synchronize()
    return memory_of(index)


def on_device(index, module):
    """An index whose host arrays and lists are copied to the device, as CuPy does."""
    if isinstance(index, tuple):
        return tuple(on_device(i, module) for i in index)
    return module.asarray(np.asarray(index)) if isinstance(index, list | np.ndarray) else index


def memory_of(value):
    """What numpy reads when the turn comes: the memory of arrays, without holding on to it as an owner does."""
    if isinstance(value, Array):
        return value.values
    if isinstance(value, list | tuple):
        return type(value)(map(memory_of, value))
    return value


def checked(value):
    """Refuses arrays of the host, and those of a device that is not the current one."""
    if isinstance(value, np.ndarray):
        raise TypeError(f"Unsupported type {np.ndarray}")
    if isinstance(value, Array) and value.block.device_id != fake_cuda.current_device():
        raise ValueError(f"Array device must be same as the current device: array device = {value.block.device_id}")
    if isinstance(value, list | tuple):
        for one in value:
            checked(one)
    return value


def harmless(value):
    """In place of an array, to find the shape of a result: zeros, which are a valid index of anything."""
    if isinstance(value, Array):
        return np.zeros(value.shape, value.dtype)
    if isinstance(value, list | tuple):
        return type(value)(map(harmless, value))
    return value
