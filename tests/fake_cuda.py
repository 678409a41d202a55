"""What `tests/fake_cupy.py` stands on: devices, streams that are lazy, captures, graphs, and pools of memory.

As in CUDA:

- What is queued on a stream is done when somebody waits for it. While a stream captures, it is noted instead, with the
  addresses that it works on, and a graph does it each time that it is launched.
- While a stream captures, waiting for it, and copies from or to host memory, are errors.
- A pool hands out memory that was let go on the same stream again, and keeps what it has; until then such memory holds
  0xEE, and new memory 0xAB. So a graph that works on memory which was let go meanwhile gets, or makes, wrong values.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import stand_in

DEVICES = 2
_handles = [ctypes.create_string_buffer(64) for _ in range(DEVICES)]
_state = threading.local()


class CUDARuntimeError(RuntimeError):
    def __init__(self, name, text):
        super().__init__(f"{name}: {text}")


class OutOfMemoryError(MemoryError):
    pass


# Devices and streams.


class Device:
    """A device; as a context it is this thread's current one."""

    def __init__(self, device=None):
        self.id = current_device() if device is None else int(device)
        self._before = []

    compute_capability = "90"

    @property
    def cublas_handle(self):
        return ctypes.addressof(_handles[self.id])

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None

    def use(self):
        _state.device = self.id

    def __enter__(self):
        self._before.append(current_device())
        self.use()
        return self

    def __exit__(self, *_):
        _state.device = self._before.pop()


def current_device():
    return getattr(_state, "device", 0)


class Event(stand_in.Event):
    """A place in a stream; `captured` is the stream that was capturing when it was recorded."""

    def __init__(self, stream=None, place=0, captured=None):
        super().__init__(stream, place)
        self.captured = captured

    @property
    def done(self):
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self):
        if self.captured:
            raise CUDARuntimeError("cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a")
        if self.stream is not None:
            super().synchronize()


class Stream(stand_in.Stream):
    """Work of one device that waits until it is waited for."""

    null = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None, device=None):
        super().__init__()
        self.device_id = current_device() if device is None else device
        self.is_null, self.non_blocking = null, non_blocking
        self.ptr = 0 if null else 1000 + self.ptr
        self.notes = None
        self.invalid = False
        if not null:
            _streams[self.ptr] = self

    def add(self, work):
        if self.notes is None:
            super().add(work)
        else:
            self.notes.append(work)

    def add_past_a_capture(self, work):
        """For what is no work of the stream: marks on memory."""
        super().add(work)

    def synchronize(self):
        if self.notes is not None:
            self.invalid = True
            raise CUDARuntimeError(
                "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"
            )
        super().synchronize()

    def record(self, event=None):
        place = super().record().place
        event = event or Event()
        event.stream, event.place, event.captured = self, place, self if self.notes is not None else None
        return event

    def wait_event(self, event):
        if self.notes is None:
            super().wait_event(event)
        elif event.captured is not self:
            self.invalid = True
            raise CUDARuntimeError("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work")

    def __enter__(self):
        if not self.is_null and self.device_id != current_device():
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current device "
                f"({current_device()})"
            )
        _stack().append((current_device(), current_stream()))
        _current()[current_device()] = self.on_device()
        return self

    def __exit__(self, *_):
        device, before = _stack().pop()
        _current()[device] = before

    def on_device(self):
        """`Stream.null` stands for that of the current device."""
        return _nulls[current_device()] if self.is_null else self

    def begin_capture(self, mode=None):
        if self.is_null:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self.notes is not None:
            raise CUDARuntimeError("cudaErrorIllegalState", "the operation cannot be performed in the present state")
        self.notes, self.invalid = [], False

    def end_capture(self):
        if self.notes is None:
            raise CUDARuntimeError("cudaErrorIllegalState", "the operation cannot be performed in the present state")
        notes, self.notes = self.notes, None
        if self.invalid:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error")
        return Graph(notes)

    def is_capturing(self):
        if self.notes is not None and self.invalid:
            raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
        return self.notes is not None


_streams = weakref.WeakValueDictionary()
_nulls = [Stream(null=True, device=number) for number in range(DEVICES)]
Stream.null = _nulls[0]


def _current():
    if not hasattr(_state, "current"):
        _state.current = list(_nulls)
    return _state.current


def _stack():
    if not hasattr(_state, "stack"):
        _state.stack = []
    return _state.stack


def current_stream(device=None):
    return _current()[current_device() if device is None else device]


def stream_at(ptr):
    return _streams[ptr] if ptr else _nulls[current_device()]


def refuse_in_capture(what, stream=None):
    """What CuPy itself does not let begin while the current stream captures."""
    if (stream or current_stream()).is_capturing():
        raise RuntimeError(what)


class Graph:
    """What was noted. `launched` counts."""

    made = 0

    def __init__(self, notes):
        self.notes = notes
        self.launched = 0
        Graph.made += 1

    def launch(self, stream=None):
        stream = (stream or current_stream()).on_device()
        self.launched += 1
        for work in self.notes:
            stream.add(work)


# Memory.


class Memory:
    """Bytes that a pool has taken from a device; `held` are those of all pools, and at most `most` if that is set."""

    held, most = 0, 0

    def __init__(self, size, device):
        raw = np.empty(size + 512, np.uint8)
        skip = -raw.ctypes.data % 512
        self.bytes, self.device = raw[skip : skip + size], device
        Memory.held += size

    def __del__(self):
        Memory.held -= self.bytes.nbytes


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
