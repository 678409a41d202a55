"""One table of cases for all ops: what is built, and what numpy says it is.

A test that asks for `case` runs once for each entry, one that asks for `differentiable` once for each whose op has
a vjp. Inputs lie away from kinks and poles, so that one entry serves values, dtypes, gradients and second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import special

import fuel_parallel.lazy as ft
from fuel_parallel.lazy.node import OPS, apply
from fuel_parallel.lazy.ops import neural
from fuel_parallel.lazy.ops.call import call

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Case:
    """`build` on tensors gives what `oracle` gives on arrays, by a graph that holds the op."""

    op: str
    build: Callable[..., Any]
    oracle: Callable[..., Any]
    inputs: tuple[Array, ...]

    @property
    def reals(self) -> list[int]:
        """Which inputs are floating, so that a gradient can be asked for."""
        return [i for i, x in enumerate(self.inputs) if x.dtype.kind == "f"]


def three_of(x: ft.Tensor, y: ft.Tensor, factor: float) -> tuple[ft.Tensor, ...]:
    """A function to call: its second result is a part of its third."""
    second = ft.sin(x) * y * factor
    return x + y, second, second * second


def spread(low: float, high: float, *shape: int) -> Array:
    """Distinct values in no particular order, none near an integer or a half when the step allows."""
    count = int(np.prod(shape, dtype=int))
    steps = (np.random.default_rng(count).permutation(count) + 0.37) / max(count, 1)
    return (low + (high - low) * steps).reshape(shape)


def both_signs(*shape: int) -> Array:
    return spread(-2.0, 2.0, *shape)


def ints(high: int, *shape: int) -> Array:
    return np.random.default_rng(high).integers(0, high, shape)


X = both_signs(2, 3)
POSITIVE = spread(0.3, 2.5, 2, 3)
UNIT = spread(-0.8, 0.8, 2, 3)
ROW = both_signs(3) + 0.11
CUBE = both_signs(2, 3, 4)
BOOLS = np.array([[True, False, True], [False, False, True]])


def softmax(x: Array, axis: int) -> Array:
    return np.asarray(special.softmax(x, axis=axis))


def normalized(x: Array, eps: float, centered: bool) -> Array:
    deviation = x - x.mean(-1, keepdims=True) if centered else x
    return np.asarray(deviation / np.sqrt((deviation**2).mean(-1, keepdims=True) + eps))


def written(x: Array, key: Any, value: Any) -> Array:
    result = x.copy()
    result[key] = value
    return result


def write(x: ft.Tensor, key: Any, value: Any) -> ft.Tensor:
    result = ft.Tensor(x.node)
    result[key] = value
    return result


def scattered(x: Array, indices: Array, rows: int) -> Array:
    result = np.zeros((rows, *x.shape[1:]))
    np.add.at(result, indices, x)
    return result


def scatter(x: ft.Tensor, indices: ft.Tensor, rows: int) -> ft.Tensor:
    """The adjoint of taking rows, which no public function makes by itself."""
    table = ft.zeros((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return ft.grad(ft.take(table, indices, axis=0), table, cotangent=x)  # type: ignore[no-any-return]


def widened(x: ft.Tensor) -> ft.Tensor:
    """The adjoint of a slice."""
    table = ft.zeros((4, 7), dtype=x.dtype, device=x.device)
    return ft.grad(table[1:3, 6:0:-2], table, cotangent=x)  # type: ignore[no-any-return]


def unpick(x: ft.Tensor, index: ft.Tensor) -> ft.Tensor:
    """The adjoint of picking one class for each row."""
    table = ft.zeros((*x.shape, 5), dtype=x.dtype, device=x.device)
    return ft.grad(neural.pick(table, index), table, cotangent=x)  # type: ignore[no-any-return]


def unpicked(x: Array, index: Array) -> Array:
    return np.asarray(x[..., None] * (index[..., None] == np.arange(5)))


ENDS = np.array([2, 2, 5])
"""Of three groups of six rows: one is empty, and the last row is in none."""


def grouped(x: Array, matrices: Array, ends: Array) -> Array:
    group = np.searchsorted(ends, np.arange(len(x)), side="right")
    padded = np.concatenate([matrices, np.zeros((1, *matrices.shape[1:]))])
    return np.asarray(np.einsum("ri,rio->ro", x, padded[group]))


def grouped_outer(x: ft.Tensor, g: ft.Tensor, ends: ft.Tensor) -> ft.Tensor:
    """The cotangent of the matrices."""
    matrices = ft.zeros((ends.shape[0], x.shape[1], g.shape[1]), dtype=x.dtype, device=x.device)
    return ft.grad(ft.grouped_matmul(x, matrices, ends), matrices, cotangent=g)  # type: ignore[no-any-return]


def grouped_outer_of_arrays(x: Array, g: Array, ends: Array) -> Array:
    starts = [0, *ends[:-1]]
    return np.stack([x[a:b].T @ g[a:b] for a, b in zip(starts, ends, strict=True)])


def attention_weights(q: Array, k: Array) -> Array:
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(np.where(np.tril(np.ones(scores.shape[-2:], bool), k.shape[-2] - q.shape[-2]), scores, -np.inf), -1)


def attended(q: Array, k: Array, v: Array) -> Array:
    return np.asarray(attention_weights(q, k) @ v)


def attend(q: ft.Tensor, k: ft.Tensor, v: ft.Tensor) -> ft.Tensor:
    return ft.scaled_dot_product_attention(q, k, v, causal=True)


def attention_gradients(q: ft.Tensor, k: ft.Tensor, v: ft.Tensor) -> ft.Tensor:
    """The cotangents of all three where that of the result is the last rows of the value."""
    parts = ft.grad(attend(q, k, v), [q, k, v], cotangent=v[:, -q.shape[-2] :])
    return ft.concat([ft.reshape(p, (-1,)) for p in parts])


def attention_gradients_of_arrays(q: Array, k: Array, v: Array) -> Array:
    weights, g = attention_weights(q, k), v[:, -q.shape[-2] :]
    d_weights = g @ v.swapaxes(-1, -2)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(q.shape[-1])
    parts = (d_scores @ k, d_scores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ g)
    return np.concatenate([p.reshape(-1) for p in parts])


PAGES, TABLE, LENGTHS, STARTS = (
    both_signs(4, 2, 1, 3),
    np.array([[2, 0], [3, 1]]),
    np.array([3, 2]),
    np.array([0, 2, 3]),
)
"""Two sequences of three and two tokens in pages of two; the first has two queries, the second one."""


def host(*xs: ft.Tensor) -> list[ft.Tensor]:
    """Where things lie in pages is said in host memory."""
    return [ft.to_device(x, "cpu") for x in xs]


def attended_by_pages(q: Array, k: Array, v: Array) -> Array:
    keys, values = (np.concatenate([x[2], x[0]])[:3, 0] for x in (k, v))
    first = [attended(head, keys, values) for head in q[:2].swapaxes(0, 1)]
    second = [attended(head, k[3, :, 0], v[3, :, 0]) for head in q[2:].swapaxes(0, 1)]
    return np.concatenate([np.stack(first, 1), np.stack(second, 1)])


def nll(x: Array, index: Array) -> Array:
    return -np.asarray(np.take_along_axis(np.log(softmax(x, -1)), index[..., None], -1)[..., 0])


def nll_gradient(g: ft.Tensor, x: ft.Tensor, index: ft.Tensor) -> ft.Tensor:
    return ft.grad(ft.cross_entropy(x, index, reduction="none"), x, cotangent=g)  # type: ignore[no-any-return]


def nll_gradient_of_arrays(g: Array, x: Array, index: Array) -> Array:
    return np.asarray(g[..., None] * (softmax(x, -1) - (index[..., None] == np.arange(x.shape[-1]))))


def scale_and_subtract(e: ft.Tensor, rows: ft.Tensor, g: ft.Tensor, index: ft.Tensor) -> ft.Tensor:
    return ft.Tensor(apply(neural.SCALE_AND_SUBTRACT, (e.node, rows.node, g.node, index.node)))


def scaled_and_subtracted(e: Array, rows: Array, g: Array, index: Array) -> Array:
    return np.asarray(e * rows - g[..., None] * (index[..., None] == np.arange(e.shape[-1])))


MATRICES = both_signs(2, 3, 3) + 3 * np.eye(3)
SYMMETRIC = MATRICES @ MATRICES.swapaxes(-1, -2) / 4 + np.diag([0.5, 1.0, 2.0])
TALL = spread(-1.0, 1.0, 3, 2) + np.eye(3, 2)
WIDE = np.ascontiguousarray(TALL.T)


def symmetrized(x: Array) -> Array:
    return np.asarray((x + x.swapaxes(-1, -2)) / 2)


def side_by_side(xp: Any, *parts: Any) -> Any:
    """All elements of the parts, as one vector."""
    join = ft.concat if xp is ft else np.concatenate
    return join([xp.reshape(part, (-1,)) for part in parts])


def squares_of_vectors(xp: Any, values: Any, *vectors: Any) -> Any:
    """Eigenvalues or singular values, and what does not depend on the sign of a vector."""
    return side_by_side(xp, values, *(v * v for v in vectors))


def svd_parts(xp: Any, x: Any, full: bool) -> Any:
    u, s, vh = xp.linalg.svd(x, full_matrices=full)
    return squares_of_vectors(xp, s, u, vh)


def eigh_parts(xp: Any, x: Any) -> Any:
    values, vectors = xp.linalg.eigh(x)
    return squares_of_vectors(xp, values, vectors)


def of_both(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """One function of a namespace and an array: with ours it is built, with numpy's it is the oracle."""
    return partial(function, ft), partial(function, np)


