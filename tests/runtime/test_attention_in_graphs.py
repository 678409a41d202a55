"""Attention is captured into a graph with what is around it; attention over pages is launched by what the host says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fake_cupy
import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.runtime import passes
from fuel_parallel.runtime.arena import arena_of
from fuel_parallel.runtime.plan import plans

DEVICE = "cuda:0"


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in; plans, arenas and graphs are gone afterwards, since they are the stand-in's. Nothing is fused."""
    monkeypatch.setenv(passes.VARIABLE, "-fusion")
    with fake_cupy.installed() as module:
        yield module
        plans._plans.clear()
        arena_of(DEVICE).release()


def captured() -> set[str]:
    """The ops of stretches that were launched as graphs."""
    stretches = [s for plan in plans._plans.values() if plan.captures is not None for s in plan.captures.stretches]
    return {step.op.name for s in stretches if s.graph is not None for step in s.steps}


def around(x: ft.Tensor) -> ft.Tensor:
    """Kernels enough for a graph."""
    for n in range(6):
        x = ft.permute_dims(ft.sin(x) + n, (1, 0, 2))
    return x


def test_attention_is_captured() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        values = rng.normal(size=(3, 2, 3, 4))
        found, wanted = [], []
        for device, results in ((DEVICE, found), ("cpu", wanted)):
            xs = [ft.asarray(v, device=device).realize() for v in values]
            y = ft.scaled_dot_product_attention(*[around(x) for x in xs], causal=True)
            results += [y, *ft.grad(ft.sum(y * y), xs)]
            fp.realize(results)
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-11, atol=1e-11)
    assert {"attention", "attention_backward"} <= captured()


def test_attention_over_pages_is_not() -> None:
    rng = np.random.default_rng(0)
    pages = rng.normal(size=(2, 6, 4, 2, 3))
    for length in (5, 9, 24, 3, 17):
        query = rng.normal(size=(2, 2, 3))
        where = [ft.asarray(x) for x in ([rng.permutation(6)], [length], [0, 2])]
        results = []
        for device in (DEVICE, "cpu"):
            q, k, v = (ft.asarray(x, device=device).realize() for x in (query, *pages))
            results.append(ft.paged_attention(around(q), k, v, *where).numpy())
        np.testing.assert_allclose(*results, rtol=1e-11, atol=1e-11)
    assert captured()
    assert "paged_attention" not in captured()
