"""Pipelines at work: the part of `pipeline_parallel` that has tensors. Its names are those of `pipeline_parallel`."""

from fuel_parallel.pipeline_parallel.run.model import PipelineModel
from fuel_parallel.pipeline_parallel.run.result import PipelineResult
from fuel_parallel.pipeline_parallel.run.runner import PipelineRunner

__all__ = ["PipelineModel", "PipelineResult", "PipelineRunner"]
