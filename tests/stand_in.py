"""A stand-in for a GPU: arrays in host memory that only `__cuda_array_interface__` shows, and streams that are lazy.

What is queued on a stream, copies and results of functions alike, is done only when somebody waits for it; until then
memory holds the bytes 0xAB, and what was freed 0xEE when the stream has come to that. So a transport that forgets to
wait, or lets go of memory too early, gets wrong values here as it would on a GPU.

`StandInMemory("plain:0")` has arrays at addresses that every MPI can read. Those of `StandInMemory("guarded:0")` are
like a GPU's to an MPI without CUDA: reading them there is a segmentation fault.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import types
from contextlib import contextmanager

import numpy as np

from fuel_parallel import backends
from fuel_parallel.backends.backend import Backend
from fuel_parallel.backends.device_memory import DeviceMemory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_lock = threading.RLock()
_current = threading.local()


class Event:
    def __init__(self, stream, place):
        self.stream, self.place = stream, place

    def synchronize(self):
        self.stream.run(self.place)


class Stream:
    """Work that waits until it is waited for."""

    _numbers = iter(range(1, 1 << 30))

    def __init__(self):
        self.ptr = next(self._numbers)
        self.queue, self.done = [], 0
        self.waits = 0

    def add(self, work):
        if _lock is None:  # a plan that is kept holds memory until the interpreter has let go of this module
            return
        with _lock:
            self.queue.append(work)

    def run(self, place):
        with _lock:
            while self.done < place:
                work = self.queue[0]
                del self.queue[0]
                self.done += 1
                work()

    def synchronize(self):
        self.waits += 1
        self.run(self.done + len(self.queue))

    def record(self):
        with _lock:
            return Event(self, self.done + len(self.queue))

    def wait_event(self, event):
        self.add(event.synchronize)


DEFAULT = Stream()


def current():
    return getattr(_current, "stream", DEFAULT)


class Block:
    """Bytes at two addresses: one for the stand-in itself, and one that it shows."""

    def __init__(self, nbytes, guarded):
        self.shown = 0
        self.stream = current()
        if guarded and nbytes:
            self.size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            file = os.memfd_create("stand-in")
            os.ftruncate(file, self.size)
            self.bytes = np.frombuffer(mmap.mmap(file, self.size), np.uint8)[:nbytes]
            self.shown = _libc.mmap(None, self.size, 0, mmap.MAP_SHARED, file, 0)  # PROT_NONE
            os.close(file)
        else:
            self.bytes = np.empty(nbytes, np.uint8)
        self.bytes[...] = 0xAB
        self.own = self.bytes.ctypes.data

    def __del__(self):
        """Memory that is let go of is used again when the stream that it was taken for comes to that."""
        if _lock is None:
            return  # the interpreter ends
        memory, shown, size = self.bytes, self.shown, getattr(self, "size", 0)

        def use_again():
            memory[...] = 0xEE
            if shown:
                _libc.munmap(shown, size)

        self.stream.add(use_again)


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the stand-in. It has no buffer and no `__array__`: nothing gets at the values by accident."""

    __array_priority__ = 100
    __hash__ = None

    def __init__(self, block, values, module):
        self.block, self.values, self.module = block, values, module

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)
    size = property(lambda self: self.values.size)
    ndim = property(lambda self: self.values.ndim)
    nbytes = property(lambda self: self.values.nbytes)
    itemsize = property(lambda self: self.values.itemsize)
    strides = property(lambda self: self.values.strides)
    flags = property(lambda self: self.values.flags)

    @property
    def ptr(self):
        offset = self.values.ctypes.data - self.block.own
        return (self.block.shown or self.block.own) + offset

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ptr)

    @property
    def __cuda_array_interface__(self):
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.ptr if self.size else 0, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "version": 3,
        }

    def __array__(self, *_, **__):
        raise TypeError("the stand-in's arrays do not become numpy's by themselves; use get()")

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return self.module.call(getattr(ufunc, method), inputs, options)

    def __len__(self):
        return len(self.values)

    def __bool__(self):
        return bool(plain(self))

    def _like(self, values):
        return Array(self.block, values, self.module)

    def __getitem__(self, index):
        index = places(index if isinstance(index, tuple) else (index, ...))
        found = self.values[index]
        shares = not found.size or np.may_share_memory(found, self.values)
        return self._like(found) if shares else self.module.new(plain(self)[index])

    def __setitem__(self, index, value):
        index, value = places(index), plain(value)
        value = value.copy() if isinstance(value, np.ndarray) else value
        target = self.values

        def write():
            target[index] = value

        current().add(write)

    def reshape(self, *shape):
        view = self.values.reshape(*shape)
        if view.size and not np.may_share_memory(view, self.values):
            return self.module.new(plain(self).reshape(*shape))
        return self._like(view)

    def view(self, dtype):
        return self._like(self.values.view(dtype))

    def swapaxes(self, first, second):
        return self._like(self.values.swapaxes(first, second))

    def transpose(self, *axes):
        return self._like(self.values.transpose(*axes))

    def max(self, **options):
        return self.module.new(plain(self).max(**options))

    def sum(self, **options):
        return self.module.new(plain(self).sum(**options))

    def copy(self):
        return self.module.new(plain(self))

    def astype(self, dtype, copy=True):
        return self.module.new(plain(self).astype(dtype))

    def get(self):
        return plain(self).copy()

    T = property(lambda self: self.transpose())
    real = property(lambda self: self._like(self.values.real), lambda self, x: self.real.fill(x))
    imag = property(lambda self: self._like(self.values.imag), lambda self, x: self.imag.fill(x))

    def tolist(self):
        return self.get().tolist()

    def fill(self, value):
        self[...] = value