def parts_of_complex(xp: Any, z: Any) -> Any:
    return side_by_side(xp, xp.real(z), xp.imag(z))


UNARY: dict[str, tuple[Callable[..., Any], Array]] = {
    "positive": (np.positive, X),
    "negative": (np.negative, X),
    "abs": (np.abs, X),
    "sign": (np.sign, X),
    "square": (np.square, X),
    "reciprocal": (np.reciprocal, POSITIVE),
    "real": (np.real, X),
    "conj": (np.conj, X),
    "signbit": (np.signbit, X),
    "sqrt": (np.sqrt, POSITIVE),
    "rsqrt": (lambda x: 1 / np.sqrt(x), POSITIVE),
    "exp": (np.exp, X),
    "expm1": (np.expm1, X),
    "log": (np.log, POSITIVE),
    "log1p": (np.log1p, UNIT),
    "log2": (np.log2, POSITIVE),
    "log10": (np.log10, POSITIVE),
    "sin": (np.sin, X),
    "cos": (np.cos, X),
    "tan": (np.tan, UNIT),
    "asin": (np.arcsin, UNIT),
    "acos": (np.arccos, UNIT),
    "atan": (np.arctan, X),
    "sinh": (np.sinh, X),
    "cosh": (np.cosh, X),
    "tanh": (np.tanh, X),
    "asinh": (np.arcsinh, X),
    "acosh": (np.arccosh, POSITIVE + 1),
    "atanh": (np.arctanh, UNIT),
    "erf": (special.erf, X),
    "floor": (np.floor, X),
    "ceil": (np.ceil, X),
    "trunc": (np.trunc, X),
    "round": (np.round, X),
    "isfinite": (np.isfinite, np.array([1.0, np.inf, np.nan])),
    "isinf": (np.isinf, np.array([1.0, np.inf, np.nan])),
    "isnan": (np.isnan, np.array([1.0, np.inf, np.nan])),
    "logical_not": (np.logical_not, BOOLS),
    "bitwise_invert": (np.invert, ints(9, 2, 3)),
    "sigmoid": (special.expit, X),
    "relu": (lambda x: np.maximum(x, 0), X),
    "silu": (lambda x: x * special.expit(x), X),
}

