"""The stand-in driver behaves as the real one does where the allocator could tell."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator

import pytest
from tests.fakecuda import standin
from tests.fakecuda.standin import (
    GRANULARITY,
    ILLEGAL_ADDRESS,
    INVALID_VALUE,
    NOT_PERMITTED,
    OUT_OF_MEMORY,
    Alive,
    Standin,
)

PINNED, ON_DEVICE, FABRIC, READ_WRITE = 1, 1, 8, 3
EMPTY = Alive(handles=0, mappings=0, reservations=0, physical=0)


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocFlags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Prop(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", AllocFlags),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class Driver:
    """The driver calls, with Python arguments; each returns the driver's code."""

    def __init__(self, fake: Standin) -> None:
        self.fake = fake
        self.lib = fake.driver

    def reserve(self, size: int = GRANULARITY) -> tuple[int, int]:
        pointer = ctypes.c_uint64(0)
        code = self.lib.cuMemAddressReserve(
            ctypes.byref(pointer), ctypes.c_size_t(size), ctypes.c_size_t(0), ctypes.c_uint64(0), 0
        )
        return code, pointer.value

    def create(
        self, size: int = GRANULARITY, device: int = 0, handle_types: int = 0
    ) -> tuple[int, int]:
        handle = ctypes.c_uint64(0)
        prop = Prop(type=PINNED, handle_types=handle_types, location=Location(ON_DEVICE, device))
        code = self.lib.cuMemCreate(
            ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(prop), ctypes.c_ulonglong(0)
        )
        return code, handle.value

    def map(self, address: int, handle: int, size: int = GRANULARITY, offset: int = 0) -> int:
        return int(
            self.lib.cuMemMap(
                ctypes.c_uint64(address),
                ctypes.c_size_t(size),
                ctypes.c_size_t(offset),
                ctypes.c_uint64(handle),
                ctypes.c_ulonglong(0),
            )
        )

    def access(self, address: int, size: int = GRANULARITY, device: int = 0) -> int:
        desc = Access(Location(ON_DEVICE, device), READ_WRITE)
        return int(
            self.lib.cuMemSetAccess(
                ctypes.c_uint64(address),
                ctypes.c_size_t(size),
                ctypes.byref(desc),
                ctypes.c_size_t(1),
            )
        )

    def unmap(self, address: int, size: int = GRANULARITY) -> int:
        return int(self.lib.cuMemUnmap(ctypes.c_uint64(address), ctypes.c_size_t(size)))

    def release(self, handle: int) -> int:
        return int(self.lib.cuMemRelease(ctypes.c_uint64(handle)))

    def free_address(self, address: int, size: int = GRANULARITY) -> int:
        return int(self.lib.cuMemAddressFree(ctypes.c_uint64(address), ctypes.c_size_t(size)))

    def block(self, size: int = GRANULARITY) -> tuple[int, int]:
        """An accessible block: its address and handle."""
        code, address = self.reserve(size)
        assert code == 0
        code, handle = self.create(size)
        assert code == 0
        assert self.map(address, handle, size) == 0
        assert self.access(address, size) == 0
        return address, handle


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Standin:
    folder = tmp_path_factory.mktemp("fakecuda")
    standin.compile_into(folder)
    fake = Standin(folder)
    fake.initialize()
    return fake


@pytest.fixture
def driver(loaded: Standin) -> Iterator[Driver]:
    yield Driver(loaded)
    loaded.reset()


def test_bytes_move_and_new_memory_has_no_old_ones(driver: Driver) -> None:
    address, handle = driver.block()
    data = bytes(range(1, 256)) * 16
    assert driver.fake.write(address + 4096, data) == 0
    assert driver.fake.read(address + 4096, len(data)) == data
    assert driver.unmap(address) == 0
    assert driver.release(handle) == 0
    _, fresh = driver.create()
    assert driver.map(address, fresh) == 0
    assert driver.access(address) == 0
    assert driver.fake.read(address + 4096, len(data)) == bytes(len(data))


