"""Communicators: the collectives that a script calls, and how they travel."""
