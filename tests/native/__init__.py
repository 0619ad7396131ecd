"""CUDA C++ kernels against the reference: in the emulator where there is no GPU, on the device where there is one."""
