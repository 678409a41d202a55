"""Gradients of models of which the ranks share some parameters and hold others, the experts, by themselves."""

from __future__ import annotations

from collections.abc import Sequence

from fuel_parallel import data_parallel
from fuel_parallel.comm.communicator import Communicator
from fuel_parallel.errors import ArgumentError
from fuel_parallel.experts import ExpertParameter
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.module import Parameter


def average_gradients(
    gradients: Sequence[Tensor],
    parameters: Sequence[Parameter],
    comm: Communicator,
    *,
    replicas: Communicator | None = None,
) -> list[Tensor]:
    """The gradients of the mean of all ranks' losses.

    What `grad` gives is the derivative of the sum of all ranks' losses where it passes through a collective. Experts
    get tokens by one, so that their gradients are whole, and are divided by the number of losses only. Those of all
    other parameters are averaged by `data_parallel.average_gradients`.

    Args:
        gradients: One for each parameter.
        parameters: What they belong to; those of experts are `fp.ExpertParameter`.
        comm: All ranks that have tokens of their own.
        replicas: The ranks of `comm` that hold the same experts, such as `mesh["dp"]` where experts are divided along
            another axis; None if every expert is on one rank.
    """
    if len(gradients) != len(parameters):
        raise ArgumentError(f"average_gradients: {len(parameters)} parameters, but {len(gradients)} gradients")
    of_expert = [isinstance(parameter, ExpertParameter) for parameter in parameters]
    shared = iter(
        data_parallel.average_gradients([g for g, own in zip(gradients, of_expert, strict=True) if not own], comm)
    )
    own = [g for g, own in zip(gradients, of_expert, strict=True) if own]
    copies = 1 if replicas is None else replicas.world_size
    if replicas is not None:
        own = data_parallel.average_gradients(own, replicas)
    scaled = iter([g * (copies / comm.world_size) for g in own])
    return [next(scaled) if is_own else next(shared) for is_own in of_expert]