BINARY: dict[str, tuple[Callable[..., Any], Array, Array]] = {
    "add": (np.add, X, ROW),
    "subtract": (np.subtract, ROW, X),
    "multiply": (np.multiply, X, ROW),
    "divide": (np.divide, X, spread(0.5, 2, 2, 1)),
    "floor_divide": (np.floor_divide, X, spread(0.5, 2, 2, 1)),
    "remainder": (np.remainder, X, ROW),
    "pow": (np.power, POSITIVE, ROW),
    "atan2": (np.arctan2, X, ROW),
    "hypot": (np.hypot, X, ROW),
    "logaddexp": (np.logaddexp, X, ROW),
    "copysign": (np.copysign, X, ROW),
    "nextafter": (np.nextafter, X, ROW),
    "maximum": (np.maximum, X, ROW),
    "minimum": (np.minimum, X, ROW),
    "equal": (np.equal, ints(2, 2, 3), ints(2, 3)),
    "not_equal": (np.not_equal, ints(2, 2, 3), ints(2, 3)),
    "less": (np.less, X, ROW),
    "less_equal": (np.less_equal, X, ROW),
    "greater": (np.greater, X, ROW),
    "greater_equal": (np.greater_equal, X, ROW),
    "logical_and": (np.logical_and, BOOLS, BOOLS[0]),
    "logical_or": (np.logical_or, BOOLS, BOOLS[0]),
    "logical_xor": (np.logical_xor, BOOLS, BOOLS[0]),
    "bitwise_and": (np.bitwise_and, ints(9, 2, 3), ints(8, 3)),
    "bitwise_or": (np.bitwise_or, ints(9, 2, 3), ints(8, 3)),
    "bitwise_xor": (np.bitwise_xor, ints(9, 2, 3), ints(8, 3)),
    "bitwise_left_shift": (np.left_shift, ints(9, 2, 3), ints(8, 3)),
    "bitwise_right_shift": (np.right_shift, ints(99, 2, 3), ints(4, 3)),
}

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.sum,
    "mean": np.mean,
    "prod": np.prod,
    "max": np.max,
    "min": np.min,
    "any": np.any,
    "all": np.all,
    "argmax": np.argmax,
    "argmin": np.argmin,
}