def test_a_handle_keeps_its_bytes_while_unmapped(driver: Driver) -> None:
    address, handle = driver.block()
    driver.fake.write(address, b"kept")
    assert driver.unmap(address) == 0
    assert driver.map(address, handle) == 0
    assert driver.access(address) == 0
    assert driver.fake.read(address, 4) == b"kept"


def test_memory_is_held_until_released_and_unmapped(driver: Driver) -> None:
    address, handle = driver.block()
    driver.fake.set_capacity(GRANULARITY)
    assert driver.create()[0] == OUT_OF_MEMORY
    assert driver.release(handle) == 0
    assert driver.create()[0] == OUT_OF_MEMORY, "still mapped"
    assert driver.unmap(address) == 0
    assert driver.create()[0] == 0


def test_a_freed_address_is_handed_out_again(driver: Driver) -> None:
    """As a real driver does (measured with 580.159); a released handle is not."""
    addresses = [driver.reserve()[1] for _ in range(3)]
    assert driver.free_address(addresses[1]) == 0
    assert driver.free_address(addresses[0]) == 0
    assert [driver.reserve()[1] for _ in range(2)] == addresses[:2]
    _, handle = driver.create()
    assert driver.release(handle) == 0
    assert driver.create()[1] != handle


def test_a_freed_address_is_handed_out_for_another_size(driver: Driver) -> None:
    addresses = [driver.reserve()[1] for _ in range(4)]
    for freed in addresses[:2]:
        assert driver.free_address(freed) == 0
    assert driver.reserve(3 * GRANULARITY)[1] > addresses[3], "there is no room for it below"
    assert driver.reserve(2 * GRANULARITY)[1] == addresses[0], "a larger block"
    assert driver.free_address(addresses[0], 2 * GRANULARITY) == 0
    assert [driver.reserve()[1] for _ in range(2)] == addresses[:2], "smaller blocks"


def test_a_reused_address_has_nothing_of_before(driver: Driver) -> None:
    address, handle = driver.block()
    driver.fake.write(address, b"old")
    assert driver.unmap(address) == driver.release(handle) == 0
    assert driver.free_address(address) == 0
    assert driver.fake.read(address, 3) is None
    again, _ = driver.block()
    assert again == address
    assert driver.fake.read(address, 3) == bytes(3)


def test_everything_is_counted_and_goes_to_zero(driver: Driver) -> None:
    address, handle = driver.block(3 * GRANULARITY)
    assert driver.fake.alive() == Alive(
        handles=1, mappings=1, reservations=1, physical=3 * GRANULARITY
    )
    assert driver.unmap(address, 3 * GRANULARITY) == 0
    assert driver.release(handle) == 0
    assert driver.free_address(address, 3 * GRANULARITY) == 0
    assert driver.fake.alive() == EMPTY
    assert driver.fake.calls("cuMemCreate") == 1


def no_access_before_set_access(driver: Driver) -> bool:
    _, address = driver.reserve()
    before = driver.fake.read(address, 1)
    driver.map(address, driver.create()[1])
    return before is None and driver.fake.read(address, 1) is None


def map_over_mapped(driver: Driver) -> bool:
    address, _ = driver.block()
    return driver.map(address, driver.create()[1]) == INVALID_VALUE


def map_outside_a_reservation(driver: Driver) -> bool:
    _, address = driver.reserve()
    return driver.map(address + GRANULARITY, driver.create()[1]) == INVALID_VALUE


def map_of_another_size_or_offset(driver: Driver) -> bool:
    _, address = driver.reserve(2 * GRANULARITY)
    _, handle = driver.create()
    bigger = driver.map(address, handle, 2 * GRANULARITY)
    shifted = driver.map(address, handle, GRANULARITY, offset=GRANULARITY)
    return (bigger, shifted) == (INVALID_VALUE, INVALID_VALUE)


