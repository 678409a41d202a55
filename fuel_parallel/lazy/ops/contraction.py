"""Products that sum over shared dimensions: matmul, tensordot, vecdot, einsum. All end in one op, `matmul`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fuel_parallel.errors import ArgumentError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import Op, Spec, apply, define
from fuel_parallel.lazy.ops import binary, creation, elementwise, indexing, manipulation, reductions
from fuel_parallel.lazy.ops.call import called
from fuel_parallel.lazy.ops.elementwise import NUMERIC, product_in_float32
from fuel_parallel.lazy.tensor import Tensor


def _infer_matmul(a: Spec, b: Spec) -> Spec:
    elementwise.check_domain("matmul", a.dtype, NUMERIC)
    if len(a.shape) < 2 or len(b.shape) < 2 or a.shape[-1] != b.shape[-2]:
        raise ShapeError(
            f"matmul: shapes {a.shape} and {b.shape} do not fit: the last extent of the first must equal the "
            "second-to-last extent of the second"
        )
    batch = binary.broadcast_shapes("matmul", a.shape[:-2], b.shape[:-2])
    return Spec((*batch, a.shape[-2], b.shape[-1]), a.dtype, a.device)


def _matmul_kernel(xp: Any, a: Any, b: Any) -> Any:
    if b.ndim == 2 and a.ndim > 2 and a.size and a.flags.c_contiguous:
        # One large product instead of one per leading index.
        return xp.matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])
    return xp.matmul(a, b)


def _matmul_into(xp: Any, out: Any, a: Any, b: Any) -> None:
    if b.ndim == 2 and a.ndim > 2 and a.size and b.size and a.flags.c_contiguous:
        xp.matmul(a.reshape(-1, a.shape[-1]), b, out=out.reshape(-1, b.shape[-1]))
    else:
        xp.matmul(a, b, out=out)


@called
def _matmul_backward_left(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return binary.sum_to(_matmul(g, b.mT), a.shape)


@called
def _matmul_backward_right(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    if b.ndim == 2 and a.ndim > 2:
        # The sum over leading dimensions belongs inside the product.
        a = manipulation.reshape(a, (math.prod(a.shape[:-1]), a.shape[-1]))
        g = manipulation.reshape(g, (math.prod(g.shape[:-1]), g.shape[-1]))
    return binary.sum_to(_matmul(a.mT, g), b.shape)


def _is_complex(x: Tensor) -> bool:
    return dtypes.kind(x.dtype) == "complex floating"


MATMUL = define(
    Op(
        "matmul",
        _infer_matmul,
        product_in_float32(_matmul_kernel),
        (_matmul_backward_left, _matmul_backward_right),
        into=_matmul_into,
        aliases=False,
        shapes="[..., m, k], [..., k, n] -> [..., m, n]",
        domain=NUMERIC,
    )
)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return Tensor(apply(MATMUL, (a.node, b.node)))


def matmul(x1: Any, x2: Any, /) -> Tensor:
    """The matrix product of the last two dimensions, broadcast over the others; a 1-d operand is a vector.

    >>> matmul(creation.ones((5, 2, 3)), creation.ones((3, 4))).shape
    (5, 2, 4)
    """
    left, right = binary.operands("matmul", x1, x2)
    a, b = Tensor(left), Tensor(right)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"matmul: operands must not be 0-d, but the shapes are {a.shape} and {b.shape}; use *")
    if a.ndim == 1 and b.ndim == 1 and a.shape != b.shape:
        raise ShapeError(f"matmul: vectors of shapes {a.shape} and {b.shape} must have the same extent")
    wide_a = manipulation.reshape(a, (1, *a.shape)) if a.ndim == 1 else a
    wide_b = manipulation.reshape(b, (*b.shape, 1)) if b.ndim == 1 else b
    product = _matmul(wide_a, wide_b)
    rows = () if a.ndim == 1 else (a.shape[-2],)
    columns = () if b.ndim == 1 else (b.shape[-1],)
    shape = (*product.shape[:-2], *rows, *columns)
    return product if shape == product.shape else manipulation.reshape(product, shape)


def tensordot(x1: Tensor, x2: Tensor, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Tensor:
    """Sums products over pairs of axes: the last `axes` of x1 with the first of x2, or two lists of axes."""
    if isinstance(axes, int):
        if not 0 <= axes <= min(x1.ndim, x2.ndim):
            raise ArgumentError(f"tensordot: axes={axes} does not fit shapes {x1.shape} and {x2.shape}")
        pairs: tuple[Sequence[int], Sequence[int]] = (range(x1.ndim - axes, x1.ndim), range(axes))
    else:
        pairs = axes
    left = [reductions.normalize_axis("tensordot", a, x1.ndim) for a in pairs[0]]
    right = [reductions.normalize_axis("tensordot", a, x2.ndim) for a in pairs[1]]
    if len(left) != len(right) or any(x1.shape[a] != x2.shape[b] for a, b in zip(left, right, strict=False)):
        raise ShapeError(f"tensordot: axes {left} of shape {x1.shape} and {right} of {x2.shape} do not pair up")
    free_left = [i for i in range(x1.ndim) if i not in left]
    free_right = [i for i in range(x2.ndim) if i not in right]
    inner = math.prod(x1.shape[a] for a in left)
    rows = math.prod(x1.shape[i] for i in free_left)
    columns = math.prod(x2.shape[i] for i in free_right)
    a = manipulation.reshape(manipulation.permute_dims(x1, [*free_left, *left]), (rows, inner))
    b = manipulation.reshape(manipulation.permute_dims(x2, [*right, *free_right]), (inner, columns))
    shape = (*(x1.shape[i] for i in free_left), *(x2.shape[i] for i in free_right))
    return manipulation.reshape(matmul(a, b), shape)


def vecdot(x1: Tensor, x2: Tensor, /, *, axis: int = -1) -> Tensor:
    """The sum of conj(x1) * x2 over one axis."""
    if not -min(x1.ndim, x2.ndim) <= axis <= -1:
        raise ShapeError(f"vecdot: axis {axis} must lie between -{min(x1.ndim, x2.ndim)} and -1")
    if x1.shape[axis] != x2.shape[axis]:
        raise ShapeError(f"vecdot: shapes {x1.shape} and {x2.shape} differ along axis {axis}")
    left = elementwise.conj(x1) if _is_complex(x1) else x1
    product = left * x2
    return reductions.sum(product, axis=axis, dtype=product.dtype)


def einsum(equation: str, /, *tensors: Tensor) -> Tensor:
    """Einstein's summation: `einsum("bqd,bkd->bqk", q, k)`. Letters that the result leaves out are summed.

    Operands are combined from left to right, each pair by one matmul. `...` stands for any leading dimensions.

    >>> einsum("ij,kj->ik", creation.ones((2, 3)), creation.ones((4, 3))).tolist()[0]
    [3.0, 3.0, 3.0, 3.0]
    """
    inputs, output = _parse(equation, tensors)
    operands = [_simplify(t, labels, equation) for t, labels in zip(tensors, inputs, strict=True)]
    _check_extents(equation, operands)
    while len(operands) > 1:
        (a, left), (b, right), *rest = operands
        keep = set(output).union(*(labels for _, labels in rest)) if rest else set(output)
        operands = [_contract(a, left, b, right, keep), *rest]
    result, labels = operands[0]
    gone = tuple(i for i, label in enumerate(labels) if label not in output)
    if gone:
        result = reductions.sum(result, axis=gone, dtype=result.dtype)
        labels = [label for label in labels if label in output]
    return manipulation.permute_dims(result, [labels.index(label) for label in output])


def _parse(equation: str, tensors: tuple[Tensor, ...]) -> tuple[list[list[str]], list[str]]:
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    if len(terms) != len(tensors):
        raise ArgumentError(f"einsum: {equation!r} names {len(terms)} operands, but {len(tensors)} tensors were given")
    inputs = [_expand(term, t.ndim, equation) for term, t in zip(terms, tensors, strict=True)]
    if arrow:
        dots = max((sum(label.startswith(".") for label in labels) for labels in inputs), default=0)
        output = _expand(right, sum(c.isalpha() for c in right) + (dots if "..." in right else 0), equation)
    else:
        flat = [label for labels in inputs for label in labels]
        dotted = sorted({label for label in flat if label.startswith(".")}, reverse=True)
        output = dotted + sorted(label for label in set(flat) if label.isalpha() and flat.count(label) == 1)
    known = {label for labels in inputs for label in labels}
    if len(set(output)) != len(output) or not set(output) <= known:
        raise ArgumentError(f"einsum: every letter right of -> in {equation!r} must stand once and appear on the left")
    return inputs, output


def _expand(term: str, ndim: int, equation: str) -> list[str]:
    """One label a dimension; those of `...` are numbered from the right: `.1`, `.0`."""
    before, dots, after = term.partition("...")
    letters = len(before) + len(after)
    if not (before + after).isalpha() and letters:
        raise ArgumentError(f"einsum: {equation!r} may hold letters, commas, '...' and '->' only")
    extra = ndim - letters
    if extra < 0 or (extra and not dots):
        raise ShapeError(f"einsum: {term!r} in {equation!r} names {letters} dimensions, but the tensor has {ndim}")
    return [*before, *(f".{i}" for i in reversed(range(extra))), *after]


def _simplify(t: Tensor, labels: list[str], equation: str) -> tuple[Tensor, list[str]]:
    """Takes the diagonal of dimensions that carry the same letter."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            i = labels.index(label)
            j = labels.index(label, i + 1)
            if t.shape[i] != t.shape[j]:
                raise ShapeError(f"einsum: {label!r} in {equation!r} is {t.shape[i]} and {t.shape[j]} in one tensor")
            t = manipulation.moveaxis(t, (i, j), (0, 1))
            along = creation.arange(t.shape[0], device=t.device)
            t = indexing.getitem(t, (along, along))
            labels = [label, *(other for k, other in enumerate(labels) if k not in (i, j))]
    return t, labels


