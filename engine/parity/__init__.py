"""Comparison of the engine with plain transformers: same weights, device and type, for each way of scheduling."""
