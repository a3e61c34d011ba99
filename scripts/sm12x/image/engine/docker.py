"""docker with BuildKit, either through buildx or the client's own."""

from __future__ import annotations

from pathlib import Path

from sm12x.core import process
from sm12x.image.engine.engine import BuildRequest, Engine, common_words

_CONTAINERD = Path("/var/lib/containerd")


class Docker(Engine):
    """``buildx``: whether the client has that plugin; else DOCKER_BUILDKIT asks for BuildKit."""

    name = "docker"
    gpus = "--gpus all"
    label_format = "{{json .Config.Labels}}"

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

    def build_words(self, request: BuildRequest) -> list[str]:
        return ["build", "--progress", "plain", *common_words(request), str(request.context)]

    def storage(self) -> Path | None:
        words = ["info", "--format", "{{.DockerRootDir}}\t{{json .DriverStatus}}"]
        done = process.run([self.program, *words], check=False)
        root, _, status = done.stdout.strip().partition("\t")
        # With containerd's image store, the default since docker 29, layers lie beside the root.
        folders = [_CONTAINERD] if "io.containerd.snapshotter" in status else []
        folders.append(Path(root or "/nowhere"))
        return next((folder for folder in folders if folder.is_dir()), None)

    @property
    def more_room(self) -> str:
        return (
            "`docker system prune` removes what no container uses, and `data-root` in "
            "/etc/docker/daemon.json names another disk"
        )