def case(op: str, build: Callable[..., Any], oracle: Callable[..., Any], *inputs: Array) -> Case:
    return Case(op, build, oracle, inputs)


ROWS = np.array([3, 0, 3, 2])
CASES = [
    *(case(name, getattr(ft, name), oracle, x) for name, (oracle, x) in UNARY.items()),
    *(case(name, getattr(ft, name), oracle, a, b) for name, (oracle, a, b) in BINARY.items()),
    *(
        case(
            name,
            lambda x, name=name: getattr(ft, name)(x, axis=1, keepdims=True),
            lambda x, oracle=oracle: oracle(x, axis=1, keepdims=True),
            CUBE,
        )
        for name, oracle in REDUCTIONS.items()
    ),
    case("prod", ft.prod, np.prod, np.array([[0.0, 1.5], [2.0, -3.0]])),
    case("imag", lambda x: ft.imag(x * (1 + 2j)), lambda x: np.imag(x * (1 + 2j)), X),
    case("gelu_erf", ft.gelu, lambda x: x * special.ndtr(x), X),
    case(
        "gelu_tanh",
        lambda x: ft.gelu(x, approximate=True),
        lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        X,
    ),
    case("where", ft.where, np.where, BOOLS, X, ROW),
    case("reshape", lambda x: ft.reshape(x, (4, -1)), lambda x: x.reshape(4, -1), CUBE),
    case("permute_dims", lambda x: ft.permute_dims(x, (2, 0, 1)), lambda x: x.transpose(2, 0, 1), CUBE),
    case("broadcast_to", lambda x: ft.broadcast_to(x, (4, 2, 3)), lambda x: np.broadcast_to(x, (4, 2, 3)), X[:, :1]),
    case("concat", lambda a, b: ft.concat([a, b, a], axis=1), lambda a, b: np.concatenate([a, b, a], 1), X, X[:, :1]),
    case("slice", lambda x: x[::-1, None, 1], lambda x: x[::-1, None, 1], CUBE),
    case("unslice", widened, lambda x: written(np.zeros((4, 7)), (slice(1, 3), slice(6, 0, -2)), x), X),
    case(
        "slice_update",
        lambda x, v: write(x, (0, slice(1, 3)), v),
        lambda x, v: written(x, (0, slice(1, 3)), v),
        CUBE,
        CUBE[1, 0],
    ),
    case("index", lambda x, i: x[:, i, 1], lambda x, i: x[:, i, 1], CUBE, ints(3, 2, 2)),
    case("index_add", lambda x, i: scatter(x, i, 5), lambda x, i: scattered(x, i, 5), both_signs(4, 3), ROWS),
    case("index_update", lambda x, i, v: write(x, i, v), written, both_signs(4, 3), np.array([3, 0]), X),
    case("matmul", ft.matmul, np.matmul, CUBE, both_signs(4, 5)),
    case("matmul", ft.matmul, np.matmul, both_signs(2, 1, 3, 4), both_signs(3, 4, 2)),
    case("pick", neural.pick, lambda x, i: np.take_along_axis(x, i[..., None], -1)[..., 0], CUBE, ints(4, 2, 3)),
    case("unpick", unpick, unpicked, X, ints(5, 2, 3)),
    case("nll", lambda x, i: ft.cross_entropy(x, i, reduction="none"), nll, CUBE, ints(4, 2, 3)),
    case("nll_backward", nll_gradient, nll_gradient_of_arrays, X, CUBE, ints(4, 2, 3)),
    case(
        "scale_and_subtract",
        scale_and_subtract,
        scaled_and_subtracted,
        CUBE,
        POSITIVE[..., None],
        X,
        ints(4, 2, 3),
    ),
    case("grouped_matmul", ft.grouped_matmul, grouped, both_signs(6, 2), both_signs(3, 2, 4), ENDS),
    case("grouped_outer", grouped_outer, grouped_outer_of_arrays, both_signs(6, 2), both_signs(6, 4), ENDS),
    case("attention", attend, attended, CUBE, both_signs(2, 5, 4), both_signs(2, 5, 3)),
    case(
        "attention_backward",
        attention_gradients,
        attention_gradients_of_arrays,
        CUBE,
        both_signs(2, 5, 4),
        both_signs(2, 5, 3),
    ),
    case(
        "paged_attention",
        lambda q, k, v: ft.paged_attention(q, k, v, *map(ft.asarray, (TABLE, LENGTHS, STARTS))),
        attended_by_pages,
        both_signs(3, 2, 3),
        PAGES,
        PAGES[::-1] + 0.1,
    ),
    case(
        "write_pages",
        lambda x, new, slots: ft.write_pages(x, new, *host(slots)),
        lambda x, new, slots: written(x.reshape(8, 3), slots[[0, 2]], new[[0, 2]]).reshape(x.shape),
        both_signs(4, 2, 3),
        both_signs(3, 3),
        np.array([7, -1, 2]),
    ),
    case(
        "copy_pages",
        lambda x, sources, targets: ft.copy_pages(x, *host(sources, targets)),
        lambda x, sources, targets: x[[0, 1, 1, 1]],
        both_signs(4, 3),
        np.array([1, -1, 2]),
        np.array([2, 0, 3]),
    ),
    case("call", lambda x, y: call(three_of, [x, y], 2.0)[1], lambda x, y: np.sin(x) * y * 2.0, X, ROW),
    case("tril", lambda x: ft.tril(x, k=1), lambda x: np.tril(x, 1), CUBE),
    case("triu", lambda x: ft.triu(x, k=-1), lambda x: np.triu(x, -1), CUBE),
    case("astype", lambda x: ft.abs(ft.astype(x, ft.complex128) * (2 + 1j)), lambda x: np.abs(x * (2 + 1j)), X),
    case("copy", lambda x: ft.to_device(x, "other:0") * 2, lambda x: x * 2, X),
    case("stop_gradient", ft.stop_gradient, lambda x: x, X),
    case("argsort", lambda x: ft.argsort(x, axis=1, descending=True), lambda x: np.argsort(-x, axis=1), CUBE),
    case("searchsorted", ft.searchsorted, np.searchsorted, np.sort(ROW), X),
    case("cumulative_sum", lambda x: ft.cumulative_sum(x, axis=1), lambda x: np.cumsum(x, axis=1), CUBE),
    case("cumulative_prod", lambda x: ft.cumulative_prod(x, axis=1), lambda x: np.cumprod(x, axis=1), CUBE),
    case("softmax", lambda x: ft.softmax(x, axis=1), lambda x: softmax(x, 1), CUBE),
    case("log_softmax", lambda x: ft.log_softmax(x, axis=1), lambda x: np.log(softmax(x, 1)), CUBE),
    case("normalize", ft.layer_norm, lambda x: normalized(x, 1e-5, True), CUBE),
    case("normalize", ft.rms_norm, lambda x: normalized(x, 1e-6, False), CUBE),
]

