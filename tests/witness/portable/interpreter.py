"""Triton's interpreter, corrected where it computes something else than a GPU.

It keeps bfloat16 as uint16 and multiplies the bits in tl.dot as if they were numbers. It cuts off
what bfloat16 has no bits for, and rounds 31.8 to 16 in float8e4nv, whose exponent takes no carry
there; a GPU rounds to the nearest value. And NumPy 2.4 makes no int of its scalars, arrays of one
value, so that they cannot bound a loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_dot = interpreter.InterpreterBuilder.create_dot
_convert = interpreter._convert_float
_patch_tensor = interpreter._patch_lang_tensor


def _widen(handle: Any) -> Any:
    if handle.dtype.scalar == tl.bfloat16:
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
    return handle


def _create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    return _dot(self, _widen(a), _widen(b), d, precision, imprecise)


def _convert_float(given: Any, source: Any, target: Any, rounding: Any) -> Any:
    if source != tl.float32 or target not in (tl.bfloat16, tl.float8e4nv):
        return _convert(given, source, target, rounding)
    values = torch.from_numpy(np.ascontiguousarray(given).view(np.float32))
    if target == tl.bfloat16:
        return values.to(torch.bfloat16).view(torch.uint16).numpy()
    # The largest number of e4m3, which a GPU gives for what is beyond it.
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def _patch_and_repair(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter._convert_float = _convert_float
interpreter._patch_lang_tensor = _patch_and_repair
