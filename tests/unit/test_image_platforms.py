"""What an image can be built for here, and what is missing for the others."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sm12x import layout
from sm12x.core import lockfile
from sm12x.core.errors import BadArchitectureError, UsageError
from sm12x.image.base import platforms
from sm12x.image.base.platforms import Platforms
from sm12x.image.bundle import context, decide, make
from sm12x.stack.model import base as bases

BASE = bases.load("0.33.0")
# As a kernel prints the handlers of qemu-user-static.
ARM64 = "enabled\ninterpreter /usr/libexec/qemu-binfmt/aarch64-binfmt-P\nflags: PF\noffset 0\n"
NAME = "qemu-aarch64"


@pytest.fixture(autouse=True)
def _on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


def handlers(folder: Path, texts: dict[str, str]) -> Path:
    for name, text in {"register": "", "status": "enabled\n", **texts}.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("asked", [None, "linux/amd64"])
def test_this_machines_image_takes_nothing_more(asked: str | None) -> None:
    plan = platforms.choose(BASE, asked, binfmt=Path("/nowhere"))
    assert plan == Platforms(machine="x86_64", here="x86_64")
    assert (plan.crossing, plan.suffix, plan.platform) == (False, "", "")


def test_on_another_machine_its_own_image_is_as_easy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    for asked in (None, "linux/arm64"):
        assert platforms.choose(BASE, asked) == Platforms(machine="aarch64", here="aarch64")
    with pytest.raises(BadArchitectureError, match=r"x86_64 .*aarch64"):
        platforms.choose(BASE, "linux/amd64")


def test_another_machines_image_takes_an_emulator_in_the_kernel(tmp_path: Path) -> None:
    plan = platforms.choose(BASE, "linux/arm64", binfmt=handlers(tmp_path, {NAME: ARM64}))
    assert plan == Platforms(machine="aarch64", here="x86_64", platform="linux/arm64")
    assert plan.native == Platforms(machine="x86_64", here="x86_64")
    assert (plan.suffix, plan.debian) == ("-arm64", "arm64")
    assert plan.install_args() == {"UV_PLATFORM": "musllinux_1_1_x86_64", "BYTECODE": ""}
    assert plan.native.install_args() == {}


def test_the_wheel_alone_takes_none() -> None:
    assert platforms.choose(BASE, "linux/arm64", image=False, binfmt=Path("/nowhere")).crossing


@pytest.mark.parametrize(
    "texts",
    [
        {},
        {"qemu-arm": ARM64},
        {NAME: ARM64.replace("enabled", "disabled")},
        {NAME: ARM64.replace("PF", "P")},
    ],
)
def test_what_is_missing_is_said_with_how_to_have_it(tmp_path: Path, texts: dict[str, str]) -> None:
    with pytest.raises(BadArchitectureError) as caught:
        platforms.choose(BASE, "linux/arm64", binfmt=handlers(tmp_path, texts))
    for step in ("apt-get install qemu-user-static", f"binfmt_misc {tmp_path}", "--no-image"):
        assert step in caught.value.next_step


def test_unknown_platforms_and_bases_without_a_wheel() -> None:
    with pytest.raises(UsageError, match="arm64"):
        platforms.choose(BASE, "arm64")
    alone = dataclasses.replace(BASE, wheels={"x86_64": BASE.wheels["x86_64"]})
    with pytest.raises(BadArchitectureError, match="aarch64") as caught:
        platforms.choose(alone, "linux/arm64")
    assert "linux/amd64 with --platform" in caught.value.next_step


def test_what_is_made_for_another_machine_lies_apart() -> None:
    there = Platforms(machine="aarch64", here="x86_64", platform="linux/arm64")
    assert decide.folder_of(BASE, there).name == "0.33.0-arm64"
    assert make.image_tags("0.33.0", "1a2b3c4d", "quick", there.suffix) == (
        "vllm-sm12x:0.33.0-1a2b3c4d-quick-arm64",
        "vllm-sm12x:0.33.0-1a2b3c4d-arm64",
    )


def test_the_builder_has_its_own_packages_and_the_lock_of_the_others() -> None:
    found = context.builder_files(BASE, "aarch64", here="x86_64")
    assert found["build.lock"] == BASE.build_lock_path("x86_64")
    assert found["base/0.33.0/build-aarch64.lock"] == BASE.build_lock_path("aarch64")
    assert "patches/0.33.0/requirements-aarch64.lock" in found
    alone = context.builder_files(BASE, "x86_64", here="x86_64")
    assert not [name for name in alone if "aarch64" in name]


def test_what_has_no_wheel_is_built_with_locked_packages() -> None:
    spec = dataclasses.replace(
        BASE.locks["aarch64"], build_from_sdist=("ninja",), sdist_requires=("cmake",)
    )
    base = dataclasses.replace(BASE, locks={**BASE.locks, "aarch64": spec})
    text = context.bundle_files(base, "aarch64", flashinfer="")["sdists.lock"]
    assert isinstance(text, str)
    assert {"cmake", "setuptools"} <= set(lockfile.parse(text).versions)
    assert context.bundle_files(base, "x86_64", flashinfer="")["sdists.lock"] == ""


def test_packages_of_extras_are_installed_last_as_they_are_locked() -> None:
    bare = dataclasses.replace(BASE, extras=())
    for machine in BASE.locks:
        text = context.bundle_files(BASE, machine, flashinfer="")["extras.lock"]
        assert isinstance(text, str)
        assert lockfile.parse(text).versions == {"b12x": "1.5.1"}
        assert text in BASE.lock_path(machine).read_text()
        assert context.bundle_files(bare, machine, flashinfer="")["extras.lock"] == ""
    docker = (layout.root() / context.DOCKERFILES["bundle"]).read_text().replace("\\\n", " ")
    installs = [step for step in re.split(r"&&|;", docker) if "uv pip install" in step]
    assert [step.split()[-1] for step in installs] == [
        "/run/build/sdists.lock",
        "/opt/sm12x/requirements.lock",
        "/run/build/extras.lock",
    ]
    assert {"--reinstall", "--no-deps", "--require-hashes"} <= set(installs[-1].split())
    # Bytecode of all is made once, by whichever install is the last.
    assert "LATER" in installs[-1]
    assert "NOW" in installs[-2]
