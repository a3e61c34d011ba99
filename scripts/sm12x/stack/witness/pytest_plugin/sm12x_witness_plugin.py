"""A pytest plugin that notes in the junit file which tests are guards.

Loaded by `-p` into whatever environment runs the witnesses: it may import nothing of sm12x.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("guard") is not None:
            # Written as a <property> of the test case, for failed and for passed tests.
            item.user_properties.append(("guard", "yes"))
