"""buildah, and podman, which builds with the same code."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
from pathlib import Path
from typing import Any

from sm12x.core import process
from sm12x.image.engine.engine import SERVING, BuildRequest, Engine, Layer, common_words

# Beside a bundle that buildah made.
SCRIPT = "run-image"
_SCRIPT = """\
#!/bin/sh
# Made by `sm12x bundle`. run-image [WORDS]: what `docker run --rm IMAGE WORDS` does, by buildah.
# run-image save [FILE]: an archive of the image for `docker load`.
set -e
image={image}
if [ "${{1:-}}" = save ]; then
  exec buildah push "$image" "docker-archive:${{2:-{archive}}}:$image"
fi
container=$(buildah from{limits} "$image")
trap 'buildah rm "$container" >/dev/null' EXIT
buildah run{isolation} "$container" -- /opt/venv/bin/python -P -m sm12x.runtime "$@"
"""


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

    def storage(self) -> Path | None:
        done = process.run([self.program, "info"], check=False)
        root = re.search(r'"?[Gg]raphRoot"?: "?([^",\s]+)', done.stdout)
        folder = Path(root[1] if root else "/nowhere")
        return folder if folder.is_dir() else None

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
        labels: dict[str, str] = self._oci(reference).get("config", {}).get("Labels") or {}
        return labels

    def _oci(self, reference: str) -> dict[str, Any]:
        """Return the image's configuration, a part of which buildah cannot print as JSON."""
        done = process.run([self.program, "inspect", "--type", "image", reference], check=False)
        image: dict[str, Any] = json.loads(done.stdout)["OCIv1"] if done.returncode == 0 else {}
        return image

    def size(self, reference: str) -> int:
        return sum(layer.size for layer in self.layers(reference))

    def layers(self, reference: str) -> tuple[Layer, ...]:
        image = self._oci(reference)
        store = self.storage()
        if not image or store is None:
            return ()
        # Unpacked sizes are in the store's own index: no command prints them.
        sizes = {
            entry.get("diff-digest", ""): int(entry.get("diff-size", 0))
            for index in store.glob("*-layers/layers.json")
            for entry in json.loads(index.read_text(encoding="utf-8"))
        }
        history = [entry for entry in image.get("history", ()) if not entry.get("empty_layer")]
        return tuple(
            Layer(size=sizes.get(diff, 0), made_by=str(entry.get("created_by", "")))
            for diff, entry in zip(image["rootfs"]["diff_ids"], history, strict=False)
        )

    def export(self, reference: str, archive: Path) -> None:
        process.run([self.program, "push", reference, f"docker-archive:{archive}:{reference}"])

    def script(self, image: str) -> str:
        return _SCRIPT.format(
            image=shlex.quote(image),
            archive=_archive(image),
            limits=_limits_hint() if self.chroot else "",
            isolation=" --isolation chroot" if self.chroot else "",
        )

    def run_hint(self, image: str, words: str = "", *, gpus: bool = False, folder: str = "") -> str:
        run = f"sh {shlex.quote(f'{folder}/{SCRIPT}')}"
        if not gpus:
            return f"{run} {words}".rstrip()
        # buildah only builds: a GPU needs an engine that runs containers, on another machine maybe.
        archive = _archive(image)
        return (
            f"{run} save {archive}\n"
            f"docker load --input {archive} && docker run --rm --gpus all {SERVING} {image} {words}"
        ).rstrip()


def _archive(image: str) -> str:
    return f"{image.partition(':')[0]}.tar"


# What buildah 1.39 raises limits to.
_RAISED = 1 << 20
# What 1.28 itself sets: it lowers them first, and then cannot raise them.
_LIMITS = (("nofile", resource.RLIMIT_NOFILE, _RAISED), ("nproc", resource.RLIMIT_NPROC, 1 << 15))


def _own_limits(*, lower: bool = False) -> list[str]:
    """Return options that give the steps of a build no higher limits than this process has.

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


def _limits_hint() -> str:
    return "".join(f" {word}" for word in _own_limits(lower=True))


# Numbers of capabilities: to mount, and to raise limits. The root of a container has neither.
SYS_ADMIN, _SYS_RESOURCE = 21, 24


def has_capability(number: int) -> bool:
    """Return whether this process has a capability; True where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return True
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return effective is None or bool(int(effective[1], 16) >> number & 1)


def may_raise_limits() -> bool:
    return has_capability(_SYS_RESOURCE)


class Podman(Bud):
    name = "podman"
    gpus = "--device nvidia.com/gpu=all"
    prune = "podman image prune"

    def layers(self, reference: str) -> tuple[Layer, ...]:
        # Its templates print sizes for people: "2.38 MB".
        done = process.run([self.program, "history", "--no-trunc", "--format", "json", reference])
        return tuple(
            Layer(size=int(entry["size"]), made_by=str(entry["CreatedBy"]))
            for entry in reversed(json.loads(done.stdout))
        )

    def run_limits(self) -> str:
        # Run as root, it raises them for the container.
        return _limits_hint() if os.geteuid() == 0 and not may_raise_limits() else ""


def needs_chroot() -> bool:
    """Return whether build steps change the root: no OCI runtime, or inside a container."""
    if os.environ.get("BUILDAH_ISOLATION") or os.geteuid() != 0:
        return False
    inside = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    return inside or not any(process.which(name) for name in ("crun", "runc"))
