"""What differs between the C dialects of GPUs, in one table: qualifiers, indices, barriers, the names of functions.

CUDA and HIP share one dialect, OpenCL C is another one: generated code holds no C++ beyond these entries, and needs no
header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType

_MATH = (
    *("sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "erf", "pow", "fmod", "hypot", "copysign", "nextafter"),
    *("sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("fabs", "floor", "ceil", "trunc", "rint", "fma"),
)


@dataclass(frozen=True, eq=False)
class Dialect:
    """The words of one dialect.

    `types` are the C types in which values are computed, `stored` those in memory where they differ (16-bit floats are
    loaded and stored as bits). `math` names the functions of floats by dtype. `preamble` defines, whatever the dialect:
    `float_from_bits(unsigned)` and `bits_from_float(float)`; `halves`, where there are any, `load_<half>(bits)` and
    `store_<half>(float)`, which rounds halves to even.

    `shuffle` sets `y` to the `x` of the thread whose number differs in the bit `mask`, one of 32 neighbours; all
    threads of a block come to it. Where threads cannot read each other's registers, it goes through the shared array
    `exchange`, which kernels declare and hand to functions. `shared_bytes` are what every device has for a block.
    """

    kernel: str
    launch_bounds: str
    function: str
    shared: str
    shared_bytes: int
    const_pointer: str
    pointer: str
    thread: str
    block: str
    blocks: str
    barrier: str
    unroll: str
    shuffle: str
    exchange: str
    exchange_parameter: str
    exchange_argument: str
    types: Mapping[DType, str]
    stored: Mapping[DType, str]
    math: Mapping[DType, Mapping[str, str]]
    preamble: str
    halves: str

    def literal(self, value: float, dtype: DType) -> str:
        """A constant, exact: a float in hexadecimal, or by its bits where it is not finite."""
        if dtypes.kind(dtype) == "integral":
            return f"(({self.types[dtype]}){int(value)})"
        rounded = float(np.float32(value)) if dtype != dtypes.float64 else float(value)
        if np.isfinite(rounded):
            return rounded.hex() + ("" if dtype == dtypes.float64 else "f")
        bits = 0x7FC00000 if np.isnan(rounded) else 0x7F800000 if rounded > 0 else 0xFF800000
        return f"(({self.types[dtype]})float_from_bits({bits:#x}u))"

    def storage(self, dtype: DType) -> str:
        """The C type of an array's elements."""
        return self.stored.get(dtype, self.types[dtype])


_TYPES = {
    dtypes.bool_: "bool",
    dtypes.int8: "signed char",
    dtypes.int16: "short",
    dtypes.int32: "int",
    dtypes.int64: "long long",
    dtypes.uint8: "unsigned char",
    dtypes.uint16: "unsigned short",
    dtypes.uint32: "unsigned int",
    dtypes.uint64: "unsigned long long",
    dtypes.float16: "float",
    dtypes.bfloat16: "float",
    dtypes.float32: "float",
    dtypes.float64: "double",
}

_HALVES = """
FUNCTION float load_bfloat16(unsigned short bits) { return float_from_bits((unsigned)bits << 16); }

FUNCTION unsigned short store_bfloat16(float x) {
    unsigned bits = bits_from_float(x);
    if (x != x) return (unsigned short)((bits >> 16) | 0x40u);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#ifdef __CUDA_ARCH__
FUNCTION float load_float16(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

FUNCTION unsigned short store_float16(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#else
FUNCTION float load_float16(unsigned short bits) {
    unsigned sign = (unsigned)(bits & 0x8000u) << 16;
    unsigned rest = (unsigned)(bits & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) return float_from_bits(sign | (rest + 0x70000000u));
    return float_from_bits(sign | bits_from_float(float_from_bits(rest) * 0x1p+112f));
}

FUNCTION unsigned short store_float16(float x) {
    unsigned bits = bits_from_float(x);
    unsigned sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (unsigned short)(sign | 0x7e00u);
    if (bits >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    /* Below the normal numbers the unit in the last place is 2**-24: adding 0.5 makes the adder round to it. */
    unsigned tiny = bits_from_float(float_from_bits(bits) + 0.5f) - 0x3f000000u;
    if (bits < 0x38800000u) return (unsigned short)(sign | tiny);
    return (unsigned short)(sign | ((bits - 0x38000000u + 0xfffu + ((bits >> 13) & 1u)) >> 13));
}
#endif
"""

