"""An error of the C extension belongs to one operation of one thread."""

from __future__ import annotations

import ctypes
import threading

from tests.fakecuda.standin import GRANULARITY
from tests.witness.world import World, expect, raised

UNKNOWN = 12345


def test_malloc_works_after_a_failed_one(world: World) -> None:
    # PyTorch frees what it has cached after an out-of-memory, and asks again.
    world.fake.set_capacity(4 * GRANULARITY)
    expect("an oversized block", world.malloc(8 * GRANULARITY), 0)
    block = world.block()
    world.expect_usable(block)


def test_the_retry_of_a_pool_succeeds(world: World) -> None:
    """PyTorch's own retry: what another process held is free by the second call."""
    world.fake.set_capacity(4 * GRANULARITY)
    taken = world.take(4 * GRANULARITY)
    expect("without memory", world.malloc(GRANULARITY), 0)
    world.take_back(taken)
    assert world.malloc(GRANULARITY)


def test_a_failure_in_one_thread_is_none_in_another(world: World) -> None:
    world.fake.set_capacity(64 * GRANULARITY)
    stop = threading.Event()

    def fail() -> None:
        while not stop.is_set():
            world.malloc(100 * GRANULARITY)

    thread = threading.Thread(target=fail, daemon=True)
    thread.start()
    refused = 0
    for _ in range(200):
        address = world.malloc(GRANULARITY)
        refused += not address
        if address:
            world.free_raw(address, GRANULARITY)
    stop.set()
    thread.join(5)
    expect("blocks refused", refused, 0)
    world.expect_alive()


def test_the_message_of_one_thread_is_none_of_another(world: World) -> None:
    """Both are looked up by name: the symbol of a thread's own is at an address of its own."""
    world.fake.fail("cuMemAddressReserve")

    def fail() -> None:
        assert not world.malloc(GRANULARITY)

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join(5)
    expect("the error", ctypes.c_int.in_dll(world.library, "error_code").value, 0)
    message = (ctypes.c_char * 16).in_dll(world.library, "error_msg").value
    expect("the message", message, b"")


def test_an_unmap_without_a_context_changes_nothing(world: World) -> None:
    block = world.block()
    handle = world.allocator.pointer_to_data[block.address].handle
    world.fake.fail("cuCtxGetCurrent")
    assert isinstance(raised(lambda: world.cumem.unmap_and_release(handle)), RuntimeError)
    world.expect_awake(block)
    world.cumem.unmap_and_release(handle)
    expect("physical memory", world.fake.alive().physical, 0)


def test_a_map_without_a_context_makes_nothing(world: World) -> None:
    block = world.block()
    handle = world.allocator.pointer_to_data[block.address].handle
    world.cumem.unmap_and_release(handle)
    world.fake.fail("cuCtxGetCurrent")
    assert isinstance(raised(lambda: world.cumem.create_and_map(handle)), RuntimeError)
    expect("physical memory", world.fake.alive().physical, 0)
    world.cumem.create_and_map(handle)
    assert world.fake.mapped(block.address, block.size)
    expect("physical memory", world.fake.alive().physical, block.size)


def test_an_error_without_a_text_is_reported(world: World) -> None:
    block = world.block()
    handle = world.allocator.pointer_to_data[block.address].handle
    world.fake.fail("cuMemUnmap", error=UNKNOWN)
    problem = raised(lambda: world.cumem.unmap_and_release(handle))
    assert isinstance(problem, RuntimeError)
    assert "CUDA Error: unknown error" in str(problem), problem
