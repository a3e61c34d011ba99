"""The GIL is given back, and an exception on its way kept, however a call into Python ends."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest
from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import World, expect, raised, said


@pytest.mark.parametrize("returned", ["raises", "no tuple", ["a", "b", "c", "d"]], ids=str)
def test_a_free_that_fails_in_python_keeps_nothing_locked(world: World, returned: Any) -> None:
    # From a thread, as PyTorch frees from the threads of autograd.
    def callback(pointer: int) -> object:
        return tuple(returned) if isinstance(returned, list) else returned

    callbacks = (world.allocator.python_malloc_callback, world.allocator.python_free_callback)
    if returned != "raises":
        world.cumem.init_module(callbacks[0], callback)
    ended = threading.Event()

    def work() -> None:
        world.free_raw(0x1000, GRANULARITY)
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert ended.wait(2), "the thread that freed holds the GIL, or waits for itself"
    expect("an error left set", raised(lambda: int("7")), None)
    world.cumem.init_module(*callbacks)
    world.expect_usable()


def test_the_reason_why_a_callback_failed_is_printed(world: World) -> None:
    def fails(pointer: int) -> None:
        raise LookupError("no such block")

    world.cumem.init_module(world.allocator.python_malloc_callback, fails)
    text = said(lambda: world.free_raw(0x1000, GRANULARITY))
    assert "LookupError: no such block" in text, text


@pytest.mark.parametrize("call", ["malloc", "free"])
def test_an_exception_on_its_way_is_kept(world: World, call: str) -> None:
    """A tensor dies while an exception leaves its frame: the callback must not see that one."""
    block = world.block()
    with_exception = ctypes.PyDLL(str(world.with_exception))
    for function in (with_exception.malloc_with_exception, with_exception.free_with_exception):
        function.restype = None
    with_exception.malloc_with_exception.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
    with_exception.free_with_exception.argtypes = (
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_ssize_t,
    )
    called = ctypes.cast(getattr(world.library, f"my_{call}"), ctypes.c_void_p)
    if call == "malloc":
        problem = raised(lambda: with_exception.malloc_with_exception(called, GRANULARITY))
        expect("blocks", len(world.records()), 2)
    else:
        problem = raised(
            lambda: with_exception.free_with_exception(called, block.address, block.size)
        )
        world.expect_alive()
    assert isinstance(problem, LookupError), f"the exception on its way became {problem!r}"


@pytest.mark.guard
def test_a_malloc_callback_that_raises_keeps_nothing_locked(world: World) -> None:
    def fails(*args: object) -> None:
        raise MemoryError("no memory for a record")

    world.cumem.init_module(fails, world.allocator.python_free_callback)
    ended = threading.Event()

    def work() -> None:
        world.malloc(GRANULARITY)
        ended.set()

    threading.Thread(target=work, daemon=True).start()
    assert ended.wait(2)
