// Found before the release's own, which comes right after: what a unit that registers operators needs
// of torch besides, see torch/all.h beside it.
#pragma once

#include <ATen/ops/_pad_enum.h>
#include <torch/library.h>
#include <torch/nn/functional/padding.h>  // The Hadamard transform pads with it.

#include_next <core/registration.h>
