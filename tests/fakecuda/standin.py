"""Compile the stand-in driver and talk to it."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
DRIVER = "libcuda.so.1"
# Not named libcudart: vLLM looks for that name among the loaded libraries and would find either.
RUNTIME = "libfakecudart.so"

DEVICES = 2
GRANULARITY = 256 << 10

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
NOT_PERMITTED = 800


def compile_into(folder: Path, cuda_include: Path | None = None) -> None:
    """Compile both libraries into ``folder``; with CUDA's headers, checked against those.

    Raises:
        subprocess.CalledProcessError: gcc failed; its output is on stderr.
    """
    flags = ["-std=c11", "-O1", "-g", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror"]
    if cuda_include is not None:
        flags += ["-DFAKECUDA_WITH_CUDA_H", "-isystem", str(cuda_include)]
    driver, runtime = str(folder / DRIVER), str(folder / RUNTIME)
    for names, more, out in (
        (("model.c", "driver.c", "control.c"), [f"-Wl,-soname,{DRIVER}"], driver),
        (("fakecudart.c",), [driver, "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{RUNTIME}"], runtime),
    ):
        sources = [str(SOURCES / name) for name in names]
        subprocess.run(["gcc", *flags, *sources, *more, "-o", out], check=True)


@dataclass(frozen=True, kw_only=True)
class Alive:
    """What the driver holds: counts, and bytes of physical memory."""

    handles: int
    mappings: int
    reservations: int
    physical: int


class Standin:
    """The loaded stand-in. Everything it is asked for goes through the C interface."""

    def __init__(self, folder: Path) -> None:
        # RTLD_GLOBAL and the driver's own soname: whatever is loaded later and needs
        # libcuda.so.1 gets this one.
        self.driver = ctypes.CDLL(str(folder / DRIVER), mode=ctypes.RTLD_GLOBAL)
        self.runtime_path = folder / RUNTIME
        self.runtime = ctypes.CDLL(str(self.runtime_path))
        u64, text = ctypes.c_uint64, ctypes.c_char_p
        for name in ("live_handles", "live_mappings", "live_reservations", "physical_bytes"):
            self._function(name, u64)
        for name in ("violations", "work_in_flight", "capacity"):
            self._function(name, u64)
        self._function("calls", u64, text)
        self._function("fail", ctypes.c_int, text, u64, ctypes.c_int, u64)
        self._function("function", text, ctypes.c_size_t)
        self._function("trace", ctypes.c_size_t, text, ctypes.c_size_t)
        self._function("mapped", ctypes.c_int, u64, ctypes.c_size_t)
        self._function("begin_work", None, ctypes.c_int, u64, ctypes.c_size_t)
        self._function("set_capacity", None, u64)
        self._function("copy", ctypes.c_int, u64, u64, ctypes.c_size_t)
        self._function("registered_bytes", u64)
        self._function("contexts", ctypes.c_uint)
        self._function("capture", None, ctypes.c_int)
        self._function("share", None, u64)
        self._function("shared_peak", u64)
        self._function("take_host", ctypes.c_int, u64)
        self._function("give_host", None, u64)

    def _function(self, name: str, result: type | None, *arguments: type) -> None:
        function = getattr(self.driver, f"fakecuda_{name}")
        function.restype = result
        function.argtypes = arguments

    def initialize(self) -> None:
        assert self.driver.cuInit(0) == 0

    def reset(self) -> None:
        """Back to the state after initialize."""
        self.driver.fakecuda_reset()

    def alive(self) -> Alive:
        return Alive(
            handles=self.driver.fakecuda_live_handles(),
            mappings=self.driver.fakecuda_live_mappings(),
            reservations=self.driver.fakecuda_live_reservations(),
            physical=self.driver.fakecuda_physical_bytes(),
        )

    def functions(self) -> list[str]:
        names: list[str] = []
        while (name := self.driver.fakecuda_function(len(names))) is not None:
            names.append(name.decode())
        return names

    def fail(self, function: str, nth: int = 1, error: int = OUT_OF_MEMORY, count: int = 1) -> None:
        """Let the ``nth`` call from now on, and ``count - 1`` after it, return ``error``."""
        if self.driver.fakecuda_fail(function.encode(), nth, error, count) != 0:
            raise ValueError(f"the stand-in has no function {function}")

    def fail_nothing(self) -> None:
        self.driver.fakecuda_fail_nothing()

    def calls(self, function: str) -> int:
        return int(self.driver.fakecuda_calls(function.encode()))

    def forget_calls(self) -> None:
        self.driver.fakecuda_forget_calls()

    def trace(self) -> str:
        needed = self.driver.fakecuda_trace(None, 0)
        text = ctypes.create_string_buffer(needed)
        self.driver.fakecuda_trace(text, needed)
        return text.value.decode()

    def set_capacity(self, size: int) -> None:
        """Bytes of physical memory of one device; 0 is without limit."""
        self.driver.fakecuda_set_capacity(size)

    def capacity(self) -> int:
        return int(self.driver.fakecuda_capacity())

    def set_attribute(self, attribute: int, value: int) -> None:
        self.driver.fakecuda_set_attribute(attribute, value)

    def permit_fabric(self, permitted: bool) -> None:
        self.driver.fakecuda_permit_fabric(int(permitted))

    def ignore_hints(self, ignored: bool) -> None:
        self.driver.fakecuda_ignore_hints(int(ignored))

    def mapped(self, address: int, size: int = 1) -> bool:
        """Whether the whole range is mapped and accessible."""
        return bool(self.driver.fakecuda_mapped(address, size) == 2)

    def begin_work(self, address: int, size: int, device: int = 0) -> None:
        self.driver.fakecuda_begin_work(device, address, size)

    def work_in_flight(self) -> int:
        return int(self.driver.fakecuda_work_in_flight())

    def contexts(self) -> set[int]:
        """The devices on which the runtime has created contexts since this was last asked."""
        bits = self.driver.fakecuda_contexts()
        return {device for device in range(DEVICES) if bits >> device & 1}

    def registered(self) -> int:
        """Bytes of host memory that are registered."""
        return int(self.driver.fakecuda_registered_bytes())

    def share(self, limit: int) -> None:
        """One pool of so many bytes for devices and host; its peak is counted from here on."""
        self.driver.fakecuda_share(limit)

    def shared_peak(self) -> int:
        return int(self.driver.fakecuda_shared_peak())

    def take_host(self, size: int) -> bool:
        """Take host memory of the pool; whether it had room."""
        return bool(self.driver.fakecuda_take_host(size))

    def give_host(self, size: int) -> None:
        self.driver.fakecuda_give_host(size)

    def capture(self, on: bool) -> None:
        """Whether a CUDA graph is being captured, by a thread that is not the caller's."""
        self.driver.fakecuda_capture(int(on))

    def violations(self) -> int:
        return int(self.driver.fakecuda_violations())

    def write(self, address: int, data: bytes) -> int:
        """Copy to the device; the driver's error code."""
        source = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value
        return int(self.driver.fakecuda_copy(address, source, len(data)))

    def read(self, address: int, size: int) -> bytes | None:
        """Copy from the device; None where that is an error."""
        into = ctypes.create_string_buffer(size)
        failed = self.driver.fakecuda_copy(ctypes.addressof(into), address, size)
        return None if failed else into.raw
