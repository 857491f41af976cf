"""Triton kernels for CUDA tensors; ``TRITON_INTERPRET=1`` runs them on CPU tensors for tests."""
