"""Attention written out, softmax(q @ k.mT) @ v, and its backward pass become the ops that need no matrix of scores.

Between the product and the softmax may stand factors and one `where` with a bool mask and -inf. The backward pass is
the one that `grad` builds. All is left as it is when anything else reads one of the matrices, and when nothing would be
gained: `pays` says when. 16-bit floats are left, too, since the ops round elsewhere.

A query that sees no key has NaN as its result in this form, and so have the gradients of its values; that stays so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fuel_parallel.lazy.dtypes import is_half
from fuel_parallel.lazy.node import Shape, Spec, apply
from fuel_parallel.lazy.ops import attention as ops
from fuel_parallel.lazy.ops import attention_blocks, binary, elementwise, manipulation, reductions
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.runtime.graph import Builder, Graph, graph_of
from fuel_parallel.runtime.passes.matching import Bound, Values

MASK_BYTES = 1 << 28
"""Constant masks are looked at up to this size, to see whether they are causal."""


@dataclass(frozen=True, slots=True)
class _Written:
    """How something is written, and what `grad` makes of it."""

    forward: str
    backward: str


_EXPONENTIALS = "divide(e := exp(subtract(x, top := {top})), total := sum(e))"
_D_SHIFTED = (
    "multiply(add(divide(dw := matmul(g, vt), total), broadcast_to(sum(multiply(negative(dw), divide(w, total))))), e)"
)
_SOFTMAXES = (
    _Written("softmax(x)", "multiply(w, subtract(dw := matmul(g, vt), sum(multiply(dw, w))))"),
    _Written(_EXPONENTIALS.format(top="stop_gradient(max(x))"), _D_SHIFTED),
    _Written(
        _EXPONENTIALS.format(top="max(x)"),
        f"add(ds := {_D_SHIFTED}, multiply(sum(negative(ds)), divide(hit := astype(equal(x, top)), sum(hit))))",
    ),
)
"""The softmax w of x, and what the cotangent dw of w becomes."""


_LINKS = (
    _Written("multiply(s, n)", "multiply(d, n)"),
    _Written("multiply(n, s)", "multiply(d, n)"),
    _Written("divide(s, n)", "divide(d, n)"),
    _Written("where(m, s, n)", "where(m, d, zero)"),
    _Written("where(m, n, s)", "where(m, zero, d)"),
)
"""From the scores s towards the softmax, and from its cotangent d back. n is a number: -inf with a mask m."""


@dataclass(frozen=True, eq=False, slots=True)
class _Scores:
    """The scores as values of the old graph. `transposed` is the keys, [..., dim, k]."""

    query: int
    transposed: int
    scale: float
    mask: int | None
    hides: bool
    """The mask says which keys are hidden, not which are seen."""
    links: tuple[tuple[_Written, Bound], ...]
    """From the softmax up to the product, each with what its names stand for."""


@dataclass(frozen=True, eq=False, slots=True)
class _Attention:
    """What was found. `shape` is that of the scores."""

    shape: Shape
    inputs: tuple[int, ...]
    """Query, transposed keys, values, and the mask unless it says no more than `causal`."""
    scale: float
    causal: bool
    hides: bool
    blind: bool
    """There may be queries that see no key."""
    result: int | None
    cotangents: dict[int, dict[str, int]]
    """For each cotangent of the result what is made of it: those of the inputs in `_INPUTS`, as far as wanted."""

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The result as the op gives it, and as it was written."""
        query, key, value, mask = self._unpacked(inputs)
        operands = [query, key, value, *mask]
        extended = ops.extended_attention(operands, self.causal, self.scale)
        result = extended[..., : value.shape[-1]]
        if self.blind:
            result = binary.where(_sees(*mask), result, math.nan)
        return extended, manipulation.reshape(result, (*self.shape[:-1], value.shape[-1]))

    def backward(self, g: Tensor, extended: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The cotangents of query, transposed keys and values."""
        query, key, value, mask = self._unpacked(inputs)
        g = manipulation.reshape(g, (*query.shape[:-1], value.shape[-1]))
        if self.blind:
            # Through the weights of a blind query nothing comes back to query and keys, and NaN to all its values.
            g = binary.where(_sees(*mask), g, 0.0)
        operands = [g, extended, query, key, value, *mask]
        packed = Tensor(apply(ops.ATTENTION_BACKWARD, tuple(t.node for t in operands), self.causal, self.scale))
        ends = np.cumsum([query.size, key.size, value.size]).tolist()
        of_query, of_key, of_value = (
            manipulation.reshape(packed[end - t.size : end], t.shape)
            for end, t in zip(ends, (query, key, value), strict=True)
        )
        if self.blind:
            of_value = binary.where(reductions.all(_sees(*mask), axis=-2, keepdims=True), of_value, math.nan)
        batch = self.shape[:-2]
        return tuple(manipulation.reshape(t, (*batch, *t.shape[-2:])) for t in (of_query, of_key.mT, of_value))

    def _unpacked(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """Query, key and value with equal dimensions before the last two, and at least one; the mask with as many."""
        query, transposed, value, *masks = inputs
        batch = self.shape[:-2] or (1,)
        query, key, value = (
            manipulation.broadcast_to(t, (*batch, *t.shape[-2:])) for t in (query, transposed.mT, value)
        )
        masks = [manipulation.reshape(m, (1,) * (query.ndim - m.ndim) + m.shape) for m in masks]
        return query, key, value, [elementwise.logical_not(m) if self.hides else m for m in masks]


_INPUTS = ("query", "transposed", "value")


def _sees(mask: Tensor) -> Tensor:
    """For each query whether it sees a key."""
    return reductions.any(mask, axis=-1, keepdims=True)


def attention(graph: Graph) -> Graph:
    """Replaces every attention that is written out and whose matrices nothing else reads."""
    values = Values(graph)
    found = [a for w in values.firsts() if (a := _recognize(values, w)) is not None]
    if not found:
        return graph
    owner = {p: a for a in found for p in _products(a)}
    builder = Builder(graph)
    new: dict[int, int] = {}
    extended: dict[_Attention, int] = {}
    for number, i in enumerate(graph.instructions, graph.first):
        first = values.same[number]
        a = owner.get(first)
        if a is None:
            builder.at.append(builder.keep(i))
            continue
        inputs = [builder.at[v] for v in a.inputs]
        specs = [values.specs[v] for v in a.inputs]
        if a not in extended:
            extended[a], result = builder.inline(graph_of(a.forward, specs), inputs, i.origin)
            if a.result is not None:
                new[a.result] = result
        if first not in new:
            g, parts = next((g, parts) for g, parts in a.cotangents.items() if first in parts.values())
            body = graph_of(a.backward, [values.specs[g], builder.spec(extended[a]), *specs])
            made = builder.inline(body, [builder.at[g], extended[a], *inputs], i.origin)
            new |= {parts[name]: value for name, value in zip(_INPUTS, made, strict=True) if name in parts}
        builder.at.append(new[first])
    return builder.finish()


def _products(a: _Attention) -> list[int]:
    """The values that the ops take over."""
    return [*([] if a.result is None else [a.result]), *(p for parts in a.cotangents.values() for p in parts.values())]


def pays(scores: Spec, operands: list[Spec]) -> bool:
    """Whether the scores are many: beside query, key and value, and beside what the op has at one time in any case.

    The backward op computes the scores again, which takes longer than to read them where they are few.
    """
    return scores.size > max(attention_blocks.SCORES, 2 * sum(spec.size for spec in operands))


def _spread(spec: Spec, shape: Shape) -> Spec:
    """An input as the op takes it, where the scores have this shape."""
    return Spec((*(shape[:-2] or (1,)), *spec.shape[-2:]), spec.dtype, spec.device)


# Finding. `inside` gathers the values that the ops do without.


def _recognize(values: Values, w: int) -> _Attention | None:
    """The attention whose weights are the value w."""
    for form in _SOFTMAXES:
        names: Bound = {"w": w}
        inside = values.match(form.forward, w, names)
        if inside is not None:
            scores = _scores(values, names["x"], inside)
            return None if scores is None else _around(values, form, names, scores, inside)
    return None


def _scores(values: Values, x: int, inside: set[int]) -> _Scores | None:
    """From the input of the softmax up to the product of query and keys."""
    spec = values.specs[x]
    links: list[tuple[_Written, Bound]] = []
    scale, mask, hides = 1.0, None, False
    while values.specs[x] is spec:
        names: Bound = {}
        product = values.match("matmul(q, kt)", x, names)
        if product is not None:
            inside |= product
            return _Scores(names["q"], names["kt"], scale, mask, hides, tuple(links))
        step = _link(values, x)
        if step is None:
            return None
        link, names, number = step
        if "m" in names:
            # Factors that come after the mask must leave -inf what it is.
            if mask is not None or scale <= 0:
                return None
            mask, hides = names["m"], link.forward == "where(m, n, s)"
        else:
            scale = scale / number if link.backward == "divide(d, n)" else scale * number
        inside.add(x)
        links.append((link, names))
        x = names["s"]
    return None


def _link(values: Values, x: int) -> tuple[_Written, Bound, float] | None:
    """The link that makes x, what its names stand for, and its number."""
    for link in _LINKS:
        names: Bound = {}
        if values.match(link.forward, x, names) is not None:
            number = values.filled_with(names["n"])
            if number is not None and (number == -math.inf if "m" in names else math.isfinite(number) and number != 0):
                return link, names, number
    return None


def _around(values: Values, form: _Written, names: Bound, scores: _Scores, inside: set[int]) -> _Attention | None:
    """The attention around these scores, if all that reads them and the weights belongs to it."""
    w = names["w"]
    results = [p for p in values.readers(w) if values.match("matmul(w, v)", p, names) is not None]
    cotangents: dict[int, dict[str, int]] = {}
    for name, source, pattern in (
        ("query", scores.transposed, "matmul(d, t)"),
        ("transposed", scores.query, "matmul(t, d)"),
        ("value", w, "matmul(t, d)"),
    ):
        for t, product, d in _with_transposed(values, source, pattern):
            if source == w:
                inside.add(t)
            g = d if source == w else _cotangent(values, d, form, names, scores, inside)
            if g is not None:
                cotangents.setdefault(g, {}).setdefault(name, product)
    if "v" not in names:
        return None
    operands = (scores.query, scores.transposed, names["v"])
    spec = values.specs[w]
    causal, blind = _sight(values, scores, spec.shape)
    inputs = operands if scores.mask is None or causal else (*operands, scores.mask)
    result = results[0] if results else None
    a = _Attention(spec.shape, inputs, scores.scale, causal, scores.hides, blind, result, cotangents)
    pay = pays(spec, [_spread(values.specs[v], spec.shape) for v in operands])
    return a if pay and not is_half(spec.dtype) and _fits(values, a, inside) else None


def _with_transposed(values: Values, source: int, pattern: str) -> Iterator[tuple[int, int, int]]:
    """Products of the transposed source t with some d: t, the product, d."""
    for t in values.readers(source):
        if values.match("mT(source)", t, {"source": source}) is not None:
            for product in values.readers(t):
                names: Bound = {"t": t}
                if values.match(pattern, product, names) is not None:
                    yield t, product, names["d"]


def _cotangent(values: Values, d: int, form: _Written, names: Bound, scores: _Scores, inside: set[int]) -> int | None:
    """From the cotangent d of the product of query and keys up to that of the result."""
    spec = values.specs[names["w"]]
    passed: set[int] = set()
    for link, known in reversed(scores.links):
        here = dict(known)
        step = values.match(link.backward, d, here)
        if step is None or values.specs[d] is not spec or ("zero" in here and values.filled_with(here["zero"]) != 0):
            return None
        passed |= step
        d = here["d"]
    here = dict(names)
    step = values.match(form.backward, d, here)
    if step is None or values.specs[d] is not spec or values.match("mT(v)", here["vt"], here) is None:
        return None
    names["v"] = here["v"]
    inside |= passed | step
    return here["g"]


def _fits(values: Values, a: _Attention, inside: set[int]) -> bool:
    """Whether shapes and order are those of the ops, and nothing but `inside` reads what is inside."""
    products = _products(a)
    known = inside.union(products)
    result = (*a.shape[:-1], values.specs[a.inputs[2]].shape[-1])
    ends = [*a.cotangents, *([] if a.result is None else [a.result])]
    return (
        bool(products)
        and all(values.specs[v].shape == result for v in ends)
        and max(a.inputs) < min(products)
        and inside.isdisjoint([*a.inputs, *a.cotangents, *values.outputs])
        and all(known.issuperset(values.readers(v)) for v in inside)
    )


def _sight(values: Values, scores: _Scores, shape: Shape) -> tuple[bool, bool]:
    """Whether the mask is just causal, and whether it may leave a query without any key."""
    if scores.mask is None:
        return False, False
    mask = values.constant(scores.mask, MASK_BYTES)
    if mask is None:
        return False, True
    seen = np.atleast_1d(np.logical_not(mask) if scores.hides else mask)
    q, k = shape[-2:]
    causal = q <= k and seen.shape == (1,) * (seen.ndim - 2) + (q, k)
    causal = causal and bool(np.array_equal(seen.reshape(q, k), np.tri(q, k, k - q, dtype=bool)))
    return causal, not seen.any(axis=-1).all()
