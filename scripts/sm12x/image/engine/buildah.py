"""buildah, and podman, which builds with the same code."""

from __future__ import annotations

import json
import os
import re
import resource
from pathlib import Path
from typing import Any

from sm12x.core import process
from sm12x.image.engine.engine import SERVING, BuildRequest, Engine, Layer, common_words


class Bud(Engine):
    """An engine that builds with the code of `buildah bud`.

    ``chroot``: build steps run in a change of root, where no OCI runtime can be used.
    """

    # The command that removes images without a name.
    prune: str
    # Seen with 1.28: the container that a layer was made in stays until the layer is stored, which
    # goes through two files beside the package cache.
    copies_in_storage = 1
    copies_in_cache = 2

    def __init__(self, program: Path, version: str, *, chroot: bool) -> None:
        super().__init__(program, version)
        self.chroot = chroot

    @property
    def description(self) -> str:
        how = " with chroot isolation" if self.chroot else ""
        return f"{self.name} {self.version}{how} ({self.program})"

    def environment(self) -> dict[str, str]:
        return {"BUILDAH_ISOLATION": "chroot"} if self.chroot else {}

    def build_words(self, request: BuildRequest) -> list[str]:
        # --format docker: an OCI image has no HEALTHCHECK.
        words = ["build", "--layers", "--format", "docker", *common_words(request)]
        if self.chroot:
            words += _own_limits()
        return [*words, str(request.context)]

    @property
    def more_room(self) -> str:
        conf = "/etc" if os.geteuid() == 0 else "~/.config"
        return (
            f"`{self.prune}` removes images without a name, and `graphroot` in "
            f"{conf}/containers/storage.conf names another disk (docker writes a layer once, and "
            "takes about half)"
        )

    def package_cache(self) -> Path | None:
        # Beside the storage, and the layer that is being written as well.
        return Path(os.environ.get("TMPDIR") or "/var/tmp")  # noqa: S108 - buildah's own choice


class Buildah(Bud):
    name = "buildah"
    prune = "buildah rmi --prune"
    id_format = "{{.FromImageID}}"

    def inspect_words(self, template: str) -> list[str]:
        return ["inspect", "--type", "image", "--format", template]

    def digest(self, reference: str) -> str | None:
        if reference.partition("@")[2]:
            return self._inspect(reference, "{{.FromImageDigest}}")
        return None

    def labels(self, reference: str) -> dict[str, str]:
        found: dict[str, str] = self._oci(reference).get("config", {}).get("Labels") or {}
        return found

    def _oci(self, reference: str) -> dict[str, Any]:
        """The image's configuration; buildah's templates cannot print a part of it as JSON."""
        done = process.run([self.program, "inspect", "--type", "image", reference], check=False)
        found: dict[str, Any] = json.loads(done.stdout)["OCIv1"] if done.returncode == 0 else {}
        return found

    def size(self, reference: str) -> int:
        return sum(layer.size for layer in self.layers(reference))

    def layers(self, reference: str) -> tuple[Layer, ...]:
        image = self._oci(reference)
        if not image:
            return ()
        made_by = [
            str(entry.get("created_by", ""))
            for entry in image.get("history", ())
            if not entry.get("empty_layer")
        ]
        sizes = self._sizes()
        return tuple(
            Layer(size=sizes.get(diff, 0), made_by=text)
            for diff, text in zip(image["rootfs"]["diff_ids"], made_by, strict=False)
        )

    def _sizes(self) -> dict[str, int]:
        """Diff id -> unpacked size in bytes, from the store's own index: no command prints it."""
        store = self.storage()
        if store is None:
            return {}
        found: dict[str, int] = {}
        for index in store.glob("*-layers/layers.json"):
            for entry in json.loads(index.read_text(encoding="utf-8")):
                found[entry.get("diff-digest", "")] = int(entry.get("diff-size", 0))
        return found

    def export(self, reference: str, archive: Path) -> None:
        process.run([self.program, "push", reference, f"docker-archive:{archive}:{reference}"])

    def storage(self) -> Path | None:
        done = process.run([self.program, "info"], check=False)
        try:
            folder = Path(json.loads(done.stdout)["store"]["GraphRoot"])
        except (ValueError, KeyError):
            return None
        return folder if folder.is_dir() else None

    def run_hint(self, image: str, words: str = "", *, gpus: bool = False) -> str:
        if gpus:
            # buildah only builds: a GPU needs an engine that runs containers, which may be on
            # another machine.
            archive = f"{image.partition(':')[0]}.tar"
            return (
                f"buildah push {image} docker-archive:{archive}:{image}, and where docker and the "
                f"GPUs are docker load --input {archive} && docker run --rm --gpus all {SERVING} "
                f"{image} {words}"
            ).rstrip()
        isolation = " --isolation chroot" if self.chroot else ""
        limits = _limits_hint(self.chroot)
        return (
            f"buildah run{isolation} $(buildah from{limits} {image}) -- "
            f"/opt/venv/bin/python -P -m sm12x.runtime {words}"
        ).rstrip()


