"""Collectives over the devices of one process, and the hops that their plans show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpt_on_devices import OnDevices, train, windows
from train_gpt import Config

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ArgumentError, DeviceError, DTypeError, FuelError, ShapeError
from fuel_parallel.partitioning import partition

ROWS = np.arange(10.0).reshape(5, 2) - 3.3


def shards_on(group: fp.DeviceGroup, *values: Any) -> list[ft.Tensor]:
    return [ft.asarray(v).to(d).realize() for v, d in zip(values, group.devices, strict=True)]


@pytest.fixture(
    params=[("cpu", "cpu", "cpu"), ("cpu", "opencl:0"), ("opencl:0", "cpu", "opencl:0"), ("plain:0", "opencl:0")]
)
def group(request: pytest.FixtureRequest, opencl: str, stand_in_device: str) -> fp.DeviceGroup:
    return fp.DeviceGroup(request.param)


@pytest.mark.parametrize("op", list(fp.ReduceOp))
def test_a_reduction_is_that_of_the_whole(group: fp.DeviceGroup, op: fp.ReduceOp) -> None:
    values = [ROWS + 0.7 * n for n in range(group.size)]
    combine = {"sum": np.sum, "product": np.prod, "min": np.min, "max": np.max, "avg": np.mean}[op.value]
    wanted = combine(np.stack(values), axis=0)
    one = group.all_reduce(shards_on(group, *values), op)
    assert one.device == group.leader
    np.testing.assert_allclose(one.numpy(), wanted)
    each = group.all_reduce(shards_on(group, *values), op, to="all")
    assert tuple(t.device for t in each) == group.devices
    for t in each:
        np.testing.assert_allclose(t.numpy(), wanted)
    parts = group.reduce_scatter(shards_on(group, *values), op)
    assert tuple(t.device for t in parts) == group.devices
    for t, part in zip(parts, partition(5, group.size), strict=True):
        np.testing.assert_allclose(t.numpy(), wanted[part.start : part.stop])


def test_parts_are_put_in_place_and_gathered_again(group: fp.DeviceGroup) -> None:
    for dim in (0, 1, -1):
        parts = group.place(ft.asarray(ROWS), dim)
        assert tuple(t.device for t in parts) == group.devices
        assert group.all_gather(parts, dim).tolist() == ROWS.tolist()
        assert [t.tolist() for t in group.all_gather(parts, dim, to="all")] == [ROWS.tolist()] * group.size


def test_a_broadcast_is_the_same_everywhere(group: fp.DeviceGroup) -> None:
    each = group.broadcast(ft.asarray(ROWS).to(group.devices[-1]))
    assert [t.device for t in each] == list(group.devices)
    assert all(t.tolist() == ROWS.tolist() for t in each)


def test_bools_are_combined_as_by_ranks() -> None:
    group = fp.DeviceGroup(["cpu", "cpu"])
    shards = shards_on(group, np.array([True, True, False]), np.array([True, False, False]))
    assert group.all_reduce(shards).tolist() == [True, True, False]
    assert group.all_reduce(shards, fp.ReduceOp.PRODUCT).tolist() == [True, False, False]


def test_gradients_go_back_over_the_hops(group: fp.DeviceGroup) -> None:
    shards = shards_on(group, *[ROWS] * group.size)
    loss = ft.sum(ft.square(group.all_reduce(shards)))
    for gradient, device in zip(ft.grad(loss, shards), group.devices, strict=True):
        assert gradient.device == device
        np.testing.assert_allclose(gradient.numpy(), 2 * group.size * ROWS)


@pytest.mark.parametrize(("first", "second"), [("cpu", "opencl:0"), ("opencl:0", "cpu")])
def test_with_the_host_at_one_end_a_hop_is_one_copy(
    opencl: str, first: str, second: str, hops: Callable[..., Any]
) -> None:
    group = fp.DeviceGroup([first, second])
    shards = shards_on(group, ROWS, ROWS)
    assert hops(group.all_reduce(shards)) == [(second, first)]
    assert hops(*group.all_reduce(shards, to="all")) == [(second, first), (first, second)]


def test_between_two_vendors_a_hop_goes_through_the_host(
    opencl: str, stand_in_device: str, hops: Callable[..., Any]
) -> None:
    group = fp.DeviceGroup([stand_in_device, opencl])
    shards = shards_on(group, ROWS, ROWS)
    there, back = [(opencl, "cpu"), ("cpu", stand_in_device)], [(stand_in_device, "cpu"), ("cpu", opencl)]
    assert hops(*group.all_reduce(shards, to="all")) == there + back


def test_within_one_vendor_a_hop_is_direct(monkeypatch: pytest.MonkeyPatch, hops: Callable[..., Any]) -> None:
    import stand_in

    memories = [stand_in.StandInMemory(f"plain:{n}") for n in range(2)]
    with stand_in.installed(memories[0]), stand_in.installed(memories[1]):
        group = fp.DeviceGroup(["plain:0", "plain:1"])
        shards = shards_on(group, ROWS, ROWS)
        total = group.all_reduce(shards)
        assert hops(total) == [("plain:1", "plain:0")]
        monkeypatch.setattr(stand_in.Array, "get", lambda _: pytest.fail("went through the host"))
        total.realize()
        monkeypatch.undo()
        np.testing.assert_allclose(total.numpy(), 2 * ROWS)


PAIR = ("cpu", "cpu")
MISTAKES: list[tuple[Any, type[FuelError], str]] = [
    (lambda g, x: g.all_reduce([x, x, x]), ArgumentError, "3 shards for the 2 devices of DeviceGroup"),
    (lambda g, x: g.all_reduce([]), ArgumentError, "0 shards for the 2 devices"),
    (lambda g, x: g.all_reduce([x, x[:2]]), ShapeError, r"shard 1 has shape \(2, 2\), but shard 0 has \(5, 2\)"),
    (lambda g, x: g.reduce_scatter([x, x[:2]]), ShapeError, "shard 1 has shape"),
    (lambda g, x: g.all_gather([x, x[0]]), ShapeError, "concat"),
    (lambda g, x: g.all_gather([x, x.astype(ft.float32)]), DTypeError, "shard 1 is float32, but shard 0 is float64"),
    (lambda g, x: g.all_reduce([x, ROWS]), ArgumentError, "shard 1 is a ndarray; make it a tensor"),
    (lambda g, x: g.all_reduce([x, x.to("abacus:0")]), DeviceError, r"shard 1 is on abacus:0, but device 1 .* is cpu"),
    (lambda g, x: g.all_reduce([x, x], to="some"), ArgumentError, "to is 'leader' or 'all', not 'some'"),
    (lambda g, x: g.all_reduce([x, x], "sum"), ArgumentError, "expected one of ReduceOp.SUM"),
    (lambda g, x: g.all_reduce([x > 0, x > 0], fp.ReduceOp.AVG), DTypeError, "average of bool"),
    (lambda g, x: g.place(x, 2), ShapeError, r"dim 2 is out of bounds for shape \(5, 2\)"),
    (lambda g, x: fp.DeviceGroup([]), ArgumentError, "one device or more"),
    (lambda g, x: fp.DeviceGroup("cpu"), ArgumentError, "devices is a list"),
    (lambda g, x: fp.DeviceGroup(["cpu", "gpu:0"]), DeviceError, "unknown device 'gpu:0'"),
]


@pytest.mark.parametrize(("make", "error", "text"), MISTAKES)
def test_mistakes_are_named(make: Any, error: type[FuelError], text: str) -> None:
    with pytest.raises(error, match=text):
        make(fp.DeviceGroup(PAIR), ft.asarray(ROWS))


def test_a_gpt_learns_the_same_on_any_devices(opencl: str) -> None:
    config = Config(vocabulary=12, dim=16, layers=1, heads=4, context=6, dtype="float64")
    text = np.arange(60) * 7 % 12

    def losses(group: fp.DeviceGroup) -> list[float]:
        return train(OnDevices(config, group), windows(text, 6, 2, 3, 0), 0.5)

    alone = losses(fp.DeviceGroup(["cpu"]))
    for algorithm in ("auto", "parts"):
        group = fp.DeviceGroup(["cpu", opencl], algorithm=algorithm)  # type: ignore[arg-type]
        assert losses(group) == pytest.approx(alone, rel=1e-10)
