"""Memory of the stand-in for CuPy: pools of the devices' memory, and pinned memory of the host. See `fake_cuda`."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from contextlib import contextmanager

import numpy as np
from fake_cuda import current_device, current_stream, refuse_in_capture, stream_at


class OutOfMemoryError(MemoryError):
    pass


class Memory:
    """Bytes that a pool has taken from a device; `held` are those of all pools, and at most `most` if that is set."""

    held, most = 0, 0

    def __init__(self, size, device):
        raw = np.empty(size + 512, np.uint8)
        skip = -raw.ctypes.data % 512
        self.bytes, self.device = raw[skip : skip + size], device
        Memory.held += size

    def __del__(self):
        type(self).held -= self.bytes.nbytes


class PooledMemory:
    """Bytes that a pool has handed out. It is a block of `stand_in.Array`, too."""

    shown = 0

    def __init__(self, pool, memory, size, stream):
        self.pool, self.memory, self.size, self.stream = pool, memory, size, stream
        self.bytes = memory.bytes
        self.own = self.ptr = memory.bytes.ctypes.data
        self.device_id = memory.device

    def __del__(self):
        pool = self.pool()
        if pool is not None and not sys.is_finalizing():
            pool.free(self)


class MemoryPool:
    """A pool for all devices. Memory goes back to the stream that was current when it was taken."""

    def __init__(self):
        self.free_blocks = {}
        self.total, self.used, self.limit = 0, 0, 0

    def malloc(self, size):
        stream, rounded = current_stream(), -(-size // 512) * 512
        found = self.free_blocks.get((stream.device_id, id(stream), rounded))
        if found:
            memory = found.pop()
        else:
            if self.limit and self.total + rounded > self.limit:
                self.free_all_blocks()
            if self.limit and self.total + rounded > self.limit:
                raise OutOfMemoryError(
                    f"Out of memory allocating {rounded:,} bytes (limit set to: {self.limit:,} bytes)"
                )
            if Memory.most and Memory.held + rounded > Memory.most:
                self.free_all_blocks()
            if Memory.most and Memory.held + rounded > Memory.most:
                raise OutOfMemoryError(f"Out of memory allocating {rounded:,} bytes")
            memory = Memory(rounded, current_device())
            memory.bytes[...] = 0xAB
            self.total += rounded
        self.used += rounded
        return MemoryPointer(PooledMemory(weakref.ref(self), memory, rounded, stream), 0)

    def free(self, pooled):
        stream, memory = pooled.stream, pooled.memory
        self.used -= pooled.size
        if stream.notes is None:
            stream.add_past_a_capture(lambda: memory.bytes.fill(0xEE))
        self.free_blocks.setdefault((stream.device_id, id(stream), pooled.size), []).append(memory)

    def free_all_blocks(self, stream=None):
        self.total -= sum(size * len(found) for (_, _, size), found in self.free_blocks.items())
        self.free_blocks.clear()

    def used_bytes(self):
        return self.used

    def total_bytes(self):
        return self.total

    def free_bytes(self):
        return self.total - self.used

    def set_limit(self, size=0):
        self.limit = size


default_pool = MemoryPool()
_state = threading.local()


def allocate(size):
    return (getattr(_state, "allocator", None) or default_pool.malloc)(size)


@contextmanager
def using_allocator(allocator=None):
    before = getattr(_state, "allocator", None)
    _state.allocator = allocator
    try:
        yield
    finally:
        _state.allocator = before


class MemoryPointer:
    """A place in memory of a device."""

    def __init__(self, mem, offset):
        self.mem, self.offset = mem, offset
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.offset + offset)

    def _bytes(self, size):
        return self.mem.bytes[self.offset : self.offset + size]

    def copy_to_host_async(self, host, size, stream=None):
        stream = (stream or current_stream()).on_device()
        refuse_in_capture("the current stream is capturing, so D2H transfers are disallowed", stream)
        _copy(stream, _at(host, size), self._bytes(size))

    def copy_from_host_async(self, host, size, stream=None):
        stream = (stream or current_stream()).on_device()
        refuse_in_capture("the current stream is capturing, so H2D transfers are disallowed", stream)
        _copy(stream, self._bytes(size), _at(host, size))

    def copy_from_device_async(self, source, size, stream=None):
        _copy((stream or current_stream()).on_device(), self._bytes(size), source._bytes(size))


def _copy(stream, target, source):
    def copy():
        target[...] = source

    stream.add(copy)


_pinned = weakref.WeakValueDictionary()


def alloc_pinned_memory(size):
    refuse_in_capture("cudaHostAlloc is not permitted when stream is capturing")
    made = (ctypes.c_ubyte * size)()
    memory = np.frombuffer(made, np.uint8)
    memory[...] = 0xCD
    _pinned[memory.ctypes.data] = made
    return made


def _at(host, size):
    """The bytes at a host address, in pinned memory: its owner keeps them."""
    address = host.value if isinstance(host, ctypes.c_void_p) else int(host)
    for start, made in list(_pinned.items()):
        if start <= address and address + size <= start + len(made):
            return np.frombuffer(made, np.uint8)[address - start : address - start + size]
    raise AssertionError("an asynchronous copy from or to pageable host memory")


def memcpy_peer_async(target, target_device, source, source_device, size, stream):
    into, out_of = (ctypes.c_ubyte * size).from_address(target), (ctypes.c_ubyte * size).from_address(source)
    _copy(stream_at(stream), np.frombuffer(into, np.uint8), np.frombuffer(out_of, np.uint8))
