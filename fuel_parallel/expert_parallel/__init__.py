"""Expert parallelism: each rank has tokens of its own and some of the experts; tokens travel to theirs and back."""

from fuel_parallel.expert_parallel.gradients import average_gradients
from fuel_parallel.expert_parallel.mixture import ExpertParallel

__all__ = ["ExpertParallel", "average_gradients"]
