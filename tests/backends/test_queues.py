"""Devices whose work is only queued: one thread keeps several busy, and nobody waits but for what is read.

The streams of the stand-ins do nothing until somebody waits for them, and memory that is let go is filled as soon as
its stream comes to that. So what is not waited for has wrong values here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import stand_in
from gpt_on_devices import OnDevices, train, windows
from tapped_devices import on_host
from train_gpt import Config

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel import backends
from fuel_parallel.runtime.graph import trace
from fuel_parallel.runtime.plan import make_plan

ROWS = np.arange(6.0).reshape(2, 3) / 7


@pytest.fixture(autouse=True)
def devices() -> Iterator[list[stand_in.StreamedBackend]]:
    with (
        stand_in.installed(stand_in.StandInMemory("plain:0"), stand_in.StreamedBackend),
        stand_in.installed(stand_in.StandInMemory("plain:1"), stand_in.StreamedBackend),
    ):
        yield [backends.backend_of(f"plain:{n}") for n in range(2)]


def on(device: str) -> ft.Tensor:
    return ft.asarray(ROWS).to(device).realize()


def drained(*devices: stand_in.StreamedBackend) -> None:
    for device in devices:
        device.own.synchronize()


def test_a_hop_waits_for_nobody(devices: list[stand_in.StreamedBackend]) -> None:
    x = on("plain:0")
    drained(*devices)
    waits, done = [d.own.waits for d in devices], [d.own.done for d in devices]
    y = x.to("plain:1").to("plain:0").to("plain:1").realize()
    assert [d.own.waits for d in devices] == waits
    assert [d.own.done for d in devices] == done
    assert y.tolist() == ROWS.tolist()


@pytest.mark.parametrize("first", [0, 1])
def test_a_hop_comes_after_what_makes_its_source_and_before_what_uses_the_memory_again(
    devices: list[stand_in.StreamedBackend], first: int
) -> None:
    for _ in range(5):
        x = on("plain:0")
        x = ft.concat([x, x])  # made by a kernel, and let go right after the hop
        y = x.to("plain:1").realize()
        del x
        drained(devices[first], devices[1 - first])
        assert y.tolist() == [*ROWS.tolist(), *ROWS.tolist()]


def test_the_host_computes_before_a_copy_to_it_has_arrived(devices: list[stand_in.StreamedBackend]) -> None:
    x, seen = on("plain:0"), []
    way_out = devices[0].depart(x.node.value)  # opens the stream of copies
    way_out.wait()
    stream = devices[0]._way_out
    assert stream is not None
    here = on_host(lambda: seen.append(len(stream.queue)))(on("cpu"))
    total = here + x.to("cpu")
    assert total.tolist() == (ROWS + 1 + ROWS).tolist()
    assert seen[0] > 0


def test_queues_are_filled_before_the_host_computes(devices: list[stand_in.StreamedBackend]) -> None:
    x, seen = on("cpu"), []
    drained(*devices)
    here = on_host(lambda: seen.append([len(d.own.queue) for d in devices]))(x)
    there = [x.to(f"plain:{n}") for n in range(2)]
    fp.realize(here, *there)
    assert all(count > 0 for count in seen[0])
    assert [t.tolist() for t in there] == [ROWS.tolist()] * 2


def test_the_source_of_a_copy_is_held_until_it_has_arrived(devices: list[stand_in.StreamedBackend]) -> None:
    x = on("plain:0")
    made = ft.concat([x, x])
    copied = made.to("cpu")
    more = ft.tanh(ft.tanh(ft.concat([x, x, x])))  # waits for the device's stream, and so lets memory be used again
    here = on_host(lambda: drained(*devices))(on("cpu"))
    del made
    fp.realize(more, here, copied)
    assert copied.tolist() == [*ROWS.tolist(), *ROWS.tolist()]


def test_a_write_in_place_comes_after_the_copy_of_what_was_there(devices: list[stand_in.StreamedBackend]) -> None:
    here = on_host(lambda: drained(devices[0]))(on("cpu"))
    first = on("plain:0") * 1
    first[0:1] = on("plain:0")[1:]
    copied = first.to("cpu") + 1
    first[1:] = on("plain:0")[:1]
    plan = make_plan(trace([t.node for t in (first, here, copied)])[0], ("overlap",))
    assert [step.op.name for step in plan.steps if step.updates] == ["slice_update"]
    fp.realize(first, here, copied)
    assert copied.tolist() == [(ROWS[1] + 1).tolist()] * 2
    assert first.tolist() == [ROWS[1].tolist(), ROWS[0].tolist()]


@pytest.mark.parametrize("shape", [(), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", [ft.float64, ft.bool, ft.int8])
def test_copies_of_any_shape_and_dtype_arrive(shape: tuple[int, ...], dtype: ft.DType) -> None:
    x = ft.ones(shape, dtype=dtype).to("plain:0").realize()
    here = on_host(lambda: None)(on("cpu"))
    copied = x.to("cpu")
    fp.realize(here, copied)
    assert (copied.shape, copied.dtype) == (shape, dtype)
    assert np.all(copied.numpy() == 1)


def test_two_devices_train_as_one(devices: list[stand_in.StreamedBackend]) -> None:
    config = Config(vocabulary=12, dim=16, layers=1, heads=4, context=6, dtype="float64")

    def losses(names: list[str]) -> list[float]:
        group = fp.DeviceGroup(names, algorithm="fold")
        return train(OnDevices(config, group), windows(np.arange(60) * 7 % 12, 6, 2, 2, 0), 0.5)

    assert losses(["plain:0", "plain:1"]) == losses(["cpu", "cpu"])
