"""The compilers: CUDA_HOME, a libcuda to link against, other machines, architectures."""
