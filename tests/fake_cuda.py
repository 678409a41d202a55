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
import threading
import weakref

import stand_in

DEVICES = 2
_handles = [ctypes.create_string_buffer(64) for _ in range(DEVICES)]
_state = threading.local()


class CUDARuntimeError(RuntimeError):
    def __init__(self, name, text):
        super().__init__(f"{name}: {text}")


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
