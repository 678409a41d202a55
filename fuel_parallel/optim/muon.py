"""Muon, which steps by orthogonal matrices; and AdamW for what is no matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.ops import elementwise, manipulation, reductions
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter
from fuel_parallel.optim.adam import AdamW
from fuel_parallel.optim.optimizer import Optimizer, PerParameter, zeros_for

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients: singular values come close to 1 in five iterations, and stay between about 0.7 and 1.2."""

SCALINGS = ("rms", "spectral")


class Muon(Optimizer):
    """Momentum whose matrices are made orthogonal before each step (Jordan et al., 2024, kellerjordan.github.io).

    m = momentum * m + g; p = p - lr * (scale * orthogonal(g + momentum * m) + weight_decay * p), for matrices. All
    else, and matrices that are left out by `matrices`, such as embeddings and the last layer, is AdamW's with the same
    learning rate times its `lr_scale`.

    A matrix of which this rank holds a part (it carries an `fp.Shard`) is put together over `comm` for the step, one at
    a time: each rank orthogonalises all of it, and takes its part. Parts of any kind will do, and copies of parts.

    Args:
        parameters: What it trains.
        lr: The learning rate.
        comm: The ranks that hold the other parts of matrices, such as `mesh["tp"]`; None if none is cut.
        momentum: How much of the last steps' gradients stays.
        nesterov: Whether the step looks ahead, by g + momentum * m, or is by m alone.
        iterations: Of Newton and Schulz.
        scaling: "rms" makes a step as large as one of AdamW, 0.2 * sqrt(the longer side), so that one learning rate
            serves all (Liu et al., 2025, arXiv:2502.16982); "spectral" is Jordan's, sqrt(max(1, outputs / inputs)).
        matrices: Whether each parameter is Muon's; None for all with two dimensions.
        betas: AdamW's.
        eps: AdamW's.
        weight_decay: How much of each parameter a step of rate 1 takes away; one number, or one for each parameter.
        lr_scale: Factors of the learning rate; one number, or one for each parameter.

    >>> import fuel_parallel.lazy as ft
    >>> weight, bias = Parameter(ft.zeros((2, 2))), Parameter(ft.zeros(2))
    >>> optimizer = Muon([weight, bias], lr=0.1, weight_decay=[0.01, 0.0])
    >>> optimizer.update([ft.asarray([[3.0, 0.0], [0.0, -2.0]]), ft.ones(2)])
    >>> print(weight.numpy().round(2))
    [[-0.03  0.  ]
     [ 0.    0.02]]
    """

    elementwise = False

    @checked
    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        *,
        comm: Communicator | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        iterations: int = 5,
        scaling: str = "rms",
        matrices: Sequence[bool] | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: PerParameter = 0.01,
        lr_scale: PerParameter = 1.0,
    ) -> None:
        super().__init__(parameters, lr, lr_scale=lr_scale, weight_decay=weight_decay)
        if not 0 <= momentum < 1:
            raise ArgumentError(f"Muon: momentum must lie in [0, 1), but is {momentum!r}")
        if scaling not in SCALINGS:
            raise ArgumentError(f"Muon: scaling is one of {', '.join(map(repr, SCALINGS))}, not {scaling!r}")
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
            raise ArgumentError(f"Muon: iterations is a whole number of at least 1, not {iterations!r}")
        self.comm, self.momentum, self.nesterov = comm, momentum, nesterov
        self.iterations, self.scaling = iterations, scaling
        self.is_matrix = _checked(self.parameters, matrices, comm)
        self._momenta = zeros_for(self._mine(self.parameters))
        others = [i for i, is_matrix in enumerate(self.is_matrix) if not is_matrix]
        self._adamw = None
        if others:
            self._adamw = AdamW(
                [self.parameters[i] for i in others],
                lr,
                betas=betas,
                eps=eps,
                weight_decay=[self.weight_decay[i] for i in others],
                lr_scale=[self.lr_scale[i] for i in others],
            )
            self._adamw._lr = self._lr

    def _update(self, gradients: list[Tensor]) -> None:
        if self._adamw is not None:
            self._adamw._update([g for g, is_matrix in zip(gradients, self.is_matrix, strict=True) if not is_matrix])
        scalars = self._mine(self._scalars(lambda rate, decay: (rate, 1 - rate * decay)))
        matrices = zip(self._mine(self.parameters), self._momenta, self._mine(gradients), scalars, strict=True)
        for p, m, g, (rate, kept) in matrices:
            m.assign(m * self.momentum + g)
            step = self._orthogonal(g + m * self.momentum if self.nesterov else Tensor(m.node), p)
            p.assign(p * kept - step * (rate * _scale(p, self.scaling)))

    def _mine(self, values: Sequence[Any]) -> list[Any]:
        return [value for value, is_matrix in zip(values, self.is_matrix, strict=True) if is_matrix]

    def _orthogonal(self, x: Tensor, parameter: Parameter) -> Tensor:
        """This rank's part of the orthogonalised whole."""
        shard = parameter.shard
        if shard is None or self.comm is None or self.comm.world_size == 1:
            return newton_schulz(x, self.iterations)
        # Every rank puts what counts as its own into a matrix of zeros. Unlike an all-gather that needs no rule of how
        # parts are cut, and it is one collective on all ranks, also on those that hold nothing, or everything.
        spans = shard.counted(x.shape)
        widths = [
            (start + span.start, extent - start - span.stop)
            for start, span, extent in zip(shard.start, spans, shard.global_shape, strict=True)
        ]
        own = x[tuple(slice(span.start, span.stop) for span in spans)]
        whole = newton_schulz(self.comm.all_reduce(manipulation.pad(own, widths)), self.iterations)
        return whole[tuple(slice(start, start + n) for start, n in zip(shard.start, x.shape, strict=True))]

    def __state__(self) -> dict[str, Any]:
        state = {"lr": self.lr, "momenta": dict(zip(self._mine(self.parameters), self._momenta, strict=True))}
        return state if self._adamw is None else state | {"adamw": _without_rate(self._adamw.__state__())}

    def __tensors__(self) -> list[Any]:
        adamw = [] if self._adamw is None else self._adamw.__tensors__()
        return [*self._mine(self.parameters), *self._momenta, *adamw]


