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
from sm12x.image.engine.engine import SERVING, Engine

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


class Podman(Engine):
    """An engine that builds with the code of `buildah bud`.

    ``chroot``: build steps run in a change of root, where no OCI runtime can be used.
    """

    name = "podman"
    gpus = "--device nvidia.com/gpu=all"
    more_room = (
        "`podman image prune` removes images without a name, and `graphroot` in "
        "/etc/containers/storage.conf (a user's own is in ~/.config) names another disk; docker "
        "writes a layer once, and takes about half"
    )
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

    def build_options(self) -> list[str]:
        # --format docker: an OCI image has no HEALTHCHECK.
        return ["--layers", "--format", "docker", *(_own_limits() if self.chroot else [])]

    def storage(self) -> Path | None:
        done = process.run([self.program, "info"], check=False)
        root = re.search(r'"?[Gg]raphRoot"?: "?([^",\s]+)', done.stdout)
        folder = Path(root[1] if root else "/nowhere")
        return folder if folder.is_dir() else None

    def package_cache(self) -> Path | None:
        # Beside the storage, and the layer that is being written as well.
        return Path(os.environ.get("TMPDIR") or "/var/tmp")  # noqa: S108 - buildah's own choice


class Buildah(Podman):
    """buildah, which needs no daemon, and runs an image by a script beside the bundle."""

    name = "buildah"
    more_room = Podman.more_room.replace("podman image prune", "buildah rmi --prune")
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
        store = self.storage()
        layers = self._oci(reference).get("rootfs", {}).get("diff_ids", ())
        # Unpacked sizes are in the store's own index: no command prints them.
        return sum(
            int(entry.get("diff-size", 0))
            for index in (store.glob("*-layers/layers.json") if store else ())
            for entry in json.loads(index.read_text(encoding="utf-8"))
            if entry.get("diff-digest") in layers
        )

    def run(self, image: str, program: str, *words: str) -> str:
        made = process.run([self.program, "from", "--pull-never", image]).stdout.strip()
        try:
            return process.run(
                [self.program, "run", made, "--", program, *words], env=self.environment()
            ).stdout
        finally:
            process.run([self.program, "rm", made], check=False)

    def script(self, image: str) -> str:
        limits = _own_limits(lower=True) if self.chroot else []
        return _SCRIPT.format(
            image=shlex.quote(image),
            archive=_archive(image),
            limits="".join(f" {word}" for word in limits),
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


def needs_chroot() -> bool:
    """Return whether build steps change the root: no OCI runtime, or inside a container."""
    if os.environ.get("BUILDAH_ISOLATION") or os.geteuid() != 0:
        return False
    inside = Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()
    return inside or not any(process.which(name) for name in ("crun", "runc"))