# What buildah 1.39 raises limits to.
_RAISED = 1 << 20
# What 1.28 itself sets: it lowers them first, and then cannot raise them.
_LIMITS = (("nofile", resource.RLIMIT_NOFILE, _RAISED), ("nproc", resource.RLIMIT_NPROC, 1 << 15))


def _own_limits(*, lower: bool = False) -> list[str]:
    """Options that give the steps of a build no higher limits than this process has.

    With ``lower`` only those for limits that are lower than what buildah raises them to.

    Without them buildah 1.39 raises both to 2^20, which a root without CAP_SYS_RESOURCE, as in
    a container, may not do: the first step fails. 1.28 lowers nproc to 2^15 before it looks.
    """
    words: list[str] = []
    for name, limit, most in _LIMITS:
        own = [
            _RAISED if value == resource.RLIM_INFINITY else value
            for value in resource.getrlimit(limit)
        ]
        if own[1] < _RAISED or not lower:
            soft, hard = (min(value, most) for value in own)
            words += ["--ulimit", f"{name}={soft}:{hard}"]
    return words


def _limits_hint(needed: bool) -> str:
    return "".join(f" {word}" for word in _own_limits(lower=True)) if needed else ""


# Numbers of capabilities: to mount, and to raise limits. The root of a container has neither.
SYS_ADMIN, _SYS_RESOURCE = 21, 24


def has_capability(number: int) -> bool:
    """Whether this process has a capability; True where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return True
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return found is None or bool(int(found[1], 16) >> number & 1)


def may_raise_limits() -> bool:
    return has_capability(_SYS_RESOURCE)


class Podman(Bud):
    name = "podman"
    prune = "podman image prune"

    def layers(self, reference: str) -> tuple[Layer, ...]:
        done = process.run([self.program, "history", "--no-trunc", "--format", "json", reference])
        return tuple(
            Layer(size=int(entry["size"]), made_by=str(entry["CreatedBy"]))
            for entry in reversed(json.loads(done.stdout))
        )

    def export(self, reference: str, archive: Path) -> None:
        process.run(
            [self.program, "save", "--format", "docker-archive", "--output", archive, reference]
        )

    def storage(self) -> Path | None:
        done = process.run([self.program, "info", "--format", "{{.Store.GraphRoot}}"], check=False)
        folder = Path(done.stdout.strip() or "/nowhere")
        return folder if folder.is_dir() else None

    def run_hint(self, image: str, words: str = "", *, gpus: bool = False) -> str:
        options = f" --device nvidia.com/gpu=all {SERVING}" if gpus else ""
        # Run as root, it raises them for the container.
        limits = _limits_hint(os.geteuid() == 0 and not may_raise_limits())
        return f"podman run --rm{limits}{options} {image} {words}".rstrip()


def needs_chroot() -> bool:
    """Whether build steps must run in a change of root: no OCI runtime, or inside a container."""
    if os.environ.get("BUILDAH_ISOLATION") or os.geteuid() != 0:
        return False
    inside = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    return inside or not any(process.which(name) for name in ("crun", "runc"))
