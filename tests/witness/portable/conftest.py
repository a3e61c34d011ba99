"""Run by tests/witness/portable_tests.py, with the tree's kernels and this folder on the path."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    import interpreter  # noqa: F401
