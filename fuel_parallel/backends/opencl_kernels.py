"""Sources of the OpenCL kernels that are not generated: copies of grids, gathers, casts of floats, products."""

from __future__ import annotations

from functools import cache

TILE = 16
"""Rows and columns of a tile of a product: 256 work-items, which every device takes."""

_BITS = {1: "uchar", 2: "ushort", 4: "uint", 8: "ulong", 16: "ulong2"}
"""The C type that moves an element of so many bytes."""

TYPES = {
    "int8": "char",
    "int16": "short",
    "int32": "int",
    "int64": "long",
    "uint8": "uchar",
    "uint16": "ushort",
    "uint32": "uint",
    "uint64": "ulong",
    "float32": "float",
    "float64": "double",
}
"""The C type of a dtype whose elements are computed as they are stored."""


@cache
def strided(itemsize: int, ndim: int) -> str:
    """Copies a grid of `ndim` dimensions between two arrays. Each dimension has an extent and two steps."""
    grid = "".join(f", const long e{d}, const long to{d}, const long from{d}" for d in range(ndim))
    walk = "\n".join(
        f"    c = rest % e{d}; rest /= e{d}; to += c * to{d}; from += c * from{d};" for d in reversed(range(ndim))
    )
    return f"""
__kernel void strided(__global {_BITS[itemsize]}* out, long to, __global const {_BITS[itemsize]}* in, long from,
                      const long size{grid}) {{
    long rest = (long)get_global_id(0), c;
    if (rest >= size) return;
{walk}
    out[to] = in[from];
}}
"""


@cache
def take(itemsize: int, index: str) -> str:
    """Elements along one axis at indices; negative ones count from the end. Notes in `outside` that one is too far."""
    bits, at = _BITS[itemsize], TYPES[index]
    return f"""
__kernel void take(__global {bits}* restrict out, __global const {bits}* restrict in,
                   __global const {at}* restrict indices, __global int* outside, const long size, const long inner,
                   const long count, const long extent) {{
    const long i = (long)get_global_id(0);
    if (i >= size) return;
    const long outer = i / (inner * count);
    long at = (long)indices[i / inner % count];
    if (at < 0) at += extent;
    if (at < 0 || at >= extent) {{
        *outside = 1;
        return;
    }}
    out[i] = in[(outer * extent + at) * inner + i % inner];
}}
"""


@cache
def chain(index: str) -> str:
    """For each of `count` indices the next equal one, or -1; `first[row]` is the first index of a row.

    Each work-item looks through all others, in order: as many reads as pairs, of what caches hold.
    """
    at = TYPES[index]
    return f"""
__kernel void chain(__global int* restrict first, __global int* restrict next, __global const {at}* restrict indices,
                    const int count, const long extent) {{
    const int i = (int)get_global_id(0);
    if (i >= count) return;
    const long row = (long)indices[i];
    int k = i + 1, before = 0;
    while (k < count && indices[k] != row && indices[k] + extent != row && indices[k] != row + extent) ++k;
    next[i] = k < count ? k : -1;
    for (int j = 0; j < i && !before; ++j)
        before = indices[j] == row || indices[j] + extent == row || indices[j] == row + extent;
    if (!before && row >= -extent && row < extent) first[row < 0 ? row + extent : row] = i;
}}
"""


@cache
def add_rows(dtype: str) -> str:
    """Adds along one axis the values that have the same index, in their order; see `chain`."""
    kind = TYPES[dtype]
    return f"""
__kernel void add_rows(__global {kind}* restrict out, __global const {kind}* restrict in,
                       __global const int* restrict first, __global const int* restrict next, const long size,
                       const long inner, const long count, const long extent) {{
    const long i = (long)get_global_id(0);
    if (i >= size) return;
    const long outer = i / (inner * extent);
    {kind} total = out[i];
    for (int k = first[i / inner % extent]; k >= 0; k = next[k]) total += in[(outer * count + k) * inner + i % inner];
    out[i] = total;
}}
"""


@cache
def scan(source: str, result: str, sign: str) -> str:
    """Running sums (`+`) or products (`*`) along one axis: one work-item for all of a line, in order."""
    return f"""
__kernel void scan(__global {TYPES[result]}* restrict out, __global const {TYPES.get(source, "uchar")}* restrict in,
                   const long lines, const long inner, const long extent) {{
    const long i = (long)get_global_id(0);
    if (i >= lines) return;
    const long start = i / inner * inner * extent + i % inner;
    {TYPES[result]} total = {"0" if sign == "+" else "1"};
    for (long k = 0; k < extent; ++k) {{
        total = total {sign} in[start + k * inner];
        out[start + k * inner] = total;
    }}
}}
"""


_LOAD = {
    "float16": "vload_half({i}, (__global const half*){p})",
    "bfloat16": "as_float((uint){p}[{i}] << 16)",
}
_STORE = {
    "float16": "vstore_half_rte((float)({x}), {i}, (__global half*){p})",
    "bfloat16": "{p}[{i}] = to_bfloat16({x})",
}
_TO_BFLOAT16 = """
static ushort to_bfloat16(const float x) {
    const uint bits = as_uint(x);
    if (x != x) return (ushort)((bits >> 16) | 0x40u);
    return (ushort)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
"""


@cache
def cast(source: str, result: str) -> str:
    """One floating dtype into another."""
    load = _LOAD.get(source, "{p}[{i}]").format(p="in", i="i")
    store = _STORE.get(result, f"{{p}}[{{i}}] = ({TYPES.get(result, 'float')})({{x}})").format(p="out", i="i", x=load)
    return f"""{_TO_BFLOAT16}
__kernel void cast(__global {TYPES.get(result, "ushort")}* restrict out,
                   __global const {TYPES.get(source, "ushort")}* restrict in, const long size) {{
    const long i = (long)get_global_id(0);
    if (i < size) {store};
}}
"""


@cache
def matmul(dtype: str) -> str:
    """Products of matrices [m, k] and [k, n], one for each index of the third dimension of the grid.

    Each matrix has a step from row to row and one from column to column, so that either may lie turned in memory.

    A group computes a tile of the result; tiles of both operands pass local memory, so that each element is read
    `m / TILE` or `n / TILE` times from global memory.
    """
    kind = TYPES[dtype]
    return f"""
#pragma OPENCL FP_CONTRACT OFF
#define TILE {TILE}
__kernel __attribute__((reqd_work_group_size(TILE, TILE, 1)))
void matmul(__global {kind}* restrict out, __global const {kind}* restrict a, __global const {kind}* restrict b,
            const int m, const int n, const int k, const long a_step, const long b_step,
            const long a_row, const long a_column, const long b_row, const long b_column) {{
    __local {kind} left[TILE][TILE], right[TILE][TILE];
    const int x = (int)get_local_id(0), y = (int)get_local_id(1);
    const int column = (int)get_global_id(0), row = (int)get_global_id(1);
    const long batch = (long)get_global_id(2);
    a += batch * a_step;
    b += batch * b_step;
    {kind} total = 0;
    for (int first = 0; first < k; first += TILE) {{
        left[y][x] = row < m && first + x < k ? a[row * a_row + (first + x) * a_column] : ({kind})0;
        right[y][x] = column < n && first + y < k ? b[(first + y) * b_row + column * b_column] : ({kind})0;
        barrier(CLK_LOCAL_MEM_FENCE);
        for (int i = 0; i < TILE; ++i) total += left[y][i] * right[i][x];
        barrier(CLK_LOCAL_MEM_FENCE);
    }}
    if (row < m && column < n) out[(batch * m + row) * n + column] = total;
}}
"""
