"""Kernels against the reference: in Triton's interpreter where there is no GPU, on the device where there is one.

Run by `python -m pytest tests/gpu -m triton` in the environment of tools/triton_env.sh, or on a machine with a GPU.
"""
