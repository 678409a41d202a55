"""ZeRO-1 and ZeRO-2: what only the update needs is cut over the ranks of data parallelism (arXiv:1910.02054).

Each rank updates its rows of every parameter, so it holds the optimizer's state for these alone, and all ranks exchange
the new rows. In stage 2 it receives the gradients of its rows alone, too. Stage 3 is `shard_parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from fuel_parallel.arguments import checked
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.data_parallel.gradients import BUCKET_BYTES, average_gradients, buckets
from fuel_parallel.data_parallel.rows import Bucket, check_same, own_rows, shard_of_rows
from fuel_parallel.data_parallel.sharded_parameters import ShardedParameter
from fuel_parallel.errors import ArgumentError
from fuel_parallel.lazy.ops import creation
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter, Shard, Variable
from fuel_parallel.optim.optimizer import Optimizer, check_gradients, rekeyed


class ShardedOptimizer:
    """An optimizer whose state is cut over the ranks of a communicator.

    Args:
        make: Makes the optimizer of this rank's rows, such as `lambda rows: fp.optim.AdamW(rows, lr=3e-4)`; in 16 bits
            `lambda rows: fp.optim.MixedPrecision(rows, make, comm=world)`, which keeps float32 masters of the rows.
        parameters: The whole parameters, alike on all ranks of `comm`; with tensor parallelism, this rank's parts.
        comm: The ranks that hold the same parameters: `mesh["dp"]`.
        stage: 1 cuts the optimizer's state, 2 the gradients as well.
        bucket_bytes: Gradients and new values travel in buckets of about this size.

    A collective call. Raises `ArgumentError` for an optimizer that does not work element by element, and
    `CommunicatorError` where ranks have different parameters.

    >>> import fuel_parallel as fp
    >>> from fuel_parallel import IdentityComm
    >>> model = fp.Linear(3, 2, fp.lazy.random.Generator(0))
    >>> optimizer = ShardedOptimizer(lambda rows: fp.optim.AdamW(rows, lr=1e-3), model.parameters(), IdentityComm())
    >>> loss = fp.lazy.sum(model(fp.lazy.ones((4, 3))))
    >>> optimizer.update(fp.lazy.grad(loss, model.parameters()))    # of this rank's loss: the mean is taken here
    >>> fp.realize(loss, model, optimizer)
    """

    @checked
    def __init__(
        self,
        make: Callable[[list[Parameter]], Optimizer],
        parameters: Sequence[Parameter],
        comm: Communicator,
        *,
        stage: int = 2,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if stage not in (1, 2):
            raise ArgumentError(
                f"ShardedOptimizer: stage is 1 or 2, not {stage!r}; for stage 3 call fp.data_parallel.shard_parameters"
                "(model, comm) and give its parameters to an ordinary optimizer"
            )
        self.parameters = list(parameters)
        self.stage = stage
        self._comm, self._bucket_bytes = comm, bucket_bytes
        self._check_parameters()
        self.shards = [_rows_as_parameter(p, comm) for p in self.parameters]
        self.inner = make(self.shards)
        self._check_inner(make)
        self._whole_of = dict(zip(self.shards, self.parameters, strict=True))
        for shard, variable in self._state_of_shards():
            variable.shard = shard.shard
        self._forget_rows()

    @property
    def lr(self) -> float:
        """The learning rate, which may be set anew before each update."""
        return self.inner.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self.inner.lr = value

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of the means over ranks: for what is done with gradients before the update.

        Sums of these over several batches are the gradient of all of them; `update(…, reduced=True)` takes them. In
        stage 2 buckets are reduce-scattered, the last gradients first, and a whole gradient is let go when its bucket
        has left. In stage 1 they are all-reduced.
        """
        check_gradients(
            "update", self.parameters, gradients, "; for rows that reduce_gradients has made, say reduced=True"
        )
        if self._comm.world_size == 1:
            return list(gradients)
        if self.stage == 1:
            averaged = average_gradients(list(gradients), self._comm, bucket_bytes=self._bucket_bytes)
            return [own_rows(g, self._comm) for g in averaged]
        return self._by_bucket(gradients, Bucket.mean_rows, gradients)

    def update(self, gradients: Sequence[Tensor], *, reduced: bool = False) -> None:
        """One step, with this rank's gradient for each parameter; the mean over ranks is taken here.

        With `reduced` they are what `reduce_gradients` gave, or sums of that, or that clipped.
        """
        rows = list(gradients) if reduced else self.reduce_gradients(gradients)
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.assign(own_rows(parameter, self._comm))
        self.inner.update(rows)
        alone = self._comm.world_size == 1
        wholes = self.shards if alone else self._by_bucket(self.parameters, Bucket.wholes, self.shards)
        for parameter, whole in zip(self.parameters, wholes, strict=True):
            parameter.assign(whole)
        self._forget_rows()

    def __state__(self) -> dict[str, Any]:
        """What a checkpoint keeps: the state of `inner`, under the whole parameters, so that any stage can read it."""
        state: dict[str, Any] = rekeyed(self.inner.__state__(), self._whole_of)
        return state

    def __restore__(self, state: dict[str, Any]) -> None:
        """Gives `inner` its part of a checkpoint; variables have their values already."""
        shard_of = {whole: shard for shard, whole in self._whole_of.items()}
        self.inner.__restore__(rekeyed(state, shard_of))

    def __tensors__(self) -> list[Any]:
        rows = set(map(id, self.shards))
        return [*self.parameters, *[v for v in self.inner.__tensors__() if id(v) not in rows]]

    # Rows.

    def _by_bucket(
        self,
        wholes: Sequence[Tensor],
        function: Callable[[Bucket, list[Tensor]], list[Tensor]],
        tensors: Sequence[Tensor],
    ) -> list[Tensor]:
        """`function` of all tensors, bucket by bucket, the last ones first; buckets are those of `wholes`."""
        found: list[Tensor] = []
        rest = iter(tensors[::-1])
        for bucket in buckets(wholes[::-1], self._bucket_bytes):
            together = Bucket(tuple(whole.shape for whole in bucket), self._comm)
            found += function(together, list(islice(rest, len(bucket))))
        return found[::-1]

    def _forget_rows(self) -> None:
        """Between updates rows are held as those of the parameters alone: zeros here, never computed."""
        for shard in self.shards:
            shard.assign(creation.zeros(shard.shape, dtype=shard.dtype))

    def _state_of_shards(self) -> Iterator[tuple[Parameter, Variable]]:
        """The variables of `inner` that are cut as the shard that they are for."""
        states: list[Any] = [self.inner.__state__()]
        while states:
            for key, value in states.pop().items():
                if isinstance(value, dict):
                    states.append(value)
                elif isinstance(key, Parameter) and isinstance(value, Variable) and value.shape == key.shape:
                    yield key, value

    # Mistakes.

    def _check_parameters(self) -> None:
        for index, parameter in enumerate(self.parameters):
            if isinstance(parameter, ShardedParameter):
                raise ArgumentError(
                    f"ShardedOptimizer: parameter {index} has been cut by shard_parameters, and its state is as small "
                    "already; use an ordinary optimizer"
                )
        check_same("ShardedOptimizer", self.parameters, self._comm)

    def _check_inner(self, make: Any) -> None:
        inner = self.inner
        if not isinstance(inner, Optimizer) or [id(p) for p in inner.parameters] != [id(s) for s in self.shards]:
            raise ArgumentError(
                "ShardedOptimizer: make is called with a list of parameters, and returns the optimizer of these, such "
                f"as lambda rows: fp.optim.AdamW(rows, lr=1e-3); got {inner!r} of {make!r}"
            )
        if self._comm.world_size > 1 and not getattr(inner, "elementwise", True):
            raise ArgumentError(
                f"ShardedOptimizer: {type(inner).__name__} needs whole matrices, but each rank would have some rows; "
                "use an optimizer that works element by element, such as AdamW, or average_gradients"
            )


def _rows_as_parameter(parameter: Parameter, comm: Communicator) -> Parameter:
    shard: Shard | None = shard_of_rows(parameter.shape, parameter.shard, comm)
    return Parameter(own_rows(parameter, comm), shard=shard)
