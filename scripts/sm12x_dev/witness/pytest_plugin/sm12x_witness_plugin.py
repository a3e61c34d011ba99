"""A pytest plugin that notes the marks of tests in the junit file, and keeps some from the base.

Loaded by `-p` into whatever environment runs the witnesses: it may import nothing of sm12x.
"""

from __future__ import annotations

import os

import pytest

# Each is written as a <property> of the test case, for failed and for passed tests.
MARKS = ("guard", "patched_only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out: list[pytest.Item] = []
    for item in items:
        marks = [mark for mark in MARKS if item.get_closest_marker(mark) is not None]
        item.user_properties += [(mark, "yes") for mark in marks]
        if "patched_only" in marks and os.environ.get("SM12X_SIDE") == "base":
            left_out.append(item)
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
