"""Parallel machine learning over MPI."""

from fuel_parallel.version import __version__

__all__ = ["__version__"]
