"""A report that is made while a rank still prepares is not the one that polling gets later."""

from __future__ import annotations

from typing import Any

import pytest
from tests.witness import executor_rig as rig
from tests.witness.executor_rig import Gpus, isolated

rig.use_tree()

pytestmark = pytest.mark.usefixtures("vllm_executor")
LIMIT = 40


@isolated(LIMIT)
def test_a_partial_report_is_not_kept(gpus: Gpus) -> None:
    with rig.executor(gpus) as executor:
        collective_rpc = executor.collective_rpc
        preparing = [[False, True, True, False], [False, True, False, False], [False] * 4]
        asked: list[list[bool]] = []

        def with_preparation(method: Any, **options: Any) -> Any:
            ranks = collective_rpc(method, **options)
            asked.append(preparing[len(asked)])
            for rank, is_preparing in zip(ranks, asked[-1], strict=True):
                rank["preparing"] = is_preparing
            return ranks

        executor.collective_rpc = with_preparation
        for _ in range(5):
            executor.sleep_report()
        # Twice while a rank prepares, and once for all later questions.
        assert asked == preparing
        assert not any(rank["preparing"] for rank in executor.sleep_report())
