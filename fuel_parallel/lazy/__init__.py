"""Lazy tensors under the names of the Python array API standard."""
