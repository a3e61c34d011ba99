// Found before torch's own while this release's CUDA units are compiled, see torch/all.h beside it.
// What they use of ATen: tensors and their methods, dispatch by type, the device in use.
#pragma once

// torch's headers then take the declaration of each operator that they name, not all 1,300.
#define AT_PER_OPERATOR_HEADERS 1

#include <ATen/Context.h>
#include <ATen/DeviceGuard.h>
#include <ATen/Dispatch.h>
#include <ATen/Tensor.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/sum.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

// CUDA_VERSION: units of the release choose by it what they compile, and take it for granted.
#include <cuda.h>
