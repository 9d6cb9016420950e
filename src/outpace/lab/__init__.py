"""Measuring and checking: built on the engine's client edge, never on its inside."""
