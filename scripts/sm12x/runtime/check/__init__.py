"""`check`: verifies an image without a GPU: packages, files, machine code, kernels, toolchain."""