def _check_extents(equation: str, operands: list[tuple[Tensor, list[str]]]) -> None:
    extents: dict[str, int] = {}
    for t, labels in operands:
        for label, extent in zip(labels, t.shape, strict=True):
            seen = extents.setdefault(label, extent)
            if seen == 1 and label.startswith("."):
                extents[label] = extent
            elif extent != seen and not (label.startswith(".") and extent == 1):
                raise ShapeError(f"einsum: {label!r} in {equation!r} has extents {seen} and {extent}")


def _contract(a: Tensor, left: list[str], b: Tensor, right: list[str], keep: set[str]) -> tuple[Tensor, list[str]]:
    """Two operands into one: batch letters are kept in both, summed letters in both and not kept."""
    a, left = _sum_alone(a, left, right, keep)
    b, right = _sum_alone(b, right, left, keep)
    batch = [x for x in left if x in right and x in keep]
    inner = [x for x in left if x in right and x not in keep]
    rows = [x for x in left if x not in right]
    columns = [x for x in right if x not in left]
    size_a, size_b = dict(zip(left, a.shape, strict=True)), dict(zip(right, b.shape, strict=True))
    lead_a, lead_b = tuple(size_a[x] for x in batch), tuple(size_b[x] for x in batch)
    a = manipulation.permute_dims(a, [left.index(x) for x in (*batch, *rows, *inner)])
    b = manipulation.permute_dims(b, [right.index(x) for x in (*batch, *inner, *columns)])
    n = math.prod(size_a[x] for x in rows)
    m = math.prod(size_b[x] for x in columns)
    k = math.prod(size_a[x] for x in inner)
    product = matmul(manipulation.reshape(a, (*lead_a, n, k)), manipulation.reshape(b, (*lead_b, k, m)))
    labels = [*batch, *rows, *columns]
    sizes = {**size_a, **{x: size_b[x] for x in right if size_a.get(x, 1) == 1}}
    return manipulation.reshape(product, tuple(sizes[x] for x in labels)), labels


def _sum_alone(t: Tensor, labels: list[str], other: list[str], keep: set[str]) -> tuple[Tensor, list[str]]:
    alone = tuple(i for i, x in enumerate(labels) if x not in other and x not in keep)
    if alone:
        t = reductions.sum(t, axis=alone, dtype=t.dtype)
    return t, [x for i, x in enumerate(labels) if i not in alone]
