// Found before torch's own while this release's CUDA units are compiled. nvcc reads the host part once
// and the device part once for each architecture, so torch's whole C++ interface (autograd, nn, data,
// jit, optim) costs most units more than half of their time, of which they use tensors and a few
// factories. Declarations only: the machine code of a unit stays as it is.
#pragma once

#include <torch/types.h>
