"""Devices and an op that call a function whenever they compute, so that a test can see, hold or break them."""

from __future__ import annotations

import threading

import third_party
from random_devices import installed

import fuel_parallel.lazy as ft
from fuel_parallel.lazy.node import Op, apply

SECONDS = 20  # until a test that would hang fails


def nothing():
    pass


class TappedCalculator(third_party.Calculator):
    """Calls `tap` in each tanh, before it computes, and notes the threads."""

    def __init__(self, tap):
        super().__init__()
        self.tap, self.threads, self.computed = tap, set(), 0

    def tanh(self, x):
        self.threads.add(threading.current_thread().name)
        self.tap()
        self.computed += 1
        return super().tanh(x)


class TappedAbacus(third_party.Abacus):
    """A device whose tanh calls `tap`, and whose copies to the host call `tap_copy`."""

    def __init__(self, number, tap=nothing, tap_copy=nothing):
        super().__init__(number)
        self.array_module, self.tap_copy = TappedCalculator(tap), tap_copy

    def to_host(self, array):
        self.tap_copy()
        return super().to_host(array)


def abaci(*taps):
    """Within it, `abacus:0`, `abacus:1` ... are devices with these taps."""
    return installed(*((f"abacus:{n}", TappedAbacus(n, tap)) for n, tap in enumerate(taps)))


def on_host(tap):
    """A function of a tensor of the host that adds 1 and calls `tap` when it is computed."""

    def kernel(xp, x):
        tap()
        return x + 1

    op = Op("tapped", infer=lambda x: x, kernel=kernel)
    return lambda x: ft.Tensor(apply(op, (x.node,)))


def meeting(parties):
    """A tap that returns only when so many are in it at a time."""
    barrier = threading.Barrier(parties)
    return lambda: barrier.wait(SECONDS)


def chain(x, length):
    for _ in range(length):
        x = ft.tanh(x)
    return x
