"""Random numbers by position.

The bits of element p of a tensor are word p of a Philox 4x64-10 stream (Salmon et al., *Parallel random numbers: as
easy as 1, 2, 3*, SC'11) whose key is (seed, stream number). They depend on the seed, on how many tensors the generator
made before, and on the element's place in the *global* tensor, never on the number of ranks: a rank that holds a shard
says which window of the global tensor it is and gets just those numbers.
"""

from __future__ import annotations

import math
import threading
from typing import Any, ClassVar

import numpy as np

from fuel_parallel.arguments import whole
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.node import ZERO, Op, Shape, Spec, apply, define
from fuel_parallel.lazy.ops import creation, elementwise, ordering
from fuel_parallel.lazy.tensor import Tensor

_LANES = 4


def _random_bits_kernel(xp: Any, key: Any, shape: Shape, global_shape: Shape, start: Shape) -> Any:
    key = np.asarray(key) if isinstance(key, np.ndarray) else key.get()
    if not math.prod(shape):
        return xp.zeros(shape, dtype=np.uint64)
    # Dimensions from `inner` on are taken whole, so that the window is runs of consecutive positions.
    inner = len(shape)
    while inner and shape[inner - 1] == global_shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    run = math.prod(shape[outer:])
    strides = [math.prod(global_shape[d + 1 :]) for d in range(len(shape))]
    first = sum(s * stride for s, stride in zip(start, strides, strict=True))
    result = np.empty((math.prod(shape[:outer]), run), dtype=np.uint64)
    for row, index in enumerate(np.ndindex(*shape[:outer])):
        position = first + sum(i * stride for i, stride in zip(index, strides, strict=False))
        result[row] = philox_words(key, position, run)
    return xp.asarray(result.reshape(shape))


