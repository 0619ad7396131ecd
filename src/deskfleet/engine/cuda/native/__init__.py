"""CUDA C++ kernels: compiled when they are needed, launched on torch's stream, and run on a CPU for their tests.

    device.cuh    what kernels ask of the machine, in PTX
    source        text and constants of a kernel
    cache         compiled kernels on disk
    compiler      NVRTC: source to machine code of one GPU
    launcher      the driver: machine code to launches
    arguments     what a launch passes
    emulator      the same sources on a CPU, a fiber for each thread

Neither a CUDA toolkit nor a compiler of the host is needed to serve: CUDA builds of torch bring NVRTC. The emulator
needs g++.
"""

from deskfleet.engine.cuda.native.emulator import EmulatedKernel, emulated
from deskfleet.engine.cuda.native.launcher import Kernel, kernel

__all__ = ["EmulatedKernel", "Kernel", "emulated", "kernel"]
