"""Whole machines, from what their files and programs say to what `doctor` finds."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit import doctorhost as fake
from tests.unit.doctorhost import BUILT, GIB, Machine, findings, rtx_pro, severity, workstation

from sm12x.core import declared
from sm12x.doctor import examine, report
from sm12x.wheel.ledger import LibraryEntry


def test_a_sound_workstation(tmp_path: Path) -> None:
    # GIVEN four RTX PRO 6000 and a bundle for them
    audit = fake.bundle(tmp_path / "dist")

    # WHEN it is examined
    found = findings(workstation(tmp_path / "root"), audit)

    # THEN nothing is bad or worth a look, and it says how the image will run
    assert not [
        each for group in found.values() for each in group if each.severity in ("bad", "warn")
    ]
    assert found["gpu.present"][0].seen.startswith("4 x NVIDIA RTX PRO 6000")
    assert {"GPU", "0-3", "40", "20", "2"} <= {*found["gpu.code"][0].seen.split()}
    assert "120.0 GiB" in found["memory.host"][0].seen
    assert severity(found, "kernel.iommu") == "ok"


def test_memory_that_no_process_owns(tmp_path: Path) -> None:
    # GIVEN one GPU with 80 GiB used and no process, and one with a server
    gpus = [rtx_pro(0, 80 * GIB), rtx_pro(1, 80 * GIB, [(4711, 79 * GIB + GIB // 2)]), rtx_pro(2)]
    machine = workstation(tmp_path, library=fake.nvml("590.48.01", gpus))

    found = findings(machine)["gpu.leftover"]

    # THEN only the first is bad, and the way out is named but not taken
    assert [each.severity for each in found] == ["bad", "info", "ok"]
    assert "GPU 0" in found[0].seen
    assert "80.0 GiB" in found[0].seen
    assert found[0].fix == ("sudo fuser -v /dev/nvidia*", "sudo reboot")


def test_processes_own_less_than_is_used(tmp_path: Path) -> None:
    machine = workstation(
        tmp_path, library=fake.nvml("590.48.01", [rtx_pro(0, 80 * GIB, [(1, 10 * GIB)])])
    )
    found = findings(machine)["gpu.leftover"]
    assert found[0].severity == "warn"
    assert "70.0 GiB" in found[0].seen


def test_in_a_container_other_processes_are_hidden(tmp_path: Path) -> None:
    machine = workstation(
        tmp_path,
        files={"/.dockerenv": ""},
        library=fake.nvml("590.48.01", [rtx_pro(0, 80 * GIB)]),
    )
    found = findings(machine)["gpu.leftover"]
    assert found[0].severity == "unknown"
    assert "80.0 GiB" in found[0].seen


def test_a_translating_iommu_between_gpus(tmp_path: Path) -> None:
    files = {"/sys/bus/pci/devices/0000:01:00.0/iommu_group/type": "DMA-FQ"}
    found = findings(workstation(tmp_path, files=files))["kernel.iommu"]
    assert found[0].severity == "warn"
    assert "vllm-project/vllm#33041" in found[0].sources[0]
    assert any("iommu=pt" in command for command in found[0].fix)


def test_a_driver_that_others_had_trouble_with(tmp_path: Path) -> None:
    gpus = [rtx_pro(0)]
    found = findings(workstation(tmp_path, library=fake.nvml("595.71.05", gpus)))["driver.trouble"]
    assert {each.severity for each in found} == {"warn"}
    assert any("NVIDIA/open-gpu-kernel-modules#1159" in each.sources[0] for each in found)


def test_a_driver_too_old_for_the_image(tmp_path: Path) -> None:
    audit = fake.bundle(tmp_path / "dist")
    machine = workstation(tmp_path / "root", library=fake.nvml("570.86.15", [rtx_pro(0)]))
    found = findings(machine, audit)["driver.version"]
    assert found[0].severity == "bad"
    assert "nvidia-driver-580-open" in found[0].fix[0]


def test_library_and_module_differ(tmp_path: Path) -> None:
    library = fake.nvml("", [], fault="Driver/library version mismatch")
    found = findings(workstation(tmp_path, library=library))["driver.loaded"]
    assert found[0].severity == "bad"
    assert found[0].fix == ("sudo reboot",)


def test_a_driver_with_nothing_to_ask_it_with(tmp_path: Path) -> None:
    device = "/sys/bus/pci/devices/000f:01:00.0"
    files = {
        "/proc/driver/nvidia/gpus/000f:01:00.0/information": "Model: \t NVIDIA GB10\nIRQ: 42\n",
        f"{device}/vendor": "0x10de",
        f"{device}/class": "0x030000",
        f"{device}/device": "0x2e12",
    }
    found = findings(workstation(tmp_path, files=files, library=fake.no_nvml))
    assert severity(found, "driver.loaded") == "unknown"
    assert found["driver.loaded"][0].fix == ("pip install nvidia-ml-py",)
    assert "1 x NVIDIA GB10 (12.1)" in found["gpu.present"][0].seen


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    library = fake.nvml("", [], fault="Unknown Error")
    found = findings(workstation(tmp_path, library=library))["driver.loaded"]
    assert found[0].severity == "bad"
    assert "NVML: Unknown Error" in found[0].seen


def test_an_image_for_another_architecture(tmp_path: Path) -> None:
    audit = fake.bundle(tmp_path / "dist", machine="aarch64")
    found = findings(workstation(tmp_path / "root"), audit)["image.audit"]
    assert found[0].severity == "bad"
    assert found[0].fix == ("sm12x bundle",)


def test_an_image_without_code_for_the_gpu(tmp_path: Path) -> None:
    audit = fake.bundle(tmp_path / "dist", native=0, ptx=0, none=62)
    found = findings(workstation(tmp_path / "root"), audit)["gpu.code"]
    assert found[0].severity == "bad"


def test_a_gpu_the_image_was_not_judged_for(tmp_path: Path) -> None:
    h200 = fake.FakeGpu(
        name="NVIDIA H200", capability=(9, 0), bus="00000000:01:00.0", memory=(140 * GIB, 0)
    )
    machine = workstation(tmp_path / "root", library=fake.nvml("590.48.01", [h200]))
    found = findings(machine, fake.bundle(tmp_path / "dist"))
    assert severity(found, "gpu.code") == "unknown"
    assert "--arch 9.0" in found["gpu.code"][0].fix[0]
    assert severity(found, "gpu.present") == "warn"


def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    # GIVEN nothing of NVIDIA, no docker
    found = findings(Machine(root=tmp_path))

    # THEN what cannot be known is said to be unknown, and only the engine is bad
    assert severity(found, "gpu.present") == "info"
    assert severity(found, "driver.loaded") == "unknown"
    assert severity(found, "driver.version") == "unknown"
    assert severity(found, "engine.present") == "bad"
    assert [name for name, group in found.items() if group[0].severity == "bad"] == [
        "engine.present"
    ]


def test_gpus_without_a_driver(tmp_path: Path) -> None:
    folder = "/sys/bus/pci/devices/0000:01:00.0"
    audio = "/sys/bus/pci/devices/0000:01:00.1"
    files = {
        f"{folder}/vendor": "0x10de",
        f"{folder}/class": "0x030200",
        f"{folder}/device": "0x2bb4",
        f"{audio}/vendor": "0x10de",
        f"{audio}/class": "0x040300",
        f"{audio}/device": "0x22e8",
    }
    machine = Machine(root=tmp_path, files=files)
    found = findings(machine)
    assert severity(found, "driver.loaded") == "bad"
    assert found["driver.loaded"][0].fix[0].startswith("sudo apt install nvidia-driver-580-open")
    assert "1 x RTX PRO 6000 Blackwell (12.0)" in found["gpu.present"][0].seen
    assert severity(found, "gpu.leftover") == "unknown"


def test_docker_that_does_not_answer(tmp_path: Path) -> None:
    machine = workstation(tmp_path, answers=fake.docker(ServerErrors=["Cannot connect."]))
    found = findings(machine)
    assert severity(found, "engine.present") == "bad"
    assert "Cannot connect" in found["engine.present"][0].seen
    # Without the toolkit no container gets a GPU either.
    assert severity(found, "engine.gpus") == "bad"


def test_podman_alone(tmp_path: Path) -> None:
    answers = {"podman version": '{"Client": {"Version": "5.4.2"}}'}
    files = {"/etc/cdi/nvidia.yaml": "nvidia.com/gpu libcuda.so.590.48.01"}
    found = findings(workstation(tmp_path, answers=answers, files=files))
    assert found["engine.present"][0].seen.startswith("podman 5.4.2 ")
    assert severity(found, "engine.gpus") == "ok"
    assert severity(found, "engine.cdi") == "ok"


def test_a_cdi_spec_of_the_driver_before(tmp_path: Path) -> None:
    spec = "kind: nvidia.com/gpu\nhostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06\n"
    found = findings(workstation(tmp_path, files={"/etc/cdi/nvidia.yaml": spec}))["engine.cdi"]
    assert found[0].severity == "bad"
    assert "580.65.06" in found[0].seen


def test_caches_of_another_build(tmp_path: Path) -> None:
    # GIVEN a cache older than the image, one younger, one that is both
    audit = fake.bundle(tmp_path / "dist")
    cache = tmp_path / "cache"
    times = {"vllm/a": -10, "triton/a": 10, "inductor/a": -10, "inductor/b": 10}
    for name, after in times.items():
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).write_text("")
        os.utime(cache / name, (BUILT + after, BUILT + after))

    found = findings(workstation(tmp_path / "root"), audit, [cache])["cache.stale"]

    told = {each.seen.partition(":")[0]: each for each in found}
    assert {kind: each.severity for kind, each in told.items()} == {
        "vllm": "warn",
        "triton": "ok",
        "inductor": "warn",
    }
    assert told["vllm"].fix == (f"rm -rf {cache / 'vllm'}",)
    assert (cache / "vllm/a").exists()


def test_a_cache_of_this_user_and_no_image_to_compare_with(tmp_path: Path) -> None:
    root = tmp_path / "root"
    files = {"/home/me/.cache/vllm/torch_compile_cache/0a/x": "", "/proc/cmdline": ""}
    machine = workstation(root, files=files)
    audit = fake.bundle(tmp_path / "dist")
    (audit.parent / "ledger.json").unlink()
    found = findings(machine, audit)["cache.stale"]
    assert found[0].severity == "unknown"
    assert str(root / "home/me/.cache/vllm") in found[0].seen


def test_a_cache_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN the docker volume, in a folder that only root may enter
    root = tmp_path / "root"
    volume = "/var/lib/docker/volumes/sm12x-cache/_data"
    machine = workstation(root)
    machine.answers["docker volume inspect"] = f"{volume}\n"
    scandir = os.scandir

    def refuse(path: str) -> object:
        if volume in str(path):
            raise PermissionError(13, "Permission denied", volume)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)

    found = findings(machine)["cache.stale"]

    # THEN it is not taken for empty
    assert [each.severity for each in found] == ["unknown"]
    assert f"{volume}: Permission denied" in found[0].seen


def test_flashinfer_keeps_its_releases_apart(tmp_path: Path) -> None:
    audit = fake.bundle(tmp_path / "dist")
    cache = tmp_path / "cache/flashinfer/.cache/flashinfer/0.6.1/120a/cached_ops"
    cache.mkdir(parents=True)
    (cache / "a.so").write_text("")
    found = findings(workstation(tmp_path / "root"), audit, [tmp_path / "cache"])["cache.stale"]
    assert found[0].severity == "info"
    assert all(release in found[0].seen for release in ("0.6.1", "0.6.8.post1"))


def test_inside_the_image_itself(tmp_path: Path) -> None:
    # GIVEN a container of the image, where no bundle was built
    verdicts = [("native", "native"), ("mixed", "ptx"), ("none", "none"), ("host", "host")]
    empty: dict[str, Any] = {one.name: "" for one in dataclasses.fields(LibraryEntry)}
    empty |= {"size": 1, "official_size": 1, "cubins": {}, "ptx": {}, "ops": (), "lost": ()}
    ledger = fake.ledger(
        base_version="0.33.0",
        stack_id="0123abcd",
        machine="x86_64",
        dependencies={"cuda-toolkit": "13.0.2"},
        libraries=tuple(
            LibraryEntry(**{**empty, "path": f"{n}.so", "sm120": sm120, "sm121": sm121})
            for n, (sm120, sm121) in enumerate(verdicts)
        ),
    )
    files = {"/.dockerenv": "", "/opt/sm12x/ledger.json": declared.to_json(ledger)}
    found = findings(workstation(tmp_path / "root", files=files))
    assert {"2", "0", "1"} <= {*found["gpu.code"][0].seen.split()}
    assert found["image.audit"][0].seen.startswith("vllm-sm12x:0.33.0-0123abcd")


def test_a_container_with_little_memory(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "0::/box",
        "/sys/fs/cgroup/box/memory.max": str(32 * GIB),
        "/sys/fs/cgroup/box/memory.current": str(8 * GIB),
    }
    found = findings(workstation(tmp_path, files=files))["memory.host"]
    assert all(size in found[0].seen for size in ("24.0 GiB", "503.0 GiB", "32.0 GiB", " 8.0 GiB"))


def test_huge_pages_off_and_little_shared_memory(tmp_path: Path) -> None:
    files = {"/sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"}
    machine = workstation(tmp_path, files=files, shm=64 * fake.MIB)
    found = findings(machine)
    assert severity(found, "memory.huge-pages") == "warn"
    assert severity(found, "memory.shm") == "warn"
    assert "64.0 MiB" in found["memory.shm"][0].seen


@pytest.mark.parametrize(("mode", "severe"), [("0", "ok"), ("1", "ok"), ("x", "unknown")])
def test_overcommit_that_refuses_no_host_copies(tmp_path: Path, mode: str, severe: str) -> None:
    files = {"/proc/sys/vm/overcommit_memory": mode}
    (found,) = findings(workstation(tmp_path, files=files))["memory.overcommit"]
    assert (found.severity, found.fix) == (severe, ())


def test_strict_overcommit(tmp_path: Path) -> None:
    # GIVEN much free memory, of which the kernel promises half, and most of that is taken
    memory = fake.meminfo(MemTotal=503, MemAvailable=480, CommitLimit=251, Committed_AS=211)
    files = {"/proc/sys/vm/overcommit_memory": "2", "/proc/meminfo": memory}

    (found,) = findings(workstation(tmp_path, files=files))["memory.overcommit"]

    # THEN it says how little is left for host copies, and how to lift the limit
    assert found.severity == "warn"
    assert all(size in found.seen for size in (" 40.0 GiB", "251.0 GiB"))
    assert found.fix[0] == "sudo sysctl vm.overcommit_memory=0"
    assert found.sources[0].startswith("Linux, Documentation/")


def test_strict_overcommit_with_a_meminfo_that_does_not_say(tmp_path: Path) -> None:
    files = {"/proc/sys/vm/overcommit_memory": "2", "/proc/meminfo": ""}
    (found,) = findings(workstation(tmp_path, files=files))["memory.overcommit"]
    assert (found.severity, found.seen) == ("warn", "vm.overcommit_memory is 2")


def test_trouble_in_the_kernel_log(tmp_path: Path) -> None:
    answers = {
        **fake.docker(Runtimes={"nvidia": {}}),
        "dmesg": "[1.0] usb 1-1\n[2.0] NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus",
    }
    found = findings(workstation(tmp_path, answers=answers))["driver.log"]
    assert found[0].severity == "warn"
    assert "79, GPU has fallen off the bus" in found[0].seen


def test_a_log_that_may_not_be_read(tmp_path: Path) -> None:
    machine = workstation(tmp_path)
    del machine.answers["dmesg"]
    found = findings(machine)["driver.log"]
    assert found[0].severity == "unknown"


STRANGE = (
    "", "-1", "x", "a:b", "0-", "[", "null", "5", "[]", "9" * 5000, "MemTotal: 5",
    "Max locked memory  max", "::", "0::", "a\tb\n\t\t",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", [workstation, fake.spark])
def test_damaged_files_and_answers_are_findings(
    tmp_path: Path, kind: Callable[[Path], Machine], seed: int
) -> None:
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    for number in range(10):
        machine = kind(tmp_path / f"{number}")
        machine.answers |= {"docker ps": "", "docker volume": ""}
        for texts in (machine.files, machine.answers):
            for name in draw.sample([*texts], 3):
                text = texts[name]
                at = draw.randint(0, len(text))
                texts[name] = text[:at] + draw.choice(STRANGE) + text[at + draw.randint(0, 9) :]
                if draw.random() < 0.5:
                    texts[name] = draw.choice(STRANGE)
        facts = fake.facts(machine)
        found = examine.run(facts)
        assert found
        assert report.text(facts, found)
        declared.to_json(report.document(facts, found))