def map_of_a_released_handle(driver: Driver) -> bool:
    _, address = driver.reserve()
    _, handle = driver.create()
    driver.release(handle)
    return driver.map(address, handle) == INVALID_VALUE


def unmap_of_unmapped(driver: Driver) -> bool:
    address, _ = driver.block()
    driver.unmap(address)
    return driver.unmap(address) == INVALID_VALUE


def unmap_of_a_part(driver: Driver) -> bool:
    address, _ = driver.block(2 * GRANULARITY)
    return driver.unmap(address) == INVALID_VALUE


def release_twice(driver: Driver) -> bool:
    _, handle = driver.create()
    driver.release(handle)
    return driver.release(handle) == INVALID_VALUE


def free_of_a_reservation_in_use(driver: Driver) -> bool:
    address, _ = driver.block()
    return driver.free_address(address) == INVALID_VALUE


def free_of_another_size(driver: Driver) -> bool:
    _, address = driver.reserve(2 * GRANULARITY)
    return driver.free_address(address, GRANULARITY) == INVALID_VALUE


def odd_sizes(driver: Driver) -> bool:
    return driver.create(GRANULARITY + 1)[0] == driver.reserve(4096)[0] == INVALID_VALUE


def access_to_unmapped(driver: Driver) -> bool:
    _, address = driver.reserve()
    return driver.access(address) == INVALID_VALUE


def fabric_without_permission(driver: Driver) -> bool:
    refused = driver.create(handle_types=FABRIC)[0]
    driver.fake.permit_fabric(True)
    return (refused, driver.create(handle_types=FABRIC)[0]) == (NOT_PERMITTED, 0)


def unknown_device(driver: Driver) -> bool:
    return driver.create(device=standin.DEVICES)[0] == 101


@pytest.mark.parametrize(
    "case",
    [
        no_access_before_set_access,
        map_over_mapped,
        map_outside_a_reservation,
        map_of_another_size_or_offset,
        map_of_a_released_handle,
        unmap_of_unmapped,
        unmap_of_a_part,
        release_twice,
        free_of_a_reservation_in_use,
        free_of_another_size,
        odd_sizes,
        access_to_unmapped,
        fabric_without_permission,
        unknown_device,
    ],
    ids=lambda case: case.__name__,
)
def test_misuse_gets_the_drivers_error(driver: Driver, case: Callable[[Driver], bool]) -> None:
    assert case(driver), driver.fake.trace()


def test_the_nth_call_fails_once_and_does_nothing(driver: Driver) -> None:
    driver.fake.fail("cuMemCreate", nth=2, error=999)
    assert [driver.create()[0] for _ in range(4)] == [0, 999, 0, 0]
    assert driver.fake.alive().handles == 3
    driver.fake.fail("*", nth=1, error=700, count=2)
    assert [driver.reserve()[0] for _ in range(3)] == [700, 700, 0]
    with pytest.raises(ValueError, match="cuMemCreat"):
        driver.fake.fail("cuMemCreat")


def test_work_in_flight_refuses_an_unmap_until_synchronized(driver: Driver) -> None:
    address, _ = driver.block()
    driver.fake.begin_work(address, 16, device=1)
    assert driver.unmap(address) == ILLEGAL_ADDRESS
    assert driver.fake.violations() == 1
    driver.fake.runtime.cudaDeviceSynchronize()
    assert driver.fake.work_in_flight() == 1, "that was device 0"
    driver.fake.runtime.cudaSetDevice(1)
    driver.fake.runtime.cudaDeviceSynchronize()
    assert driver.unmap(address) == 0
    assert driver.fake.violations() == 1


def test_the_context_belongs_to_the_thread(driver: Driver) -> None:
    context = ctypes.c_void_p()
    assert driver.lib.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
    assert driver.lib.cuCtxSetCurrent(context) == 0
    seen: list[int | None] = []

    def look() -> None:
        current = ctypes.c_void_p(1)
        driver.lib.cuCtxGetCurrent(ctypes.byref(current))
        seen.append(current.value)

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [context.value, None]
    driver.lib.cuCtxSetCurrent(None)


