"""Each op's vjp is the derivative of its kernel: once, twice, and for complex numbers, against central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fuel_parallel.lazy as ft
from fuel_parallel.lazy.node import OPS

Array = np.ndarray[Any, Any]
STEP = 1e-5


def weights(count: int, seed: int) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, count)


def slope(function: Callable[[Array], float], x: Array) -> Array:
    """The gradient of a function of one array by central differences."""
    result = np.zeros(x.size)
    for i in range(x.size):
        ends = []
        for side in (-STEP, STEP):
            moved = x.copy().reshape(-1)
            moved[i] += side
            ends.append(function(moved.reshape(x.shape)))
        result[i] = (ends[1] - ends[0]) / (2 * STEP)
    return result.reshape(x.shape)


def projection(case: Any, inputs: list[Any]) -> ft.Tensor:
    """A scalar that depends on every element of the result, each with a weight of its own."""
    built = case.build(*(x if isinstance(x, ft.Tensor) else ft.asarray(x) for x in inputs))
    return ft.sum(built * ft.asarray(weights(built.size, 1).reshape(built.shape), device=built.device))


def gradient_norm(case: Any, inputs: list[Any]) -> ft.Tensor:
    """A scalar that depends on every element of the gradient."""
    tensors = [ft.asarray(x) for x in inputs]
    gradients = ft.grad(projection(case, tensors), [tensors[i] for i in case.reals])
    parts = [ft.sum(g * ft.asarray(weights(g.size, i).reshape(g.shape))) for i, g in enumerate(gradients)]
    return ft.sum(ft.stack(parts))


def agrees_with_differences(scalar: Callable[[Any, list[Any]], ft.Tensor], case: Any) -> None:
    tensors = [ft.asarray(x) for x in case.inputs]
    loss = scalar(case, tensors)
    found = ft.grad(loss, [tensors[i] for i in case.reals])
    for gradient, place in zip(found, case.reals, strict=True):

        def function(x: Array, place: int = place) -> float:
            inputs = list(case.inputs)
            inputs[place] = x
            return float(scalar(case, inputs))

        assert gradient.shape == case.inputs[place].shape
        assert gradient.dtype == case.inputs[place].dtype
        np.testing.assert_allclose(gradient.numpy(), slope(function, case.inputs[place]), rtol=2e-6, atol=2e-8)


def test_only_ops_on_pages_are_without_a_rule() -> None:
    assert {
        name for name, op in OPS.items() if op.vjp is None and op.infer.__module__.startswith("fuel_parallel.lazy")
    } == {"paged_attention", "write_pages", "copy_pages"}


def test_every_rule_has_a_floating_case(covered: dict[str, set[str]]) -> None:
    ours = {name for name, op in OPS.items() if op.vjp and op.infer.__module__.startswith("fuel_parallel.lazy")}
    assert ours <= covered["case"]


def test_gradient(differentiable: Any) -> None:
    agrees_with_differences(projection, differentiable)


def test_second_derivative(differentiable: Any) -> None:
    agrees_with_differences(gradient_norm, differentiable)


def test_gradient_on_another_device(differentiable: Any, other_device: str) -> None:
    here = [ft.asarray(x) for x in differentiable.inputs]
    there = [ft.to_device(x, other_device) for x in here]
    for place in differentiable.reals:
        built = ft.sum(differentiable.build(*there))
        assert ft.grad(built, there[place]).device == other_device
        wanted = ft.grad(ft.sum(differentiable.build(*here)), here[place])
        # Small values are fused there and not here, so sums may add up in another order.
        np.testing.assert_allclose(ft.grad(built, here[place]).numpy(), wanted.numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [ft.float16, ft.bfloat16, ft.float32], ids=lambda d: d.name)
def test_gradient_has_the_dtype_of_its_tensor(differentiable: Any, dtype: Any) -> None:
    inputs = [ft.asarray(x).astype(dtype) if x.dtype.kind == "f" else ft.asarray(x) for x in differentiable.inputs]
    wrt = [inputs[i] for i in differentiable.reals]
    found = ft.grad(ft.sum(differentiable.build(*inputs)), wrt)
    assert [g.dtype for g in found] == [dtype] * len(wrt)
    assert all(np.isfinite(g.numpy().astype(np.float64)).all() for g in found)


# Through complex numbers: the functions below lead from real x over complex z back to a real loss.

COMPLEX_FUNCTIONS: dict[str, Callable[[ft.Tensor], ft.Tensor]] = {
    "real": lambda z: ft.real(z * z),
    "imag": lambda z: ft.imag(z * z),
    "abs": lambda z: ft.abs(z),
    "conj": lambda z: ft.real(ft.conj(z) * z * z),
    "sign": lambda z: ft.real(ft.sign(z)) + 2 * ft.imag(ft.sign(z)),
    "exp": lambda z: ft.imag(ft.exp(z)),
    "divide": lambda z: ft.imag(1 / z),
    "pow": lambda z: ft.real(z**3),
    "matmul": lambda z: ft.imag(z @ (z * 1j).T),
    "vecdot": lambda z: ft.real(ft.vecdot(z, z * (1 + 1j))),
    "prod": lambda z: ft.abs(ft.prod(z, axis=0)),
    "where": lambda z: ft.real(ft.where(ft.real(z) > 0, z * z, z)),
    "mean": lambda z: ft.imag(ft.mean(z * z, axis=1)),
    "sqrt": lambda z: ft.imag(ft.sqrt(z)),
    "tanh": lambda z: ft.imag(ft.tanh(z)),
    "cholesky": lambda z: both_parts(ft.linalg.cholesky(hermitian(z))),
    "inv": lambda z: both_parts(ft.linalg.inv(square(z))),
    "solve": lambda z: both_parts(ft.linalg.solve(square(z), z)),
    "det": lambda z: both_parts(ft.linalg.det(square(z))),
    "slogdet": lambda z: both_parts(ft.linalg.slogdet(square(z)).sign) + ft.linalg.slogdet(square(z)).logabsdet,
    "eigh": lambda z: both_parts(function_of_hermitian(hermitian(z))),
    "eigvalsh": lambda z: ft.linalg.eigvalsh(hermitian(z)),
    "svd": lambda z: both_parts(function_of_singular(z)),
    "svd of tall": lambda z: both_parts(function_of_singular(z.mT)),
    "null space of svd": lambda z: both_parts(projector(ft.linalg.svd(z).Vh.mT[:, 2:])),
    "svdvals": lambda z: ft.linalg.svdvals(z),
    "qr": lambda z: both_parts(ft.concat(ft.linalg.qr(square(z)))),
    "qr of tall": lambda z: both_parts(ft.concat(ft.linalg.qr(z.mT))),
    "qr of wide": lambda z: both_parts(ft.concat(ft.linalg.qr(z), axis=1)),
    "null space of qr": lambda z: both_parts(projector(ft.linalg.qr(z.mT, mode="complete").Q[:, 2:])),
    "pinv": lambda z: both_parts(ft.linalg.pinv(z)),
    "fft": lambda z: both_parts(ft.fft.fft(z, norm="ortho")),
    "ifftn": lambda z: both_parts(ft.fft.ifftn(z)),
    "irfft": lambda z: ft.fft.irfft(z, n=4),
    "hfft": lambda z: ft.fft.hfft(z, n=5, norm="forward"),
}


def both_parts(z: ft.Tensor) -> ft.Tensor:
    return ft.real(z) + 2 * ft.imag(z)


def square(z: ft.Tensor) -> ft.Tensor:
    return z[:, :2] + ft.eye(2)


def hermitian(z: ft.Tensor) -> ft.Tensor:
    return z @ ft.conj(z.mT) + ft.eye(2)


def function_of_hermitian(x: ft.Tensor) -> ft.Tensor:
    """Of the whole matrix, so that the phases of the eigenvectors do not matter."""
    values, vectors = ft.linalg.eigh(x)
    return vectors * ft.sin(values) @ ft.conj(vectors.mT)


def function_of_singular(x: ft.Tensor) -> ft.Tensor:
    u, s, vh = ft.linalg.svd(x, full_matrices=False)
    return u * ft.sin(s) @ vh


def projector(columns: ft.Tensor) -> ft.Tensor:
    return columns @ ft.conj(columns.mT)


@pytest.mark.parametrize("name", COMPLEX_FUNCTIONS)
def test_gradient_through_complex_numbers(name: str) -> None:
    x = np.random.default_rng(3).uniform(0.3, 1.5, (2, 3))
    direction = np.exp(1j * np.arange(6)).reshape(2, 3)

    def loss(x: Any) -> ft.Tensor:
        z = ft.asarray(x).astype(ft.complex128) * ft.asarray(direction) + (0.3 - 0.7j)
        return ft.sum(COMPLEX_FUNCTIONS[name](z) ** 2)

    tensor = ft.asarray(x)
    np.testing.assert_allclose(ft.grad(loss(tensor), tensor).numpy(), slope(lambda x: float(loss(x)), x), rtol=1e-6)


# Compositions that are not ops of their own.

COMPOSITIONS: dict[str, Callable[..., ft.Tensor]] = {
    "var": lambda x: ft.var(x, axis=0, correction=1),
    "std": lambda x: ft.std(x, axis=1),
    "logsumexp": lambda x: ft.logsumexp(x, axis=1),
    "cross": lambda x: ft.linalg.cross(x, x[::-1] ** 2),
    "outer": lambda x: ft.linalg.outer(x[0], x[:, 1]),
    "trace": lambda x: ft.linalg.trace(x, offset=1) * ft.linalg.diagonal(x, offset=-1),
    "matrix_power": lambda x: ft.linalg.matrix_power(x[:3], 3) + ft.linalg.matrix_power(x[1:], -2),
    **{f"vector_norm {p}": lambda x, p=p: ft.linalg.vector_norm(x, ord=p, axis=1) for p in (1, 2, 3.5, ft.inf)},
    **{f"matrix_norm {p}": lambda x, p=p: ft.linalg.matrix_norm(x, ord=p) for p in ("fro", "nuc", 2, -2, 1, -ft.inf)},
    "x[mask]": lambda x: x[x > 0] ** 2,
    "unique_values": lambda x: ft.unique_values(x) ** 2,
    "rfftn": lambda x: ft.real(ft.fft.rfftn(x, s=(5, 3))) + ft.imag(ft.fft.rfftn(x, s=(5, 3))),
    "irfftn": lambda x: ft.fft.irfftn(x * (1 + 2j), axes=(1, 0)),
    "ihfft": lambda x: ft.imag(ft.fft.ihfft(x, axis=0)),
    "fftshift": lambda x: ft.fft.fftshift(x) * x,
    "clip": lambda x: ft.clip(x, -1.0, 1.0),
    "sort": lambda x: ft.sort(x, axis=0, descending=True),
    "topk": lambda x: ft.topk(x, 2)[0],
    "tensordot": lambda x: ft.tensordot(x, x, axes=((0,), (0,))),
    "einsum": lambda x: ft.einsum("ij,kj,k->i", x, x, x[:, 0]),
    "einsum of a diagonal": lambda x: ft.einsum("iij->j", ft.stack([x[:2], x[2:]])),
    "roll": lambda x: ft.roll(x, 1, axis=1) * x,
    "pad": lambda x: ft.pad(x, ((1, 0), (0, 2))),
    "tile": lambda x: ft.tile(x, (2, 1)),
    "repeat": lambda x: ft.repeat(x, 3, axis=1),
    "diff": lambda x: ft.diff(x, n=2),
    "take_along_axis": lambda x: ft.take_along_axis(x, ft.argsort(x, axis=1), axis=1),
    "cross_entropy": lambda x: ft.cross_entropy(x, ft.asarray([0, 2, 1, -1]), ignore_index=-1),
    "layer_norm": lambda x: ft.layer_norm(x, x[0], x[1]),
    "attention": lambda x: ft.scaled_dot_product_attention(x[None], x[None] * 2, x[None] ** 2, causal=True),
    "grouped attention": lambda x: ft.scaled_dot_product_attention(ft.stack([x, x**2]), x[None], ft.exp(x[None])),
    "masked attention": lambda x: ft.scaled_dot_product_attention(
        x[None], x[None], x[None], mask=ft.asarray(np.eye(4, dtype=bool) & (np.arange(4) != 2))
    ),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_gradient_of_a_composition(name: str) -> None:
    x = np.random.default_rng(5).permutation(np.linspace(-1.9, 2.1, 12)).reshape(4, 3)

    def loss(x: Any) -> ft.Tensor:
        result = COMPOSITIONS[name](ft.asarray(x))
        return ft.sum(result * ft.asarray(weights(result.size, 2).reshape(result.shape)))

    tensor = ft.asarray(x)
    np.testing.assert_allclose(
        ft.grad(loss(tensor), tensor).numpy(), slope(lambda x: float(loss(x)), x), rtol=1e-6, atol=1e-8
    )
