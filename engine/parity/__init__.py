"""Comparing the engine with plain transformers: the same weights, device and type, every way of scheduling."""