def test_runtime_calls_go_through_the_driver(driver: Driver) -> None:
    runtime = driver.fake.runtime
    pointer = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(100)) == 0
    assert pointer.value is not None
    assert runtime.cudaMemset(pointer, 7, ctypes.c_size_t(100)) == 0
    assert driver.fake.read(pointer.value, 3) == b"\7\7\7"
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    assert runtime.cudaGetErrorString(OUT_OF_MEMORY) == b"out of memory"
    assert runtime.cudaFree(pointer) == 0
    assert runtime.cudaMemset(pointer, 7, ctypes.c_size_t(1)) == INVALID_VALUE
    assert driver.fake.alive() == EMPTY


def test_reset_takes_everything_back(driver: Driver) -> None:
    address, _ = driver.block()
    driver.fake.begin_work(address, 1)
    driver.fake.fail("cuMemCreate")
    driver.fake.set_capacity(GRANULARITY)
    driver.fake.reset()
    assert driver.fake.alive() == EMPTY
    assert driver.fake.capacity() == driver.fake.violations() == driver.fake.work_in_flight() == 0
    assert driver.create(2 * GRANULARITY)[0] == 0


def test_many_threads(driver: Driver) -> None:
    failures: list[int] = []

    def churn() -> None:
        for _ in range(50):
            address, handle = driver.block()
            codes = (driver.unmap(address), driver.release(handle), driver.free_address(address))
            failures.extend(code for code in codes if code)

    threads = [threading.Thread(target=churn) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert driver.fake.alive() == EMPTY


class Host:
    """Registered host memory, a stream, and copies on it; each call returns the runtime's code."""

    def __init__(self, driver: Driver, size: int = 4096) -> None:
        self.runtime = driver.fake.runtime
        self.size = size
        self.memory = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.memory)
        self.stream = ctypes.c_void_p(0)
        assert self.runtime.cudaStreamCreateWithFlags(ctypes.byref(self.stream), 1) == 0

    def register(self, size: int = 0) -> int:
        length = ctypes.c_size_t(size or self.size)
        return int(self.runtime.cudaHostRegister(ctypes.c_void_p(self.address), length, 1))

    def unregister(self) -> int:
        return int(self.runtime.cudaHostUnregister(ctypes.c_void_p(self.address)))

    def copy(self, to: int, source: int) -> int:
        pointers = (ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(self.size))
        return int(self.runtime.cudaMemcpyAsync(*pointers, 4, self.stream))

    def copy_rows(self, source: int, pitch: int, width: int, height: int) -> int:
        """Copy rows to the host, one right after another."""
        size = ctypes.c_size_t
        to = (ctypes.c_void_p(self.address), size(width))
        rows = (ctypes.c_void_p(source), size(pitch), size(width), size(height))
        return int(self.runtime.cudaMemcpy2DAsync(*to, *rows, 4, self.stream))

    def copy_all(self, sources: list[int], size: int, order: int = 1) -> int:
        """Copy pieces of equal size to the host, one right after another, by one call."""
        count = len(sources)
        pointers = ctypes.c_void_p * count
        to = pointers(*(self.address + number * size for number in range(count)))
        sizes = (ctypes.c_size_t * count)(*[size] * count)
        kind = ((ctypes.c_uint * 6)(order), (ctypes.c_size_t * 1)(0), ctypes.c_size_t(1))
        call = self.runtime.cudaMemcpyBatchAsync
        return int(call(to, pointers(*sources), sizes, ctypes.c_size_t(count), *kind, self.stream))

    def wait(self) -> int:
        return int(self.runtime.cudaStreamSynchronize(self.stream))


