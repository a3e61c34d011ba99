"""The interface of a container engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm12x.core import process
from sm12x.core.declared import Declared
from sm12x.deploy.container import HARDENED
from sm12x.recipes.options import KEY

OnLine = Callable[[str], None]

# What a server gets of an engine, beside its GPUs.
SERVING = f"{HARDENED} --network host -e {KEY} -v sm12x-cache:/cache"
# `ADD` unpacks the archive. One way for all engines: buildah has no `import`.
_IMPORT = 'FROM scratch\nADD {name} /\n{labels}CMD ["/bin/sh"]\n'


@dataclass(frozen=True, kw_only=True)
class BuildRequest:
    """One build of one target.

    ``secrets`` are files that the build mounts under /run/secrets/<key>; they reach no layer.
    With ``output_dir`` the target's files are written there and no image is kept.
    ``host_network`` lets the build reach a proxy that listens on the host's loopback.
    ``platform`` is that of the image, such as "linux/arm64", "" for this machine's.
    """

    dockerfile: Path
    context: Path
    target: str
    build_args: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    output_dir: Path | None = None
    host_network: bool = False
    platform: str = ""


@dataclass(frozen=True, kw_only=True)
class Layer(Declared):
    """One layer of an image: ``size`` in bytes, and the instruction that made it."""

    size: int
    made_by: str


class Engine:
    """A program that builds and keeps images, by the command line that docker and podman share.

    Failing calls raise ToolFailedError.
    """

    name: str
    # Options of `run` that give a container the GPUs.
    gpus: str

    def __init__(self, program: Path, version: str) -> None:
        self.program = program
        self.version = version

    @property
    def description(self) -> str:
        return f"{self.name} {self.version} ({self.program})"

    def build(self, request: BuildRequest, *, on_line: OnLine, log: Path | None = None) -> None:
        """Build ``request.target``; ``on_line`` gets each line of the engine's plain output."""
        process.stream(
            [self.program, *self.build_words(request)],
            env=self.environment(),
            on_line=on_line,
            log=log,
        )

    def import_tar(
        self,
        archive: Path,
        tag: str,
        labels: Mapping[str, str],
        *,
        platform: str = "",
        on_line: OnLine,
    ) -> None:
        """Make the image ``tag`` of one layer, a root file system in a tar archive."""
        dockerfile = archive.with_name("Dockerfile.import")
        lines = "".join(f'LABEL "{key}"="{value}"\n' for key, value in labels.items())
        dockerfile.write_text(_IMPORT.format(name=archive.name, labels=lines), encoding="utf-8")
        self.build(
            BuildRequest(
                dockerfile=dockerfile,
                context=archive.parent,
                target="",
                tags=(tag,),
                platform=platform,
            ),
            on_line=on_line,
        )

    def has_image(self, reference: str) -> bool:
        return self.image_id(reference) is not None

    def pull(self, reference: str, platform: str = "") -> None:
        """Fetch an image: for ``platform``, or this machine's where that is empty."""
        words = ["--platform", platform] if platform else []
        process.run([self.program, "pull", *words, qualified(reference)])

    def tag(self, reference: str, name: str) -> None:
        process.run([self.program, "tag", qualified(reference), name])

    def image_id(self, reference: str) -> str | None:
        """The image's id, `sha256:` left out, or None where there is no such image."""
        text = self._inspect(reference, self.id_format)
        return text.removeprefix("sha256:") if text else None

    def digest(self, reference: str) -> str | None:
        """Return the registry's digest of a pulled image (`sha256:...`), None for one made here."""
        digests = json.loads(self._inspect(reference, "{{json .RepoDigests}}") or "[]")
        return str(digests[0]).partition("@")[2] if digests else None

    def labels(self, reference: str) -> dict[str, str]:
        """Return the image's labels, empty where there is no such image."""
        labels: dict[str, str] = json.loads(self._inspect(reference, self.label_format) or "{}")
        return labels

    def size(self, reference: str) -> int:
        """The unpacked size of an image in bytes; 0 where the engine does not say."""
        return int(self._inspect(reference, "{{.Size}}") or 0)

    def inspect_words(self, template: str) -> list[str]:
        """The command line, without program and image, that prints a Go template of an image."""
        return ["image", "inspect", "--format", template]

    def environment(self) -> dict[str, str]:
        """Variables set on top of ours for every build."""
        return {}

    def _inspect(self, reference: str, template: str) -> str | None:
        done = process.run([self.program, *self.inspect_words(template), reference], check=False)
        text = done.stdout.strip()
        return text if done.returncode == 0 and text not in ("", "<no value>", "null") else None

    # Go templates of an image's id and of its labels.
    id_format = "{{.Id}}"
    label_format = "{{json .Labels}}"
    # While a layer is written: how many further copies of it are in ``storage`` and in the folder
    # of ``package_cache``.
    copies_in_storage = 0
    copies_in_cache = 0

    def build_words(self, request: BuildRequest) -> list[str]:
        """Return the command line of a build, without the program."""
        raise NotImplementedError

    def layers(self, reference: str) -> tuple[Layer, ...]:
        """Return the layers, lowest first; empty where the engine does not say."""
        words = ["history", "--no-trunc", "--human=false", "--format", "{{.Size}}\t{{.CreatedBy}}"]
        lines = process.run([self.program, *words, reference]).stdout.splitlines()
        return tuple(
            Layer(size=int(size), made_by=made_by)
            for size, _, made_by in (line.partition("\t") for line in reversed(lines))
        )

    def export(self, reference: str, archive: Path) -> None:
        """Write the image to a tar archive as `docker save` does."""
        process.run([self.program, "save", "--output", archive, reference])

    def storage(self) -> Path | None:
        """Return the folder that images and build cache fill, None where it is not here."""
        raise NotImplementedError

    @property
    def more_room(self) -> str:
        """A sentence on how to free room in ``storage``, or move it to another disk."""
        raise NotImplementedError

    def package_cache(self) -> Path | None:
        """Return the folder of the caches that build steps keep (`--mount=type=cache`)."""
        return self.storage()

    def run_limits(self) -> str:
        """Return options of `run` that keep a container's limits within this process's own."""
        return ""

    def script(self, image: str) -> str:
        """Return a script that runs ``image``, for an engine without a command that does."""
        return ""

    def run_hint(self, image: str, words: str = "", *, gpus: bool = False, folder: str = "") -> str:
        """Return the command to show that runs ``image`` with ``words``.

        ``folder`` has the engine's ``script``.
        """
        # --network host: recipes that sleep listen on 127.0.0.1, which no published port reaches.
        options = f" {self.gpus} {SERVING}" if gpus else ""
        return f"{self.name} run --rm{self.run_limits()}{options} {image} {words}".rstrip()


