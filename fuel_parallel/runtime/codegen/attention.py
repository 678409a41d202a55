"""Attention on a device: chooses the source for shapes and dtypes, and launches its kernels.

Query, key, value and cotangent are read where they lie if each row is in one piece, as after a permutation of heads and
positions; a mask is read through its own dimensions. So nothing is copied or broadcast for the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fuel_parallel.lazy.node import Attrs, Shape, Spec
from fuel_parallel.runtime.codegen.attention_backward import OF_KEYS, OF_QUERIES, BackwardWriter
from fuel_parallel.runtime.codegen.attention_forward import FORWARD, ForwardWriter
from fuel_parallel.runtime.codegen.attention_writer import AttentionWriter, Form, Source, source_for
from fuel_parallel.runtime.codegen.dialect import Dialect
from fuel_parallel.runtime.codegen.expressions import Unsupported
from fuel_parallel.runtime.codegen.launch import functions

Run = Callable[..., Any]


def attention(inputs: Sequence[Spec], attrs: Attrs, spec: Spec, dialect: Dialect) -> Run:
    """The function that computes the op `attention`, called as its kernel is; `Unsupported` with the reason if none."""
    query, key, value, *masks = inputs
    causal, scale, keeps = attrs
    if keeps:
        raise Unsupported("the weights are to be kept")
    source = _source(ForwardWriter, query, key, value, masks, causal, dialect)

    def run(xp: Any, arrays: Sequence[Any], *_: Any) -> Any:
        out = xp.empty(spec.shape, dtype=spec.dtype)
        (kernel,) = functions(xp, source.text, (FORWARD,))
        pointers, numbers = _arguments(xp, arrays[:3], arrays[3:], query, key, spec.dtype.type(scale))
        blocks = source.blocks(math.prod(query.shape[:-2]), query.shape[-2])
        kernel((blocks,), (source.tiling.threads,), (*pointers, out, *numbers))
        return out

    return run


def attention_backward(inputs: Sequence[Spec], attrs: Attrs, spec: Spec, dialect: Dialect) -> Run:
    """The function that computes the op `attention_backward`; see `attention`."""
    _, result, query, key, value, *masks = inputs
    causal, scale = attrs
    if result.shape[-1] != value.shape[-1] + 1:
        raise Unsupported("the weights were kept")
    source = _source(BackwardWriter, query, key, value, masks, causal, dialect)

    def run(xp: Any, arrays: Sequence[Any], *_: Any) -> Any:
        g, y, *arrays = arrays
        out = xp.empty(spec.shape, dtype=spec.dtype)
        inner = xp.empty(query.shape[:-1], dtype=result.dtype)
        of_queries, of_keys = functions(xp, source.text, (OF_QUERIES, OF_KEYS))
        pointers, numbers = _arguments(xp, (*arrays[:3], g), arrays[3:], query, key, result.dtype.type(scale))
        arguments = (*pointers, xp.ascontiguousarray(y), inner, out, *numbers)
        threads = (source.tiling.threads,)
        for kernel, rows in ((of_queries, query), (of_keys, key)):
            kernel((source.blocks(math.prod(rows.shape[:-2]), rows.shape[-2]),), threads, arguments)
        return out

    return run


def _source(
    writer: type[AttentionWriter],
    query: Spec,
    key: Spec,
    value: Spec,
    masks: Sequence[Spec],
    causal: bool,
    dialect: Dialect,
) -> Source:
    if not all(x.size for x in (query, key, value)):
        raise Unsupported("there is nothing to compute")
    if max(query.shape[-2], key.shape[-2], math.prod(query.shape[:-2])) >= 2**31 - 64:
        raise Unsupported("counts of 64 bits are not written")
    masked = len(_mask_steps(masks[0].shape, query.shape[:-1])[0]) if masks else None
    form = Form(query.dtype, query.shape[-1], value.shape[-1], causal, masked)
    return source_for(writer, form, query.shape[-2], dialect)


def _arguments(
    xp: Any, arrays: Sequence[Any], masks: Sequence[Any], query: Spec, key: Spec, scale: Any
) -> tuple[list[Any], list[Any]]:
    """The first pointers of a kernel, and its numbers. `arrays` are those that are read by steps."""
    heads, queries = query.shape[-3:-1]
    counts = [np.int32(n) for n in (heads, heads // key.shape[-3], queries, key.shape[-2])]
    found = [_in_rows(xp, array) for array in arrays]
    steps = [step for _, three in found for step in three]
    pointers = [array for array, _ in found]
    if masks:
        leading, last = _mask_steps(masks[0].shape, query.shape[:-1])
        pointers = [xp.ascontiguousarray(masks[0]), *pointers]
        steps += [n for pair in leading for n in pair] + list(last)
    return pointers, [*counts, scale, *map(np.int64, steps)]


def _in_rows(xp: Any, array: Any) -> tuple[Any, tuple[int, int, int]]:
    """The array, or a copy in C order, and the elements from a batch, a head and a row to the next."""
    *batch, heads, rows, dim = array.shape
    if not array.flags.c_contiguous and len(batch) < 2 and array.strides[-1] == array.dtype.itemsize:
        steps = [stride // array.dtype.itemsize for stride in array.strides[:-1]]
        if min(steps) >= 0:
            return array, (steps[0] if batch else 0, steps[-2], steps[-1])
    return xp.ascontiguousarray(array), (heads * rows * dim, rows * dim, dim)


def _mask_steps(mask: Shape, rows: Shape) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Leading dimensions of queries, as (extent, step in the mask), and the steps from row to row and key to key.

    Neighbours that the mask differs over, or that it does not, are one dimension; a mask that differs over none needs
    none.
    """
    *lead, _ = rows
    shape = (1,) * (len(rows) + 1 - len(mask)) + mask
    own = [0 if n == 1 else math.prod(shape[d + 1 :]) for d, n in enumerate(shape)]
    merged: list[tuple[int, int]] = []
    for extent, step in zip(lead, own[:-2], strict=True):
        if extent == 1:
            continue
        if merged and (merged[-1][1] == 0) == (step == 0):
            merged[-1] = (merged[-1][0] * extent, step)
        else:
            merged.append((extent, step))
    return [] if not any(step for _, step in merged) else merged, (own[-2], own[-1])
