"""Comparison of the engine with plain transformers: same weights, device and dtype, for each way of scheduling."""
