"""Triton's interpreter, mended where it computes something else than a GPU.

It keeps bfloat16 as uint16 and multiplies the bits in tl.dot as if they were numbers; and NumPy 2.4
makes no int of its scalars, arrays of one value, so that they cannot bound a loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_dot = interpreter.InterpreterBuilder.create_dot
_patch_tensor = interpreter._patch_lang_tensor


def _widen(handle: Any) -> Any:
    if handle.dtype.scalar == tl.bfloat16:
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)
    return handle


def _create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    return _dot(self, _widen(a), _widen(b), d, precision, imprecise)


def _patch_and_repair(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter._patch_lang_tensor = _patch_and_repair
