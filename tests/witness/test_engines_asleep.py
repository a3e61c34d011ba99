"""A server of several engines is asleep while any of them is."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
from tests.witness import executor_rig
from tests.witness.executor_rig import isolated

executor_rig.use_tree()

LIMIT = 40

pytestmark = pytest.mark.usefixtures("vllm_executor")


@isolated(LIMIT)
def test_one_engine_asleep_is_a_sleeping_server() -> None:
    """Data parallel engines of a dense model sleep each by itself."""
    client: Any = importlib.import_module("vllm.v1.engine.core_client").DPLBAsyncMPClient

    async def ask() -> bool:
        one = client.__new__(client)
        # So that nothing of a client that was never started is taken down.
        one._finalizer = None
        one.core_engine = b"0"
        one.core_engines = [b"0", b"1"]

        async def call(method: str, *_: object, engine: bytes) -> bool:
            return engine == b"1"

        one._call_utility_async = call
        return bool(await one.is_sleeping_async())

    assert asyncio.run(ask()) is True
