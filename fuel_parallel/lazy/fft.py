"""The array API standard's extension `fft`: `fuel_parallel.lazy.fft`.

Four transforms along one axis are ops; the others are made of them. The factor 1/n stands before the inverse with
`norm="backward"`, before the transform with "forward", and as 1/sqrt(n) before both with "ortho". Inputs are cut or
filled with zeros at the end to the length that is asked for. float16 and bfloat16 are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.dtypes import DType
from fuel_parallel.lazy.node import Op, Spec, apply, define
from fuel_parallel.lazy.ops import creation, elementwise, manipulation
from fuel_parallel.lazy.ops.elementwise import INEXACT, in_float32
from fuel_parallel.lazy.ops.reductions import normalize_axis
from fuel_parallel.lazy.tensor import Tensor

__all__ = [
    "fft",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftfreq",
    "rfftn",
]

_OTHER_WAY = {"backward": "forward", "forward": "backward", "ortho": "ortho"}
"""The norm under which the transform has the factor that its inverse had."""


def _transform(name: str, extent: Callable[[int], int], result: Callable[[DType], DType], vjp: Any) -> Op:
    def infer(x: Spec, axis: int, norm: str) -> Spec:
        shape = (*x.shape[:axis], extent(x.shape[axis]), *x.shape[axis + 1 :])
        return Spec(shape, result(x.dtype), x.device)

    def kernel(xp: Any, x: Any, axis: int, norm: str) -> Any:
        return getattr(xp.fft, name)(x, axis=axis, norm=norm)

    return define(Op(name, infer, in_float32(kernel), (vjp,), aliases=False, attr_names=("axis", "norm")))


def _complex_of(d: DType) -> DType:
    return dtypes.complex128 if d == dtypes.float64 else dtypes.complex64


# The matrix of the transform is symmetric, so that each is its own adjoint.
FFT: Op = _transform("fft", lambda n: n, lambda d: d, lambda g, y, x, axis, norm: _apply(FFT, g, axis, norm))
IFFT: Op = _transform("ifft", lambda n: n, lambda d: d, lambda g, y, x, axis, norm: _apply(IFFT, g, axis, norm))
RFFT = _transform("rfft", lambda n: n // 2 + 1, _complex_of, lambda g, y, x, axis, norm: _rfft_vjp(g, x, axis, norm))
IRFFT = define(
    Op(
        "irfft",
        infer=lambda x, n, axis, norm: Spec(
            (*x.shape[:axis], n, *x.shape[axis + 1 :]), dtypes.real_of(x.dtype), x.device
        ),
        kernel=lambda xp, x, n, axis, norm: xp.fft.irfft(x, n, axis=axis, norm=norm),
        vjp=(lambda g, y, x, n, axis, norm: _irfft_vjp(g, n, axis, norm),),
        aliases=False,
        attr_names=("n", "axis", "norm"),
    )
)


def _apply(op: Op, x: Tensor, axis: int, norm: str) -> Tensor:
    return Tensor(apply(op, (x.node,), axis, norm))


def _rfft_vjp(g: Tensor, x: Tensor, axis: int, norm: str) -> Tensor:
    whole = _apply(FFT, _resized(g, x.shape[axis], axis), axis, norm)
    return creation.astype(elementwise.real(whole), x.dtype)


def _irfft_vjp(g: Tensor, n: int, axis: int, norm: str) -> Tensor:
    """Every frequency but 0 and, for an even n, n/2 stands for its conjugate, too, and so counts twice."""
    half = elementwise.conj(_apply(RFFT, g, axis, _OTHER_WAY[norm]))
    count = half.shape[axis]
    single = {0, n // 2} if n % 2 == 0 else {0}
    weights = creation.asarray([1.0 if k in single else 2.0 for k in range(count)], dtype=g.dtype, device=g.device)
    return half * manipulation.reshape(weights, (count,) + (1,) * (g.ndim - axis - 1))


def _resized(x: Tensor, n: int, axis: int) -> Tensor:
    """Cut or filled with zeros at the end of an axis."""
    if n <= x.shape[axis]:
        return x if n == x.shape[axis] else x[(slice(None),) * axis + (slice(n),)]
    return manipulation.pad(x, [(0, n - x.shape[axis] if a == axis else 0) for a in range(x.ndim)])


def _prepared(function: str, x: Any, n: int | None, axis: int, norm: str) -> tuple[Tensor, int, int]:
    """The tensor, the length of the transform (its own by default), and the axis from the front."""
    if norm not in _OTHER_WAY:
        raise ArgumentError(f"{function}: norm is 'backward', 'ortho' or 'forward', not {norm!r}")
    x = creation.to_tensor(function, x)
    elementwise.check_domain(function, x.dtype, INEXACT)
    place = normalize_axis(function, axis, x.ndim)
    length = x.shape[place] if n is None else n
    if length < 1:
        raise ShapeError(
            f"{function}: expected at least one element along axis {axis}, but it is {length} of {x.shape}"
        )
    return x, length, place


def _as_complex(x: Tensor) -> Tensor:
    return x if x.dtype in dtypes.COMPLEX else creation.astype(x, _complex_of(x.dtype))


def _check_real(function: str, x: Tensor) -> None:
    if x.dtype in dtypes.COMPLEX:
        raise DTypeError(f"{function}: expected real numbers, but the dtype is {x.dtype.name}; use fft, or real(x)")


# Along one axis.


def fft(x: Tensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The discrete Fourier transform along `axis`, of length `n`.

    >>> fft(creation.asarray([1.0, 0.0, 0.0, 0.0])).tolist()
    [(1+0j), (1+0j), (1+0j), (1+0j)]
    """
    x, n, axis = _prepared("fft", x, n, axis, norm)
    return _apply(FFT, _resized(_as_complex(x), n, axis), axis, norm)


