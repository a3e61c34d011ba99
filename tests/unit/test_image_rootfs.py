"""Where the base image comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm12x.core.errors import BuildFailedError, ToolFailedError
from sm12x.image.base import rootfs
from sm12x.image.base.host_settings import HostConfig
from sm12x.image.base.platforms import Platforms
from sm12x.image.base.rootfs import BaseImage
from sm12x.image.engine.engine import Docker
from sm12x.stack.model.base import ImageBase

DIGEST = "sha256:" + "a" * 64
SPEC = ImageBase(base=f"debian:trixie-slim@{DIGEST}", suite="trixie")
HOST = HostConfig(secrets={}, mirror="https://mirror.example/debian", host_network=False)
MADE = BaseImage(reference="sm12x-base:trixie", digest="sha256:made", origin="debootstrap")
HERE = Platforms(machine="x86_64", here="x86_64")
THERE = Platforms(machine="aarch64", here="x86_64", platform="linux/arm64")
PULLED = "sm12x-base:trixie-aaaaaaaaaaaa"


class Fake(Docker):
    """An engine with images in memory and a registry that answers or not."""

    def __init__(self, *images: str, registry: bool = False) -> None:
        super().__init__(Path("/usr/bin/docker"), "1", buildx=True)
        self.images = {name: {"sm12x.rootfs.sha256": "made"} for name in images}
        self.registry = registry
        self.platforms: list[str] = []

    def image_id(self, reference: str) -> str | None:
        return "id" if reference in self.images else None

    def labels(self, reference: str) -> dict[str, str]:
        return self.images.get(reference, {})

    def digest(self, reference: str) -> str | None:
        return DIGEST if reference == "mine:1" else None

    def pull(self, reference: str, platform: str = "") -> None:
        self.platforms.append(platform)
        if not self.registry:
            raise ToolFailedError(
                "`docker pull` ended with 1; its last lines:\n    no such host\n", next_step=""
            )
        self.images[reference] = {}

    def tag(self, reference: str, name: str) -> None:
        self.images[name] = self.images[reference]


def _resolve(
    engine: Fake, override: str | None = None, plan: Platforms = HERE
) -> tuple[BaseImage, list[str]]:
    said: list[str] = []
    found = rootfs.resolve(
        SPEC, engine, HOST, plan, override=override, say=said.append, on_line=lambda line: None
    )
    return found, said


def test_the_pinned_image_is_pulled_and_kept_under_a_name_of_ours() -> None:
    engine = Fake(registry=True)
    expected = BaseImage(reference=PULLED, digest=DIGEST, origin=SPEC.base)
    assert _resolve(engine) == (expected, [])
    engine.registry = False
    assert _resolve(engine) == (expected, [])


def test_the_image_of_another_machine_has_a_name_of_its_own() -> None:
    engine = Fake("sm12x-base:trixie", registry=True)
    found, _ = _resolve(engine, plan=THERE)
    assert found.reference == "sm12x-base:trixie-arm64-aaaaaaaaaaaa"
    assert engine.platforms == ["linux/arm64"]
    found, _ = _resolve(Fake("sm12x-base:trixie", "sm12x-base:trixie-arm64"), plan=THERE)
    assert found.reference == "sm12x-base:trixie-arm64"


def test_where_nothing_can_be_pulled_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rootfs, "make", lambda *args, **kwargs: MADE)
    found, said = _resolve(Fake())
    assert found == MADE
    assert [line for line in said if SPEC.base in line and "no such host" in line] == said != []


def test_one_made_before_is_used_again() -> None:
    assert _resolve(Fake("sm12x-base:trixie")) == (MADE, [])


def test_an_image_of_the_users_own_is_taken_as_it_is() -> None:
    found, _ = _resolve(Fake("mine:1"), override="mine:1")
    assert found == BaseImage(reference="mine:1", digest=DIGEST, origin="mine:1")
    with pytest.raises(BuildFailedError, match="nowhere:1"):
        _resolve(Fake(), override="nowhere:1")


def test_making_one_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(BuildFailedError, match="root"):
        rootfs.make(SPEC, Fake(), HOST, HERE, say=lambda text: None, on_line=lambda line: None)
