"""Container engines by the command line that docker and podman share, and docker itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm12x.core import process
from sm12x.deploy.container import HARDENED
from sm12x.recipes.options import KEY

OnLine = Callable[[str], None]

# What a server gets of an engine, beside its GPUs. --network host: recipes that sleep listen on
# 127.0.0.1, which no published port reaches.
SERVING = f"{HARDENED} --network host -e {KEY} -v sm12x-cache:/cache"
# The base image that was made or pulled here, under a name of ours.
LOCAL_BASE = "sm12x-base"
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

    def words(self) -> list[str]:
        """Return the options that all engines spell alike, and the context."""
        words = ["--file", str(self.dockerfile)]
        words += ["--target", self.target] if self.target else []
        for key, value in sorted(self.build_args.items()):
            words += ["--build-arg", f"{key}={value}"]
        for key, path in sorted(self.secrets.items()):
            words += ["--secret", f"id={key},src={path}"]
        for tag in self.tags:
            words += ["--tag", tag]
        words += ["--output", f"type=local,dest={self.output_dir}"] if self.output_dir else []
        words += ["--platform", self.platform] if self.platform else []
        words += ["--network", "host"] if self.host_network else []
        return [*words, str(self.context)]


class Engine:
    """A program that builds and keeps images, by the command line that docker and podman share.

    Failing calls raise ToolFailedError.
    """

    name: str
    # Options of `run` that give a container the GPUs.
    gpus: str
    # Go templates of an image's id and of its labels.
    id_format = "{{.Id}}"
    label_format = "{{json .Labels}}"
    # While a layer is written: how many further copies of it are in ``storage`` and in the folder
    # of ``package_cache``.
    copies_in_storage = 0
    copies_in_cache = 0
    # How to free room in ``storage``, or move it to another disk.
    more_room: str

    def __init__(self, program: Path, version: str) -> None:
        self.program = program
        self.version = version

    @property
    def description(self) -> str:
        return f"{self.name} {self.version} ({self.program})"

    def environment(self) -> dict[str, str]:
        """Variables set on top of ours for every build."""
        return {}

    def build_options(self) -> list[str]:
        """Return the words of a build before those that all engines spell alike."""
        raise NotImplementedError

    def storage(self) -> Path | None:
        """Return the folder that images and build cache fill, None where it is not here."""
        raise NotImplementedError

    def package_cache(self) -> Path | None:
        """Return the folder of the caches that build steps keep (`--mount=type=cache`)."""
        return self.storage()

    def build(self, request: BuildRequest, *, on_line: OnLine, log: Path | None = None) -> None:
        """Build ``request.target``; ``on_line`` gets each line of the engine's plain output."""
        process.stream(
            [self.program, "build", *self.build_options(), *request.words()],
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
        request = BuildRequest(
            dockerfile=dockerfile,
            context=archive.parent,
            target="",
            tags=(tag,),
            platform=platform,
        )
        self.build(request, on_line=on_line)

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

    def run(self, image: str, program: str, *words: str) -> str:
        """Return what ``program`` of ``image`` prints, without GPU, network and entry point."""
        options = ["--rm", "--network", "none", "--entrypoint", program]
        return process.run(
            [self.program, "run", *options, image, *words],
            next_step=f"see that {image} is here: `{self.name} images`",
        ).stdout

    def script(self, image: str) -> str:
        """Return a script that runs ``image``, for an engine without a command that does."""
        return ""

    def run_hint(self, image: str, words: str = "", *, gpus: bool = False, folder: str = "") -> str:
        """Return the command to show that runs ``image`` with ``words``.

        ``folder`` has the engine's ``script``.
        """
        options = f" {self.gpus} {SERVING}" if gpus else ""
        return f"{self.name} run --rm{options} {image} {words}".rstrip()

    def inspect_words(self, template: str) -> list[str]:
        """The command line, without program and image, that prints a Go template of an image."""
        return ["image", "inspect", "--format", template]

    def _inspect(self, reference: str, template: str) -> str | None:
        done = process.run([self.program, *self.inspect_words(template), reference], check=False)
        text = done.stdout.strip()
        return text if done.returncode == 0 and text not in ("", "<no value>", "null") else None


class Docker(Engine):
    """docker with BuildKit: through the plugin ``buildx``, else DOCKER_BUILDKIT asks for it."""

    name = "docker"
    gpus = "--gpus all"
    label_format = "{{json .Config.Labels}}"
    more_room = (
        "`docker system prune` removes what no container uses, and `data-root` in "
        "/etc/docker/daemon.json names another disk"
    )
    # Layers of containerd's image store, the default since docker 29, lie beside docker's root.
    containerd = Path("/var/lib/containerd")

    def __init__(self, program: Path, version: str, *, buildx: bool) -> None:
        super().__init__(program, version)
        self.buildx = buildx

    @property
    def description(self) -> str:
        how = "buildx" if self.buildx else "its own BuildKit"
        return f"docker {self.version} with {how} ({self.program})"

    def environment(self) -> dict[str, str]:
        # Attestations would turn the image into a list of manifests, with another id each time.
        env = {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
        if self.buildx:
            # A builder that runs in a container does not see the base image that was made here;
            # the one named as the context is the engine itself.
            context = process.run([self.program, "context", "show"], check=False)
            env["BUILDX_BUILDER"] = context.stdout.strip() or "default"
        return env

    def build_options(self) -> list[str]:
        return ["--progress", "plain"]

    def storage(self) -> Path | None:
        words = ["info", "--format", "{{.DockerRootDir}}\t{{json .DriverStatus}}"]
        done = process.run([self.program, *words], check=False)
        root, _, status = done.stdout.strip().partition("\t")
        folders = [self.containerd] if "io.containerd.snapshotter" in status else []
        folders.append(Path(root or "/nowhere"))
        return next((folder for folder in folders if folder.is_dir()), None)


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
