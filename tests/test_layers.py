"""Layers against plain numpy, and where their weights start."""

from __future__ import annotations

import numpy as np
import pytest

import fuel_parallel as fp
import fuel_parallel.lazy as ft
from fuel_parallel.errors import ShapeError


def generator() -> ft.random.Generator:
    return ft.random.Generator(3)


X = np.random.default_rng(0).normal(size=(2, 5, 4))


def test_linear_is_x_times_weight_plus_bias() -> None:
    layer = fp.Linear(4, 3, generator(), dtype=ft.float64)
    layer.bias = fp.Parameter(ft.asarray(np.array([1.0, 2.0, 3.0])))
    expected = X @ layer.weight.numpy() + [1.0, 2.0, 3.0]
    np.testing.assert_allclose(layer(ft.asarray(X)).numpy(), expected, rtol=1e-14)


def test_linear_starts_within_one_over_the_root_of_its_inputs_and_with_no_bias() -> None:
    layer = fp.Linear(400, 50, generator())
    weight = layer.weight.numpy()
    assert (weight.shape, weight.dtype.name) == ((400, 50), "float32")
    assert 0.049 < np.abs(weight).max() <= 0.05
    assert abs(weight.mean()) < 0.001
    assert layer.bias is not None
    assert not layer.bias.numpy().any()


def test_linear_without_bias_has_one_parameter() -> None:
    layer = fp.Linear(4, 3, generator(), bias=False)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


def test_linear_names_shapes_that_do_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 5\) and \(4, 3\)"):
        fp.Linear(4, 3, generator())(ft.ones((2, 5)))


def test_embedding_looks_rows_up() -> None:
    layer = fp.Embedding(7, 4, generator())
    indices = np.array([[0, 6], [3, 3]])
    np.testing.assert_array_equal(layer(ft.asarray(indices)).numpy(), layer.weight.numpy()[indices])


def test_embedding_starts_normal_with_the_deviation_that_was_given() -> None:
    weight = fp.Embedding(300, 40, generator(), std=0.5).weight.numpy()
    assert weight.std() == pytest.approx(0.5, rel=0.02)


def test_the_gradient_of_an_embedding_adds_up_over_repeated_rows() -> None:
    layer = fp.Embedding(4, 2, generator())
    gradient = ft.grad(layer(ft.asarray([1, 1, 3])).sum(), layer.weight)
    assert gradient.tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


def test_layer_norm_has_mean_0_and_variance_1_before_scale_and_shift() -> None:
    layer = fp.LayerNorm(4, dtype=ft.float64)
    layer.load({"weight": [1.0, 2.0, 3.0, 4.0], "bias": [0.5, 0.0, 0.0, -0.5]})
    normed = (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + 1e-5)
    expected = normed * [1.0, 2.0, 3.0, 4.0] + [0.5, 0.0, 0.0, -0.5]
    np.testing.assert_allclose(layer(ft.asarray(X)).numpy(), expected, rtol=1e-12)


def test_rms_norm_has_mean_square_1_before_its_scale() -> None:
    layer = fp.RMSNorm(4, dtype=ft.float64)
    layer.load({"weight": [1.0, 2.0, 3.0, 4.0]})
    expected = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6) * [1.0, 2.0, 3.0, 4.0]
    np.testing.assert_allclose(layer(ft.asarray(X)).numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("layer", [fp.LayerNorm(4), fp.RMSNorm(4)], ids=lambda layer: type(layer).__name__)
def test_a_norm_names_the_shape_that_its_weight_does_not_have(layer: fp.Module) -> None:
    with pytest.raises(ShapeError, match=r"weight must have shape \(3,\)"):
        layer(ft.ones((2, 3)))


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = (fp.Linear(4, 3, generator()).weight.numpy() for _ in range(2))
    np.testing.assert_array_equal(first, second)