def ifft(x: Tensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The inverse of `fft`."""
    x, n, axis = _prepared("ifft", x, n, axis, norm)
    return _apply(IFFT, _resized(_as_complex(x), n, axis), axis, norm)


def rfft(x: Tensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The frequencies 0 to n // 2 of the transform of real numbers; the others are their conjugates."""
    x, n, axis = _prepared("rfft", x, n, axis, norm)
    _check_real("rfft", x)
    return _apply(RFFT, _resized(x, n, axis), axis, norm)


def irfft(x: Tensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The inverse of `rfft`: `n` real numbers, 2 * (extent - 1) unless told."""
    x, half, axis = _prepared("irfft", x, None, axis, norm)
    length = 2 * (half - 1) if n is None else n
    if length < 1:
        raise ShapeError(f"irfft: the result would have {length} elements along axis {axis}; give n")
    x = _resized(_as_complex(x), length // 2 + 1, axis)
    return Tensor(apply(IRFFT, (x.node,), length, axis, norm))


def hfft(x: Tensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The real transform of a signal with x[-k] = conj(x[k]), of which the first half is given."""
    _prepared("hfft", x, None, axis, norm)
    return irfft(elementwise.conj(x), n=n, axis=axis, norm=_OTHER_WAY[norm])


def ihfft(x: Tensor, /, *, n: int | None = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """The inverse of `hfft`."""
    _check_real("ihfft", _prepared("ihfft", x, n, axis, norm)[0])
    return elementwise.conj(rfft(x, n=n, axis=axis, norm=_OTHER_WAY[norm]))


# Along several axes.


def _axes(
    function: str, x: Tensor, s: Sequence[int] | None, axes: Sequence[int] | None
) -> list[tuple[int, int | None]]:
    """Pairs of an axis from the front and the length there."""
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    places = [normalize_axis(function, a, x.ndim) for a in axes]
    lengths = [None] * len(places) if s is None else list(s)
    if len(lengths) != len(places):
        raise ArgumentError(f"{function}: s {tuple(lengths)} and axes {tuple(axes)} must have the same length")
    return list(zip(places, lengths, strict=True))


def fftn(
    x: Tensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Tensor:
    """`fft` along several axes, all by default, of the lengths `s`."""
    for axis, n in _axes("fftn", x, s, axes):
        x = fft(x, n=n, axis=axis, norm=norm)
    return x


def ifftn(
    x: Tensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Tensor:
    """The inverse of `fftn`."""
    for axis, n in _axes("ifftn", x, s, axes):
        x = ifft(x, n=n, axis=axis, norm=norm)
    return x


def rfftn(
    x: Tensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Tensor:
    """`rfft` along the last of several axes, then `fft` along the others."""
    *others, (last, length) = _some_axes("rfftn", x, s, axes)
    x = rfft(x, n=length, axis=last, norm=norm)
    for axis, n in others:
        x = fft(x, n=n, axis=axis, norm=norm)
    return x


def irfftn(
    x: Tensor, /, *, s: Sequence[int] | None = None, axes: Sequence[int] | None = None, norm: str = "backward"
) -> Tensor:
    """The inverse of `rfftn`."""
    *others, (last, length) = _some_axes("irfftn", x, s, axes)
    for axis, n in others:
        x = ifft(x, n=n, axis=axis, norm=norm)
    return irfft(x, n=length, axis=last, norm=norm)


def _some_axes(
    function: str, x: Tensor, s: Sequence[int] | None, axes: Sequence[int] | None
) -> list[tuple[int, int | None]]:
    found = _axes(function, x, s, axes)
    if not found:
        raise ShapeError(f"{function}: expected at least one axis, but x has shape {x.shape} and axes is {axes}")
    return found


# Frequencies and their order.


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: str | None = None) -> Tensor:
    """The frequencies of `fft` of length `n` with a sample every `d`, in cycles a unit: 0, 1, ..., -2, -1 over n * d.

    >>> fftfreq(4).tolist()
    [0.0, 0.25, -0.5, -0.25]
    """
    wanted = _frequency_dtype("fftfreq", n, dtype)
    numbers = creation.arange(n, device=device)
    signed = numbers - n * creation.astype(numbers >= (n + 1) // 2, dtypes.int64)
    return creation.astype(creation.astype(signed, dtypes.float64) / (n * d), wanted)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: str | None = None) -> Tensor:
    """The frequencies of `rfft` of length `n`: 0 to n // 2 over n * d."""
    wanted = _frequency_dtype("rfftfreq", n, dtype)
    return creation.astype(creation.arange(n // 2 + 1, dtype=dtypes.float64, device=device) / (n * d), wanted)


def _frequency_dtype(function: str, n: int, dtype: Any) -> DType:
    if n < 1:
        raise ArgumentError(f"{function}: n must be at least 1, but is {n}")
    wanted = dtypes.default_float if dtype is None else dtypes.dtype(dtype)
    elementwise.check_domain(function, wanted, dtypes.FLOATING)
    return wanted


def fftshift(x: Tensor, /, *, axes: int | Sequence[int] | None = None) -> Tensor:
    """Frequency 0 moved to the middle of `axes` (all by default)."""
    return _shifted("fftshift", x, axes, lambda n: n // 2)


def ifftshift(x: Tensor, /, *, axes: int | Sequence[int] | None = None) -> Tensor:
    """The inverse of `fftshift`."""
    return _shifted("ifftshift", x, axes, lambda n: -(n // 2))


def _shifted(function: str, x: Tensor, axes: int | Sequence[int] | None, by: Callable[[int], int]) -> Tensor:
    given = range(x.ndim) if axes is None else (axes,) if isinstance(axes, int) else axes
    places = tuple(normalize_axis(function, a, x.ndim) for a in given)
    return manipulation.roll(x, tuple(by(x.shape[a]) for a in places), axis=places)