CASES += [
    *(
        case(f"complex_{name}", *of_both(lambda xp, x, name=name: xp.imag(getattr(xp, name)(x * (1 + 0.5j)))), X)
        for name in ("expm1", "tanh")
    ),
    case("cholesky", ft.linalg.cholesky, lambda x: np.linalg.cholesky(symmetrized(x)), SYMMETRIC),
    case("inv", *of_both(lambda xp, x: xp.linalg.inv(x)), MATRICES),
    case("solve", *of_both(lambda xp, a, b: xp.linalg.solve(a, b)), MATRICES, both_signs(2, 3, 2)),
    case("det", *of_both(lambda xp, x: xp.linalg.det(x)), MATRICES),
    case("slogdet", *of_both(lambda xp, x: xp.linalg.slogdet(x).logabsdet), MATRICES),
    case("eigh", lambda x: eigh_parts(ft, x), lambda x: eigh_parts(np, symmetrized(x)), SYMMETRIC[0]),
    case("eigvalsh", ft.linalg.eigvalsh, lambda x: np.linalg.eigvalsh(symmetrized(x)), SYMMETRIC),
    *(
        case("svd", *of_both(lambda xp, x, full=full: svd_parts(xp, x, full)), x)
        for full in (False, True)
        for x in (TALL, WIDE)
    ),
    case("svdvals", *of_both(lambda xp, x: xp.linalg.svdvals(x)), TALL),
    *(
        case("qr", *of_both(lambda xp, x, mode=mode: side_by_side(xp, *xp.linalg.qr(x, mode=mode))), x)
        for mode, x in (("reduced", TALL), ("complete", TALL), ("reduced", WIDE))
    ),
    *(case("pinv", *of_both(lambda xp, x: xp.linalg.pinv(x)), x) for x in (TALL, WIDE)),
    *(
        case(name, *of_both(lambda xp, x, name=name: parts_of_complex(xp, getattr(xp.fft, name)(x, n=5, axis=1))), CUBE)
        for name in ("fft", "ifft", "rfft")
    ),
    *(
        case("irfft", *of_both(lambda xp, x, n=n: xp.fft.irfft(x * (1 + 2j), n=n, axis=1, norm="ortho")), CUBE)
        for n in (5, 4)
    ),
]