def common_words(request: BuildRequest) -> list[str]:
    """The options that all engines spell alike."""
    words = ["--file", str(request.dockerfile)]
    if request.target:
        words += ["--target", request.target]
    for key, value in sorted(request.build_args.items()):
        words += ["--build-arg", f"{key}={value}"]
    for key, path in sorted(request.secrets.items()):
        words += ["--secret", f"id={key},src={path}"]
    for tag in request.tags:
        words += ["--tag", tag]
    if request.output_dir is not None:
        words += ["--output", f"type=local,dest={request.output_dir}"]
    if request.platform:
        words += ["--platform", request.platform]
    if request.host_network:
        words += ["--network", "host"]
    return words


def qualified(reference: str) -> str:
    """``reference`` as every engine pulls it: with its registry, and without a tag beside a digest.

    podman and buildah know no default registry, and buildah refuses a tag next to a digest.
    """
    first, slash, _ = reference.partition("/")
    if not (slash and ("." in first or ":" in first or first == "localhost")):
        if reference.startswith(LOCAL_BASE):
            return reference
        reference = f"docker.io/{reference if slash else 'library/' + reference}"
    name, at, digest = reference.partition("@")
    return f"{re.sub(r':[^:/]+$', '', name)}@{digest}" if at else reference


# The base image that was made or pulled here, under a name of ours.
LOCAL_BASE = "sm12x-base"
