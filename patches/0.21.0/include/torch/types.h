// Found before torch's own while this release's CUDA units are compiled, see all.h: the names that are
// in torch:: without at:: being asked, and no library.h.
#pragma once

#include <ATen/ATen.h>

#include <optional>

// torch::empty and the like, which are not at::empty.
#include <torch/csrc/autograd/generated/variable_factories.h>

namespace torch {

using namespace at;  // As in torch's own: all of at:: is torch:: too.

using Dtype = at::ScalarType;
using std::nullopt;
using std::optional;

constexpr auto kUInt8 = at::kByte;
constexpr auto kInt8 = at::kChar;
constexpr auto kInt16 = at::kShort;
constexpr auto kInt32 = at::kInt;
constexpr auto kInt64 = at::kLong;
constexpr auto kFloat16 = at::kHalf;
constexpr auto kFloat32 = at::kFloat;
constexpr auto kFloat64 = at::kDouble;

}  // namespace torch
