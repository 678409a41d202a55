"""Data parallelism: the same model on every rank, gradients averaged between them."""
