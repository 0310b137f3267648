"""Kernels of the fusion and the jitter noise."""