# Ops without inputs have tests of their own; each is named with the file that holds them.
TESTED_ELSEWHERE = {
    "data": "ops/test_creation.py",
    "full": "ops/test_creation.py",
    "arange": "ops/test_creation.py",
    "linspace": "ops/test_creation.py",
    "eye": "ops/test_creation.py",
    "lost": "../runtime/test_realize.py",
    "random_bits": "test_random.py",
    "random_uniform": "test_random.py",
}


def identify(case: Case) -> str:
    return f"{case.op}-{'x'.join(str(list(x.shape)).replace(' ', '') for x in case.inputs)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=identify)
    if "differentiable" in metafunc.fixturenames:
        chosen = [case for case in CASES if OPS[case.op].vjp and case.reals]
        metafunc.parametrize("differentiable", chosen, ids=identify)


@pytest.fixture(scope="session")
def covered() -> dict[str, set[str]]:
    """Names of the ops that have a case, and of those that are tested elsewhere."""
    return {"case": {case.op for case in CASES}, "elsewhere": set(TESTED_ELSEWHERE)}


@pytest.fixture(autouse=True)
def other_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """A second device that computes with numpy: what crosses to it must do so by a copy node."""
    from fuel_parallel import backends
    from fuel_parallel.backends.numpy_backend import NumpyBackend

    monkeypatch.setitem(backends._found, "other:0", NumpyBackend())
    return "other:0"