def _by_numpy(name):
    def method(self, *arguments, **options):
        return self.module.new(getattr(plain(self), name)(*arguments, **options))

    return method


for _name in ("min", "mean", "any", "all", "argmax", "argmin", "conj"):
    setattr(Array, _name, _by_numpy(_name))


def places(index):
    """An index whose arrays are copies: an array of the stand-in may be let go of before the index is used."""
    if isinstance(index, tuple):
        return tuple(map(places, index))
    return index.get() if isinstance(index, Array) else index


def plain(value):
    """What numpy computes with: values as they are after all that was queued."""
    if isinstance(value, Array):
        current().synchronize()
        return value.values
    if isinstance(value, list | tuple):
        return type(value)(map(plain, value))
    return value


class ArrayModule:
    """numpy's functions for arrays of the stand-in."""

    ndarray = Array

    def __init__(self, guarded):
        self.guarded = guarded

    def room(self, shape, dtype):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64))
        block = Block(size * dtype.itemsize, self.guarded)
        return Array(block, block.bytes.view(dtype).reshape(shape), self)

    def new(self, values):
        """An array that has these values once the current stream comes to it."""
        values = np.array(values, order="C")
        array = self.room(values.shape, values.dtype)
        target = array.values

        def write():
            target[...] = values

        current().add(write)
        return array

    def empty(self, shape, dtype=float):
        return self.room(shape if isinstance(shape, tuple | list) else (shape,), dtype)

    def empty_like(self, x):
        return self.room(x.shape, x.dtype)

    def asarray(self, x):
        return x if isinstance(x, Array) else self.new(x)

    def ascontiguousarray(self, x):
        return x if x.flags.c_contiguous else self.new(plain(x))

    def add_at(self, out, index, value):
        total = plain(out).copy()
        np.add.at(total, plain(index), plain(value))
        out[...] = total

    def moveaxis(self, x, source, destination):
        return x._like(np.moveaxis(x.values, source, destination))

    def call(self, function, inputs, options):
        options = dict(options)
        out = options.pop("out", None)
        out = out[0] if isinstance(out, tuple) else out
        result = function(*plain(inputs), **{name: plain(value) for name, value in options.items()})
        if out is not None:
            out[...] = result
            return out
        if isinstance(result, tuple):
            return tuple(map(self.new, result))
        return self.new(result) if isinstance(result, np.ndarray | np.generic) else result

    def __getattr__(self, name):
        return self.of(np, name)

    def of(self, namespace, name):
        function = getattr(namespace, name)
        if isinstance(function, types.ModuleType):
            return Namespace(self, function)
        if isinstance(function, type) or not callable(function):
            return function

        def run(*inputs, **options):
            return self.call(function, inputs, options)

        run.at = self.add_at
        return run


class Namespace:
    """`linalg` and `fft`."""

    def __init__(self, module, namespace):
        self._module, self._namespace = module, namespace

    def __getattr__(self, name):
        return self._module.of(self._namespace, name)


class StandInMemory(DeviceMemory):
    def __init__(self, device="plain:0", nccl=None):
        self.device = device
        self.array_module = ArrayModule(device.startswith("guarded"))
        self._nccl = nccl
        self.pinned_bytes = 0

    def pinned(self, nbytes):
        self.pinned_bytes += nbytes
        return np.full(nbytes, 0xCD, np.uint8)

    def copy_to_host(self, host, array):
        assert host.nbytes == array.nbytes
        assert array.flags.c_contiguous
        target, source = host.reshape(-1).view(np.uint8), array.values.reshape(-1).view(np.uint8)

        def copy():
            target[...] = source

        current().add(copy)

    def copy_to_device(self, array, host):
        assert host.nbytes == array.nbytes
        assert array.flags.c_contiguous
        target, source = array.values.reshape(-1).view(np.uint8), host.reshape(-1).view(np.uint8)

        def copy():
            target[...] = source

        current().add(copy)

    def copy_from_peer(self, array, peer, source):
        assert isinstance(peer, StandInMemory)
        assert source.nbytes == array.nbytes
        target, values = array.values.reshape(-1).view(np.uint8), source.values.reshape(-1).view(np.uint8)

        def copy():
            target[...] = values

        current().add(copy)

    def stream(self):
        return current()

    def new_stream(self):
        return Stream()

    @contextmanager
    def running(self, stream):
        before = current()
        _current.stream = stream
        try:
            yield
        finally:
            _current.stream = before

    def address(self, array):
        return array.ptr

    def identity(self):
        return f"stand-in {os.getpid()}"

    def nccl(self):
        return self._nccl


class Guarded(StandInMemory):
    """By a name of its own, for the try in a process of its own."""

    def __init__(self, device="guarded:0"):
        super().__init__(device)


class StandInBackend(Backend):
    queues = True

    def __init__(self, memory):
        self.memory, self.array_module = memory, memory.array_module
        self.dlpack_device = (2, 0)

    def holds(self, array):
        return isinstance(array, Array) and array.module is self.array_module

    def to_host(self, array):
        return array.get()

    def from_host(self, array):
        return self.array_module.new(array)

    def owns(self, array):
        return self.holds(array) and array.nbytes == array.block.bytes.nbytes

    def settle(self, value):
        return self.array_module.ascontiguousarray(value)


class StreamedBackend(StandInBackend):
    """One whose work is queued on a stream of its own, as is that of each GPU."""

    def __init__(self, memory):
        super().__init__(memory)
        self.own = Stream()

    def running(self):
        return self.memory.running(self.own)

    def to_host(self, array):
        with self.running():
            return array.get()


@contextmanager
def installed(memory, backend=StandInBackend):
    """Within it, `memory.device` names a device of the library."""
    backends._found[memory.device] = backend(memory)
    try:
        yield memory
    finally:
        del backends._found[memory.device]
