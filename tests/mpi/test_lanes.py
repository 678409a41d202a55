"""Collectives between the steps of several devices: in the order of the script on every rank, by one thread."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from tapped_devices import abaci

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.runtime import execute

ROUNDS = 6


def step(world, size):
    """What two devices compute is summed over the ranks, each sum goes to the other device, and the host works on."""
    here = ft.asarray(np.linspace(0, 1, size)) * (world.rank + 1)
    xs = [here.to(f"abacus:{n}") for n in range(2)]
    totals = []
    for turn in range(ROUNDS):
        n = turn % 2
        total = world.all_reduce(ft.tanh(xs[n]).to("cpu"))
        xs[1 - n] = xs[1 - n] + total.to(f"abacus:{1 - n}")
        here = ft.exp(-here)
        totals.append(total)
    fp.realize(totals, xs, here)
    return [t.numpy() for t in (*totals, *xs, here)]


@pytest.mark.mpi
@pytest.mark.parametrize("size", [64, 10_000])  # the larger ones go on while others compute
def test_the_order_on_the_wire_is_that_of_the_script(monkeypatch, size):
    world = fp.init()
    begun = []
    compute = execute._Run._compute

    def noted(run, step, xp, arguments):
        if step.op.crosses_ranks:
            begun.append((step.origin, threading.current_thread()))
        return compute(run, step, xp, arguments)

    def slow(number):
        # On each rank another device is late.
        return lambda: time.sleep(0.002 if world.rank % 2 == number else 0)

    with abaci(slow(0), slow(1)):
        monkeypatch.setattr(execute._Run, "_compute", noted)
        found = step(world, size)
        monkeypatch.setattr(execute._Run, "_compute", compute)
        monkeypatch.setenv("FUEL_PASSES", "-overlap")
        wanted = step(world, size)
    for value, alone in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(value, alone)
    rounds = ROUNDS if world.world_size > 1 else 0  # alone there is nothing to be done
    assert [thread for _, thread in begun] == [threading.current_thread()] * rounds
    assert [origin for origin, _ in begun] == sorted(origin for origin, _ in begun)


@pytest.mark.mpi
def test_a_device_that_fails_on_all_ranks_is_told_on_all_ranks():
    world = fp.init()

    def fail():
        raise ArithmeticError("no beads")

    with abaci(fail, lambda: None):
        x = ft.asarray(np.ones(4))
        broken = ft.tanh(x.to("abacus:0")).to("cpu")
        total = world.all_reduce(ft.tanh(x.to("abacus:1")).to("cpu"))
        with pytest.raises(fp.errors.RealizeError, match=r"tanh.*no beads"):
            fp.realize(total, broken)
        assert world.all_reduce(x).tolist() == [world.world_size] * 4
