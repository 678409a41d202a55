"""Optimizers, schedules of the learning rate, clipping of gradients, and training in 16 bits.

`update` builds the nodes of the new parameters and rebinds them; `realize` computes them all in one plan.
"""

from fuel_parallel.optim import schedules
from fuel_parallel.optim.adam import Adam, AdamW
from fuel_parallel.optim.clipping import clip_by_global_norm, clip_by_value
from fuel_parallel.optim.lion import Lion
from fuel_parallel.optim.mixed_precision import MixedPrecision
from fuel_parallel.optim.muon import Muon
from fuel_parallel.optim.optimizer import Optimizer
from fuel_parallel.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Lion",
    "MixedPrecision",
    "Muon",
    "Optimizer",
    "clip_by_global_norm",
    "clip_by_value",
    "schedules",
]
