"""Triton kernels of specplug: raw tensors in, raw tensors out, each with its reference in the core."""
