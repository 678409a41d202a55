"""Within `with group:` operands meet on the device that comes first in the group; elsewhere they do not meet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import DeviceError

X = np.arange(6.0).reshape(2, 3)


@pytest.fixture
def pair(stand_in_device: str) -> tuple[ft.Tensor, ft.Tensor]:
    return ft.asarray(X).realize(), ft.asarray(X).to(stand_in_device).realize()


@pytest.mark.parametrize("order", [("cpu", "plain:0"), ("plain:0", "cpu")])
def test_the_first_device_of_the_group_computes(
    pair: tuple[ft.Tensor, ft.Tensor], order: tuple[str, str], hops: Callable[..., Any]
) -> None:
    a, b = pair
    with fp.DeviceGroup(order):
        results = [a + b, b + a, ft.concat([a, b, a]), b @ a.mT, ft.where(a > 1, b, 0.0)]
    assert {t.device for t in results} == {order[0]}
    assert set(hops(*results)) == {order[::-1]}, "operands come to the first, and nothing else moves"
    np.testing.assert_array_equal(results[0].numpy(), 2 * X)
    np.testing.assert_array_equal(results[3].numpy(), X @ X.T)


def test_between_two_vendors_they_come_through_the_host(
    opencl: str, stand_in_device: str, hops: Callable[..., Any]
) -> None:
    a, b = ft.asarray(X).to(opencl).realize(), ft.asarray(X).to(stand_in_device).realize()
    with fp.DeviceGroup([stand_in_device, opencl]):
        assert hops(a * b) == [(opencl, "cpu"), ("cpu", stand_in_device)]


def test_gradients_go_back(pair: tuple[ft.Tensor, ft.Tensor]) -> None:
    a, b = pair
    with fp.DeviceGroup(["cpu", "plain:0"]):
        loss = ft.sum(a * b)
    for gradient, x in zip(ft.grad(loss, [a, b]), (a, b), strict=True):
        assert gradient.device == x.device
        np.testing.assert_array_equal(gradient.numpy(), X)


def test_only_inside_only_its_devices_and_only_this_thread(pair: tuple[ft.Tensor, ft.Tensor], abacus: str) -> None:
    a, b = pair
    c = ft.asarray(X).to(abacus)
    outer, inner = fp.DeviceGroup(["cpu", "plain:0"]), fp.DeviceGroup(["plain:0", "cpu", abacus])
    errors: list[str] = []

    def elsewhere() -> None:
        try:
            a + b
        except DeviceError as reason:
            errors.append(str(reason))

    with outer:
        with pytest.raises(DeviceError, match=r"add: operands are on abacus:0 and cpu; move .* or say `with group:`"):
            a + c
        with inner:
            assert [(a + b).device, (a + c).device, (b + c).device] == ["plain:0", "cpu", "plain:0"]
        with inner, outer:
            assert [(a + b).device, (a + c).device] == ["cpu", "cpu"], "the innermost that has both"
        assert (a + b).device == "cpu"
        with pytest.raises(ValueError, match="left"), inner:
            raise ValueError("left")
        assert (a + b).device == "cpu"
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert len(errors) == 1
    with pytest.raises(DeviceError, match="add: operands are on cpu and plain:0"):
        a + b
