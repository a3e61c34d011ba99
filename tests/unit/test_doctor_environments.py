"""Hosts on which facts are hidden or mean something else: WSL2, podman, rootless docker, MIG."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit import doctorhost as fake
from tests.unit.doctorhost import GIB, MIB, FakeGpu, Machine, findings, severity, workstation

from sm12x.recipes import load

WSL = "6.6.87.2-microsoft-standard-WSL2"
PODMAN = {"podman version": json.dumps({"Client": {"Version": "5.8.1"}})}
TOOLKIT = {"nvidia-ctk": ""}
LEFT_OVER = {"/etc/docker/daemon.json": json.dumps({"runtimes": {"nvidia": {"path": "x"}}})}
SPEC = {"/etc/cdi/nvidia.yaml": "kind: nvidia.com/gpu\nlibcuda.so.595.84\n"}
ROOTLESS = ["name=seccomp,profile=builtin", "name=rootless", "name=cgroupns"]


def rtx_5090(used: int, **more: object) -> FakeGpu:
    return dataclasses.replace(
        FakeGpu(
            name="NVIDIA GeForce RTX 5090",
            capability=(12, 0),
            bus="00000000:01:00.0",
            memory=(32607 * MIB, used),
        ),
        **more,  # type: ignore[arg-type]
    )


def desktop(root: Path, used: int = 2355 * MIB, **more: object) -> Machine:
    """One RTX 5090, and docker with the NVIDIA runtime unless ``answers`` say otherwise."""
    return workstation(root, library=fake.nvml("595.84", [rtx_5090(used)]), **more)


def wsl(root: Path, version: str = "596.36", **more: object) -> Machine:
    machine = Machine(root=root, library=fake.nvml(version, [rtx_5090(2355 * MIB)]), **more)  # type: ignore[arg-type]
    machine.files["/proc/sys/kernel/osrelease"] = WSL
    machine.answers |= fake.docker(Runtimes={"runc": {}, "nvidia": {}})
    return machine


def test_wsl_does_not_list_the_processes_of_windows(tmp_path: Path) -> None:
    found = findings(wsl(tmp_path))
    assert [one.id for group in found.values() for one in group if one.severity == "bad"] == []
    assert severity(found, "gpu.leftover") == "unknown"
    # Neither is in WSL2: devices of Linux, and a machine to start again.
    assert not any("/dev/nvidia" in fix or "reboot" in fix for fix in found["gpu.leftover"][0].fix)
    assert any("microsoft/WSL#7162" in source for source in found["gpu.leftover"][0].sources)


def test_in_wsl_an_empty_kernel_log_says_nothing_of_the_driver(tmp_path: Path) -> None:
    assert severity(findings(wsl(tmp_path)), "driver.log") == "unknown"


def test_in_wsl_the_driver_is_installed_in_windows(tmp_path: Path) -> None:
    (old,) = findings(wsl(tmp_path / "old", version="570.86"))["driver.version"]
    assert old.severity == "bad"
    assert not any("apt" in fix for fix in old.fix)
    assert any("Windows" in fix for fix in old.fix)
    machine = wsl(tmp_path / "none")
    machine.library = fake.no_nvml
    (missing,) = findings(machine)["driver.loaded"]
    assert missing.severity == "unknown"
    assert any("Windows" in fix for fix in missing.fix)


@pytest.mark.parametrize("files", [{}, LEFT_OVER])
@pytest.mark.parametrize("tools", [{}, TOOLKIT])
def test_podman_without_a_cdi_spec_hands_out_no_gpu(
    tmp_path: Path, files: dict[str, str], tools: dict[str, str]
) -> None:
    found = findings(desktop(tmp_path, answers={**PODMAN, **tools}, files=files))
    assert [one.severity for one in found["engine.gpus"]] == ["bad"]
    assert found["engine.gpus"][0].fix[-1].startswith("sudo nvidia-ctk cdi generate")
    assert not any("docker" in fix for fix in found["engine.gpus"][0].fix)
    assert "NVIDIA/nvidia-container-toolkit#146" in str(found["engine.gpus"][0].sources)


def test_podman_with_a_cdi_spec(tmp_path: Path) -> None:
    found = findings(desktop(tmp_path, answers={**PODMAN, **TOOLKIT}, files=SPEC))
    assert [one.severity for one in found["engine.gpus"]] == ["ok"]


def test_a_cdi_spec_that_may_not_be_read_is_not_taken_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: Any = Path.open

    def refuse(path: Path, *args: str, **settings: str) -> Any:
        if path.name == "nvidia.yaml" and "mode" not in settings:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **settings)

    machine = desktop(tmp_path, answers={**PODMAN, **TOOLKIT}, files=SPEC)
    monkeypatch.setattr(Path, "open", refuse)
    found = findings(machine)
    assert severity(found, "engine.gpus") == "unknown"
    assert severity(found, "engine.cdi") == "unknown"


def test_two_engines_are_told_apart(tmp_path: Path) -> None:
    # GIVEN docker that hands out GPUs, and podman that does not
    answers = {**PODMAN, **TOOLKIT, **fake.docker(Runtimes={"nvidia": {}})}
    found = findings(desktop(tmp_path, answers=answers))["engine.gpus"]
    # THEN podman's lack is told, and is no failure
    assert [one.severity for one in found] == ["info", "ok"]
    assert "podman" in found[0].seen


def test_a_docker_that_does_not_answer_serves_nobody(tmp_path: Path) -> None:
    answers = {**PODMAN, **TOOLKIT, **fake.docker(ServerErrors=["Cannot connect."])}
    found = findings(desktop(tmp_path, answers=answers, files=LEFT_OVER))
    assert [one.severity for one in found["engine.gpus"]] == ["bad"]
    assert [one.severity for one in found["engine.present"]] == ["info", "ok"]


def test_docker_that_is_podman_is_judged_as_podman(tmp_path: Path) -> None:
    """The package podman-docker, whose `docker info` is that of podman."""
    info = {"docker info": json.dumps({"host": {"arch": "amd64"}, "version": {"Version": "5.8.1"}})}
    for name, answers in (("alone", {}), ("both", PODMAN)):
        machine = desktop(tmp_path / name, answers={**info, **answers, **TOOLKIT}, files=LEFT_OVER)
        found = findings(machine)
        assert [one.severity for one in found["engine.gpus"]] == ["bad"]
        assert [one.seen.split()[:2] for one in found["engine.present"]] == [["podman", "5.8.1"]]


def test_a_daemon_that_was_not_started_again(tmp_path: Path) -> None:
    answers = {**fake.docker(), **TOOLKIT}
    (found,) = findings(desktop(tmp_path, answers=answers, files=LEFT_OVER))["engine.gpus"]
    assert found.severity == "info"
    assert any("systemctl restart docker" in fix for fix in found.fix)


@pytest.mark.parametrize("files", [{}, LEFT_OVER])
def test_rootless_docker_has_a_configuration_of_its_own(
    tmp_path: Path, files: dict[str, str]
) -> None:
    answers = {**fake.docker(SecurityOptions=ROOTLESS), **TOOLKIT}
    (found,) = findings(desktop(tmp_path, answers=answers, files=files))["engine.gpus"]
    assert found.severity == "warn"
    commands = "\n".join(found.fix)
    assert "$HOME/.config/docker/daemon.json" in commands
    assert "systemctl --user restart docker" in commands
    assert "no-cgroups" in commands
    assert "sudo systemctl restart docker" not in commands
    assert "NVIDIA/libnvidia-container#154" in str(found.sources)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("no-cgroups = true", "ok"),
        ("#no-cgroups = true", "info"),
        ("no-cgroups = false", "info"),
        ("", "info"),
    ],
)
def test_rootless_docker_with_its_runtime(tmp_path: Path, config: str, expected: str) -> None:
    options = fake.docker(SecurityOptions=ROOTLESS, Runtimes={"runc": {}, "nvidia": {}})
    files = {"/etc/nvidia-container-runtime/config.toml": f"[nvidia-container-cli]\n{config}\n"}
    (found,) = findings(desktop(tmp_path, answers={**options, **TOOLKIT}, files=files))[
        "engine.gpus"
    ]
    assert found.severity == expected
    assert bool(found.fix) == (expected != "ok")


def split_card(**more: object) -> FakeGpu:
    return dataclasses.replace(fake.rtx_pro(0), mig=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [None, (96 * GIB, 60 * GIB)])
def test_a_card_that_is_split_is_told(tmp_path: Path, memory: tuple[int, int] | None) -> None:
    # GIVEN a card in MIG mode, whose memory only root is told
    machine = workstation(tmp_path, library=fake.nvml("595.84", [split_card(memory=memory)]))
    found = findings(machine)
    assert [one.severity for one in found["gpu.split"]] == ["warn"]
    assert any("nvidia-smi -L" in fix for fix in found["gpu.split"][0].fix)
    # THEN its processes are not taken for none
    assert severity(found, "gpu.leftover") == "unknown"
    assert "NVIDIA/nccl#1716" in str(found["gpu.split"][0].sources)


def test_a_card_that_gives_no_memory_may_be_split(tmp_path: Path) -> None:
    gpu = dataclasses.replace(fake.rtx_pro(0), memory=None)
    found = findings(workstation(tmp_path, library=fake.nvml("595.84", [gpu])))
    assert [one.severity for one in found["gpu.split"]] == ["unknown"]
    assert "MIG" in found["gpu.split"][0].seen


@pytest.mark.parametrize("kind", [workstation, fake.spark])
def test_a_card_that_is_whole_has_no_finding(tmp_path: Path, kind: object) -> None:
    assert "gpu.split" not in findings(kind(tmp_path))  # type: ignore[operator]
    whole = dataclasses.replace(fake.rtx_pro(0), mig=False)
    machine = workstation(tmp_path, library=fake.nvml("595.84", [whole]))
    assert "gpu.split" not in findings(machine)


def test_a_recipe_does_not_count_a_card_that_is_split(tmp_path: Path) -> None:
    recipe = load.load(load.find("deepseek-v4-flash-rtx-pro-6000-tp4"))
    gpus = [*(fake.rtx_pro(n) for n in range(1, 4)), split_card()]
    machine = workstation(tmp_path, library=fake.nvml("595.84", gpus))
    assert severity(findings(machine, recipe=recipe), "recipe.needs") == "bad"
