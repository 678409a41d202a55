"""Cross-entropy of logits whose classes are cut over ranks: no rank ever holds all of them."""

from __future__ import annotations

from fuel_parallel.comm.communicator import Communicator, ReduceOp
from fuel_parallel.errors import ArgumentError, DTypeError, ShapeError
from fuel_parallel.lazy import dtypes
from fuel_parallel.lazy.ops import binary, creation, elementwise, indexing, reductions
from fuel_parallel.lazy.tensor import Tensor
from fuel_parallel.partitioning import partition
from fuel_parallel.tensor_parallel.mappings import reduce_from_ranks


def vocab_parallel_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    comm: Communicator,
    *,
    classes: int | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """The negative log-likelihood of integer `targets` [...], the same on all ranks.

    Three all-reduces of the size of `targets` instead of a gather of the logits (arXiv:1909.08053, section 3): of the
    greatest logit, of the sum of exponentials, and of the target's own.

    Args:
        logits: This rank's classes, [..., my classes], those of `partition`.
        targets: Numbers of classes of the whole, the same on all ranks.
        comm: The ranks.
        classes: Classes of all ranks; None when each rank holds the same number.
        ignore_index: Targets that count for nothing; `mean` divides by the number of the others.
        label_smoothing: So much of the target's weight is shared equally by all classes (arXiv:1512.00567, section 7).
        reduction: 'mean', 'sum' or 'none'.

    >>> from fuel_parallel import IdentityComm
    >>> loss = vocab_parallel_cross_entropy(creation.zeros((2, 4)), creation.asarray([0, 3]), IdentityComm())
    >>> round(loss.item(), 4)
    1.3863
    """
    classes = logits.shape[-1] * comm.world_size if classes is None and logits.ndim else classes or 0
    mine = partition(classes, comm.world_size)[comm.rank]
    _check(logits, targets, len(mine), label_smoothing, reduction)
    kept = None if ignore_index is None else targets != ignore_index
    safe = targets if kept is None else binary.where(kept, targets, 0)
    # A constant to the gradient: it cancels.
    greatest = comm.all_reduce(creation.stop_gradient(_greatest(logits)), ReduceOp.MAX)
    shifted = logits - greatest.reshape(*targets.shape, 1)
    total = reduce_from_ranks(reductions.sum(elementwise.exp(shifted), axis=-1), comm)
    losses = elementwise.log(total) - reduce_from_ranks(_own(shifted, safe, mine), comm)
    if label_smoothing:
        average = reduce_from_ranks(reductions.sum(shifted, axis=-1), comm) * (1 / classes)
        losses = losses * (1 - label_smoothing) + (elementwise.log(total) - average) * label_smoothing
    if kept is not None:
        losses = binary.where(kept, losses, 0.0)
    if reduction == "none":
        return losses
    whole = reductions.sum(losses)
    if reduction == "sum":
        return whole
    if kept is None:
        return whole * (1 / targets.size) if targets.size else whole
    return whole / binary.maximum(creation.astype(reductions.count_nonzero(kept), whole.dtype), 1.0)


def _greatest(logits: Tensor) -> Tensor:
    """Of this rank's classes; a rank without any does not count."""
    if logits.shape[-1]:
        return reductions.max(logits, axis=-1)
    return creation.full(logits.shape[:-1], -float("inf"), dtype=logits.dtype)


def _own(shifted: Tensor, targets: Tensor, mine: range) -> Tensor:
    """The target's logit where this rank holds it, else 0."""
    if not len(mine):
        return creation.zeros(targets.shape, dtype=shifted.dtype)
    here = (targets >= mine.start) & (targets < mine.stop)
    place = binary.where(here, targets - mine.start, 0)
    picked = indexing.take_along_axis(shifted, place.reshape(*targets.shape, 1), axis=-1).reshape(*targets.shape)
    return binary.where(here, picked, 0.0)


def _check(logits: Tensor, targets: Tensor, mine: int, label_smoothing: float, reduction: str) -> None:
    name = "vocab_parallel_cross_entropy"
    if logits.ndim < 1 or targets.shape != logits.shape[:-1]:
        raise ShapeError(
            f"{name}: targets must have the shape of logits without the last dimension, {logits.shape[:-1]}, but "
            f"logits has shape {logits.shape} and targets {targets.shape}"
        )
    if logits.shape[-1] != mine:
        raise ShapeError(f"{name}: this rank holds {mine} of the classes, but logits has shape {logits.shape}")
    if dtypes.kind(targets.dtype) != "integral":
        raise DTypeError(f"{name}: targets must be integers (class numbers), not {targets.dtype.name}")
    if not 0 <= label_smoothing < 1:
        raise ArgumentError(f"{name}: label_smoothing lies in [0, 1), but is {label_smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError(f"{name}: reduction is 'mean', 'sum' or 'none', not {reduction!r}")