def test_an_asynchronous_copy_is_made_when_it_is_waited_for(driver: Driver) -> None:
    address, _ = driver.block()
    host = Host(driver)
    assert host.register() == 0
    driver.fake.write(address, b"x" * host.size)
    assert host.copy(host.address, address) == 0
    assert host.memory.raw == bytes(host.size), "nothing waits for the copy yet"
    assert driver.unmap(address) == ILLEGAL_ADDRESS, "it is under way"
    assert host.wait() == 0
    assert host.memory.raw == b"x" * host.size
    # Both ways, in their order.
    host.memory.raw = b"y" * host.size
    assert host.copy(address, host.address) == 0
    assert host.copy(host.address, address) == 0
    assert driver.fake.runtime.cudaDeviceSynchronize() == 0
    assert host.memory.raw == b"y" * host.size
    assert driver.unmap(address) == 0
    assert host.copy(host.address, address) == INVALID_VALUE, "it is not mapped"


def test_many_copies_by_one_call_are_made_when_they_are_waited_for(driver: Driver) -> None:
    address, _ = driver.block()
    host = Host(driver)
    assert host.register() == 0
    driver.fake.write(address, b"".join(bytes([n]) * 100 for n in range(10)))
    # Of every third row of 100 bytes 60, and two of them at other places.
    assert host.copy_rows(address, 300, 60, 3) == 0
    assert driver.unmap(address) == ILLEGAL_ADDRESS, "they are under way"
    assert host.wait() == 0
    assert host.memory.raw[:180] == b"\0" * 60 + b"\3" * 60 + b"\6" * 60
    assert host.copy_all([address + 900, address + 100], 50) == 0
    assert host.memory.raw[:180] == b"\0" * 60 + b"\3" * 60 + b"\6" * 60, "nothing waits yet"
    assert host.wait() == 0
    assert host.memory.raw[:100] == b"\t" * 50 + b"\1" * 50
    assert host.copy_rows(address, 59, 60, 3) == 12, "rows overlap"
    assert host.copy_rows(address, 1 << 31, 60, 2) == 12, "rows are too far apart"
    assert host.copy_rows(address, 300, 0, 3) == INVALID_VALUE
    assert host.copy_rows(address, GRANULARITY, 60, 2) == INVALID_VALUE, "the second is not mapped"
    assert host.copy_all([address], 50, order=3) == INVALID_VALUE
    assert host.copy_all([address, address + GRANULARITY], 50) == INVALID_VALUE
    assert host.wait() == 0


def test_a_copy_of_memory_that_is_not_registered_is_made_at_once(driver: Driver) -> None:
    address, _ = driver.block()
    host = Host(driver)
    driver.fake.write(address, b"x" * host.size)
    assert host.copy(host.address, address) == 0
    assert host.memory.raw == b"x" * host.size


def test_host_memory_is_registered_once(driver: Driver) -> None:
    host = Host(driver)
    assert host.unregister() == 713
    assert host.register() == 0
    assert host.register(16) == 712
    assert driver.fake.registered() == host.size
    assert host.unregister() == 0
    assert driver.fake.registered() == 0


def test_a_capture_refuses_unsafe_calls_of_other_threads(driver: Driver) -> None:
    host = Host(driver)
    driver.fake.capture(True)
    assert host.register() == 900
    mode = ctypes.c_int(2)
    assert driver.fake.runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    assert mode.value == 0
    assert host.register() == 0
    assert driver.fake.runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0


def test_one_pool_of_memory_for_devices_and_host(driver: Driver) -> None:
    driver.fake.share(3 * GRANULARITY)
    driver.block()
    assert driver.fake.take_host(GRANULARITY)
    host = Host(driver, GRANULARITY)
    assert host.register() == 0
    assert driver.create()[0] == OUT_OF_MEMORY
    assert not driver.fake.take_host(1)
    assert driver.fake.shared_peak() == 3 * GRANULARITY
    driver.fake.give_host(GRANULARITY)
    assert driver.create()[0] == 0
