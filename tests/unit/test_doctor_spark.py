"""One GB10 of a pair: unified memory, RoCE, and the variables that choose among its ports."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit import doctorhost as fake
from tests.unit.doctorhost import GIB, findings, gb10, meminfo, severity, spark


def test_a_fresh_spark(tmp_path: Path) -> None:
    found = findings(spark(tmp_path))
    assert severity(found, "gpu.unified") == "info"
    assert severity(found, "gpu.leftover") == "ok"
    assert found["net.rdma"][0].fix == (
        "export NCCL_IB_HCA=rocep1s0f1",
        "export NCCL_IB_GID_INDEX=3",
    )
    assert "MTU 9000" in found["net.rdma"][0].seen
    # RDMA makes the limit of locked memory matter.
    assert severity(found, "memory.memlock") == "warn"
    assert "kernel.iommu" not in found


def test_a_spark_after_a_stopped_container(tmp_path: Path) -> None:
    # GIVEN 100 GiB that neither Linux nor a process accounts for
    memory = meminfo(MemTotal=121, MemFree=8, MemAvailable=12, Cached=5, AnonPages=4)
    found = findings(spark(tmp_path, files={"/proc/meminfo": memory}))["gpu.leftover"]
    assert found[0].severity == "bad"
    assert "104.0 GiB" in found[0].seen
    assert "sudo reboot" in found[0].fix


def test_a_spark_that_serves(tmp_path: Path) -> None:
    memory = meminfo(MemTotal=121, MemFree=8, MemAvailable=12, Cached=5, AnonPages=4)
    library = fake.nvml("580.142", [gb10(processes=[(7, 100 * GIB)])])
    machine = spark(tmp_path, files={"/proc/meminfo": memory}, library=library)
    assert severity(findings(machine), "gpu.leftover") == "ok"


def test_a_spark_with_a_full_page_cache(tmp_path: Path) -> None:
    memory = meminfo(MemTotal=121, MemFree=4, MemAvailable=110, Cached=110, AnonPages=4)
    found = findings(spark(tmp_path, files={"/proc/meminfo": memory}))["memory.page-cache"]
    assert found[0].severity == "warn"
    assert any("drop_caches" in command for command in found[0].fix)
    # A reserve would be taken out of what vLLM's check at start counts.
    assert not any("min_free_kbytes" in command for command in found[0].fix)


def test_a_spark_whose_kernel_keeps_memory_for_kexec(tmp_path: Path) -> None:
    memory = meminfo(MemTotal=121, MemFree=100, CmaTotal=0, CmaFree=9.3)
    files = {"/proc/meminfo": memory, "/proc/sys/kernel/osrelease": "7.0.0-1019-nvidia"}
    found = findings(spark(tmp_path, files=files))
    assert severity(found, "kernel.kho") == "warn"
    assert "9.3 GiB" in found["kernel.kho"][0].seen
    assert "NVIDIA/NV-Kernels#591" in found["driver.trouble"][0].sources


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [
        ("NCCL_IB_HCA", "rocep9s9", "rocep1s0f1"),
        ("NCCL_IB_GID_INDEX", "0", "index 3"),
        ("NCCL_IB_GID_INDEX", "5", "rocep1s0f1"),
        ("GLOO_SOCKET_IFNAME", "enp1s0", "enp1s0f1np1"),
        ("NCCL_SOCKET_IFNAME", "=enp1s0", "enp1s0f1np1"),
    ],
)
def test_variables_that_name_what_is_not_there(
    tmp_path: Path, variable: str, value: str, part: str
) -> None:
    found = findings(spark(tmp_path, env={variable: value}))["net.variables"]
    assert (found[0].severity, found[0].fix) == ("warn", (f"unset {variable}",))
    assert part in found[0].seen


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NCCL_IB_HCA", "=rocep1s0f1:1"),
        ("NCCL_IB_HCA", "roce"),
        ("NCCL_IB_GID_INDEX", "3"),
        ("NCCL_SOCKET_IFNAME", "enp1"),
        ("NCCL_SOCKET_IFNAME", "^docker"),
    ],
)
def test_variables_that_fit(tmp_path: Path, variable: str, value: str) -> None:
    assert severity(findings(spark(tmp_path, env={variable: value})), "net.variables") == "ok"