def newton_schulz(x: Tensor, iterations: int = 5) -> Tensor:
    """A matrix with the singular vectors of `x`, and singular values near 1: what is nearest to it and orthogonal.

    Each iteration takes x to a*x + (b*A + c*A@A) @ x with A = x @ x.T, a polynomial in the singular values.

    >>> import fuel_parallel.lazy as ft
    >>> print(newton_schulz(ft.asarray([[30.0, 0.0], [0.0, 40.0]])).numpy().round(1))
    [[0.7 0. ]
     [0.  1.1]]
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = x.shape[0] > x.shape[1]
    x = x.mT if is_tall else x
    x = x / (elementwise.sqrt(reductions.sum(elementwise.square(x))) + 1e-7)
    for _ in range(iterations):
        gram = x @ x.mT
        x = x * a + (gram * b + (gram @ gram) * c) @ x
    return x.mT if is_tall else x


def _scale(parameter: Parameter, scaling: str) -> float:
    rows, columns = parameter.shape if parameter.shard is None else parameter.shard.global_shape
    if scaling == "rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, columns / rows)) if rows else 1.0


def _checked(
    parameters: list[Parameter], matrices: Sequence[bool] | None, comm: Communicator | None
) -> tuple[bool, ...]:
    found = [p.ndim == 2 for p in parameters] if matrices is None else list(matrices)
    if len(found) != len(parameters):
        raise ArgumentError(f"Muon: matrices has {len(found)} values for {len(parameters)} parameters; give one each")
    for index, (parameter, is_matrix) in enumerate(zip(parameters, found, strict=True)):
        if is_matrix and parameter.ndim != 2:
            raise ArgumentError(
                f"Muon: parameter {index} has shape {parameter.shape}, which is no matrix; leave it to AdamW by "
                f"matrices[{index}] = False"
            )
        if is_matrix and parameter.shard is not None and comm is None:
            raise ArgumentError(
                f"Muon: parameter {index} is a part of a matrix of shape {parameter.shard.global_shape}; give the "
                'communicator of the ranks that hold the others, such as comm=mesh["tp"]'
            )
    return tuple(map(bool, found))


def _without_rate(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name != "lr"}
