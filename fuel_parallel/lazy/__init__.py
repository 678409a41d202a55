"""Lazy tensors with the names of the array API standard (2024.12), and the functions of neural networks.

>>> import fuel_parallel.lazy as ft
>>> x = ft.linspace(0, 1, 5)
>>> ft.sum(x * x).item()
1.875
"""

import math as _math

from fuel_parallel.lazy import random
from fuel_parallel.lazy.autograd import grad, value_and_grad
from fuel_parallel.lazy.dtypes import (
    bfloat16,
    complex64,
    complex128,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    isdtype,
    uint8,
    uint16,
    uint32,
    uint64,
)
from fuel_parallel.lazy.dtypes import bool_ as bool
from fuel_parallel.lazy.dtypes import dtype as dtype
from fuel_parallel.lazy.inspection import __array_namespace_info__, finfo, iinfo
from fuel_parallel.lazy.ops.binary import (
    add,
    atan2,
    bitwise_and,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    clip,
    copysign,
    divide,
    equal,
    floor_divide,
    greater,
    greater_equal,
    hypot,
    less,
    less_equal,
    logaddexp,
    logical_and,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    multiply,
    nextafter,
    not_equal,
    pow,
    remainder,
    subtract,
    where,
)
from fuel_parallel.lazy.ops.contraction import einsum, matmul, tensordot, vecdot
from fuel_parallel.lazy.ops.creation import (
    arange,
    asarray,
    astype,
    can_cast,
    empty,
    empty_like,
    eye,
    from_dlpack,
    full,
    full_like,
    linspace,
    meshgrid,
    ones,
    ones_like,
    result_type,
    stop_gradient,
    to_device,
    tril,
    triu,
    zeros,
    zeros_like,
)
from fuel_parallel.lazy.ops.elementwise import (
    abs,
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atanh,
    bitwise_invert,
    ceil,
    conj,
    cos,
    cosh,
    erf,
    exp,
    expm1,
    floor,
    gelu,
    imag,
    isfinite,
    isinf,
    isnan,
    log,
    log1p,
    log2,
    log10,
    logical_not,
    negative,
    positive,
    real,
    reciprocal,
    relu,
    round,
    rsqrt,
    sigmoid,
    sign,
    signbit,
    silu,
    sin,
    sinh,
    sqrt,
    square,
    tan,
    tanh,
    trunc,
)
from fuel_parallel.lazy.ops.indexing import one_hot, take, take_along_axis
from fuel_parallel.lazy.ops.manipulation import (
    broadcast_arrays,
    broadcast_to,
    concat,
    diff,
    expand_dims,
    flip,
    matrix_transpose,
    moveaxis,
    pad,
    permute_dims,
    repeat,
    reshape,
    roll,
    split,
    squeeze,
    stack,
    tile,
    unstack,
)
from fuel_parallel.lazy.ops.neural import (
    cross_entropy,
    embedding,
    layer_norm,
    log_softmax,
    rms_norm,
    scaled_dot_product_attention,
    softmax,
)
from fuel_parallel.lazy.ops.ordering import argsort, cumulative_prod, cumulative_sum, searchsorted, sort, topk
from fuel_parallel.lazy.ops.reductions import (
    all,
    any,
    argmax,
    argmin,
    count_nonzero,
    logsumexp,
    max,
    mean,
    min,
    prod,
    std,
    sum,
    var,
)
from fuel_parallel.lazy.show import show
from fuel_parallel.lazy.tensor import Tensor

e = _math.e
pi = _math.pi
inf = _math.inf
nan = _math.nan
newaxis = None
__array_api_version__ = "2024.12"

__all__ = [name for name in dir() if not name.startswith("_") or name in ("__array_namespace_info__",)]
