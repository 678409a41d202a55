"""The registry of operations: shape rule, kernel and gradient of each."""