def philox_words(key: Any, position: int, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Words `position` to `position + count` of the stream of a key of two 64-bit words."""
    block, lane = divmod(position, _LANES)
    # numpy's generator increments its counter before it makes a block, so block 0 is made from counter -1.
    counter = (block - 1) % (1 << 256)
    words = [(counter >> (64 * i)) & 0xFFFFFFFFFFFFFFFF for i in range(4)]
    generator = np.random.Philox(key=key, counter=np.array(words, dtype=np.uint64))
    raw: np.ndarray[Any, np.dtype[np.uint64]] = generator.random_raw(lane + count)
    return raw[lane:]


_DIGITS = {dtypes.float64: 53, dtypes.float32: 24, dtypes.float16: 11, dtypes.bfloat16: 8}


def _unit_interval(bits: Any, dtype: dtypes.DType) -> Any:
    """Numbers of [0, 1) from the top bits, as many as the dtype has digits: none is rounded up to 1."""
    digits = _DIGITS[dtype]
    wide = dtypes.float64 if dtype == dtypes.float64 else dtypes.float32
    return ((bits >> np.uint64(64 - digits)).astype(wide) * wide.type(2.0**-digits)).astype(dtype, copy=False)


RANDOM_BITS = define(
    Op(
        "random_bits",
        infer=lambda key, shape, global_shape, start: Spec(shape, dtypes.uint64, key.device),
        kernel=_random_bits_kernel,
        vjp=ZERO,
        attr_names=("shape", "global_shape", "start"),
        shapes="[2] -> shape",
        domain=(dtypes.uint64,),
    )
)
RANDOM_UNIFORM = define(
    Op(
        "random_uniform",
        infer=lambda bits, dtype: Spec(bits.shape, dtype, bits.device),
        kernel=lambda xp, bits, dtype: _unit_interval(bits, dtype),
        vjp=ZERO,
        attr_names=("dtype",),
        shapes="[...] -> [...]",
        domain=(dtypes.uint64,),
    )
)


_drawing = threading.Lock()


class Generator:
    """A source of random tensors. Each call takes the next stream; the same calls give the same numbers anywhere.

    `shape` is what this rank gets. A rank that holds a shard of a larger tensor also gives `global_shape` and `start`,
    the position of its first element in it.

    >>> import fuel_parallel.lazy as ft
    >>> whole = ft.random.Generator(7).uniform((4, 2))
    >>> shard = ft.random.Generator(7).uniform((2, 2), global_shape=(4, 2), start=(2, 0))
    >>> bool(ft.all(whole[2:] == shard))
    True
    """

    how_to_get: ClassVar[str] = "such as fuel_parallel.lazy.random.Generator(seed)"

    def __init__(self, seed: int) -> None:
        number = whole(seed)
        if number is None or not 0 <= number < 1 << 64:
            raise ArgumentError(f"Generator: seed is an int from 0 to 2**64 - 1, not {seed!r}")
        self.seed = number
        self.stream = 0

    def __repr__(self) -> str:
        return f"Generator(seed={self.seed}, stream={self.stream})"

    def __state__(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return {"seed": self.seed, "stream": self.stream}

    def __restore__(self, state: dict[str, int]) -> None:
        """Goes on where the generator of a checkpoint was."""
        self.seed, self.stream = state["seed"], state["stream"]

    def bits(self, shape: Any, *, global_shape: Any = None, start: Any = None) -> Tensor:
        """uint64 words, all 64 bits random."""
        extents = creation.check_shape("random", shape)
        whole = extents if global_shape is None else creation.check_shape("random", global_shape)
        first = (0,) * len(extents) if start is None else creation.check_shape("random", start)
        if not len(extents) == len(whole) == len(first) or any(
            s + e > w for s, e, w in zip(first, extents, whole, strict=True)
        ):
            raise ShapeError(f"random: a window of shape {extents} at {first} does not lie in global shape {whole}")
        with _drawing:
            stream, self.stream = self.stream, self.stream + 1
        key = creation.asarray(np.array([self.seed, stream], dtype=np.uint64))
        return Tensor(apply(RANDOM_BITS, (key.node,), extents, whole, first))

    def uniform(self, shape: Any, low: float = 0.0, high: float = 1.0, *, dtype: Any = None, **window: Any) -> Tensor:
        """Uniform on [low, high); where the dtype cannot tell a number from `high`, rounding may give `high` itself."""
        wanted = _float_dtype("uniform", dtype)
        unit = Tensor(apply(RANDOM_UNIFORM, (self.bits(shape, **window).node,), wanted))
        return unit if (low, high) == (0.0, 1.0) else unit * (high - low) + low

    def normal(self, shape: Any, mean: float = 0.0, std: float = 1.0, *, dtype: Any = None, **window: Any) -> Tensor:
        """Normally distributed (Box and Muller, 1958: two uniforms make one value, so that each has its own place)."""
        wanted = _float_dtype("normal", dtype)
        if not std >= 0:
            raise ArgumentError(f"normal: std must not be negative, but is {std!r}")
        wide = dtypes.float64 if wanted == dtypes.float64 else dtypes.float32
        radius = elementwise.sqrt(-2 * elementwise.log(1 - self.uniform(shape, dtype=wide, **window)))
        angle = self.uniform(shape, dtype=wide, **window) * (2 * math.pi)
        unit = radius * elementwise.cos(angle)
        scaled = unit if (mean, std) == (0.0, 1.0) else unit * std + mean
        return creation.astype(scaled, wanted)

    def integers(self, shape: Any, low: int, high: int, *, dtype: Any = None, **window: Any) -> Tensor:
        """Uniform integers of [low, high). The bias is below (high - low) / 2**53."""
        if not low < high:
            raise ArgumentError(f"integers: low must be below high, but they are {low} and {high}")
        unit = self.uniform(shape, dtype=dtypes.float64, **window)
        drawn = creation.astype(elementwise.floor(unit * float(high - low)), dtypes.int64) + low
        return creation.astype(drawn, dtypes.default_int if dtype is None else dtype)

    def bernoulli(self, shape: Any, probability: float, **window: Any) -> Tensor:
        """True with the given probability."""
        if not 0 <= probability <= 1:
            raise ArgumentError(f"bernoulli: probability must lie in [0, 1], but is {probability!r}")
        return self.uniform(shape, **window) < probability

    def permutation(self, size: int) -> Tensor:
        """The integers below `size` in random order."""
        return ordering.argsort(self.bits((size,)))

    def dropout(self, x: Tensor, rate: float, **window: Any) -> Tensor:
        """`x` with each element zeroed with probability `rate` and the others scaled by 1 / (1 - rate)."""
        if not 0 <= rate < 1:
            raise ArgumentError(f"dropout: rate must lie in [0, 1), but is {rate}")
        if rate == 0:
            return x
        kept = self.bernoulli(x.shape, 1 - rate, **window)
        return x * (creation.astype(kept, x.dtype) * (1 / (1 - rate)))


def _float_dtype(function: str, dtype: Any) -> dtypes.DType:
    wanted = dtypes.default_float if dtype is None else dtypes.dtype(dtype)
    if dtypes.kind(wanted) != "real floating":
        raise DTypeError(f"{function}: expected a floating dtype, not {wanted.name}")
    return wanted