CUDA = Dialect(
    kernel='extern "C" __global__ void',
    launch_bounds="__launch_bounds__({threads})",
    function="static __device__ inline",
    shared="__shared__",
    shared_bytes=48 << 10,
    const_pointer="const {type}* __restrict__",
    pointer="{type}* __restrict__",
    thread="threadIdx.x",
    block="blockIdx.x",
    blocks="gridDim.x",
    barrier="__syncthreads();",
    unroll="#pragma unroll",
    shuffle="const {type} y = ({type})shuffle_xor(x, mask);",
    exchange="",
    exchange_parameter="",
    exchange_argument="",
    types=_TYPES,
    stored={dtypes.float16: "unsigned short", dtypes.bfloat16: "unsigned short"},
    math={
        dtypes.float64: {name: name for name in _MATH},
        **{d: {name: name + "f" for name in _MATH} for d in (dtypes.float32, dtypes.float16, dtypes.bfloat16)},
    },
    preamble="""
static __device__ inline float float_from_bits(unsigned bits) { return __uint_as_float(bits); }
static __device__ inline unsigned bits_from_float(float x) { return __float_as_uint(x); }
#if defined(__HIP__) || defined(__HIP_PLATFORM_AMD__)
#define shuffle_xor(x, mask) __shfl_xor(x, mask, 32)
#else
#define shuffle_xor(x, mask) __shfl_xor_sync(0xffffffffu, x, mask, 32)
#endif
""",
    halves=_HALVES.replace("FUNCTION", "static __device__ inline"),
)
"""CUDA C, and HIP by way of CuPy."""

CUDA_IN_PLACE = replace(CUDA, const_pointer="const {type}*", pointer="{type}*")
"""For outputs that are written over inputs: nothing may be assumed of pointers."""

OPENCL = Dialect(
    kernel="__kernel",
    launch_bounds="__attribute__((reqd_work_group_size({threads}, 1, 1))) void",
    function="static",
    shared="__local",
    shared_bytes=32 << 10,
    const_pointer="__global const {type}* restrict",
    pointer="__global {type}* restrict",
    thread="get_local_id(0)",
    block="get_group_id(0)",
    blocks="get_num_groups(0)",
    barrier="barrier(CLK_LOCAL_MEM_FENCE);",
    unroll="#pragma unroll",
    shuffle="""barrier(CLK_LOCAL_MEM_FENCE);
        ((__local {type}*)exchange)[get_local_id(0)] = x;
        barrier(CLK_LOCAL_MEM_FENCE);
        const {type} y = ((__local {type}*)exchange)[get_local_id(0) ^ mask];""",
    exchange="__local ulong exchange[{threads}];",
    exchange_parameter=", __local ulong* exchange",
    exchange_argument=", exchange",
    types={**_TYPES, dtypes.int64: "long", dtypes.uint64: "ulong"},
    stored={dtypes.bool_: "uchar", dtypes.float16: "unsigned short", dtypes.bfloat16: "unsigned short"},
    math={d: {name: name for name in _MATH} for d in dtypes.FLOATING},
    preamble="""
#pragma OPENCL FP_CONTRACT OFF
#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#endif
static float float_from_bits(unsigned bits) { return as_float(bits); }
static unsigned bits_from_float(float x) { return as_uint(x); }
""",
    halves=_HALVES.replace("FUNCTION", "static"),
)
"""OpenCL C 1.2: sub-groups are an extension that many devices lack. A pointer to bool cannot be a kernel's argument."""
