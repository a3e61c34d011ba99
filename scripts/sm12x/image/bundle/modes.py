"""The build mode of a bundle, and the third-party sources that it needs."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sm12x import layout
from sm12x.audit.model import DEVICES
from sm12x.core import cudaarch, files, machine, progress, text
from sm12x.core.cudaarch import CudaArch
from sm12x.core.errors import BadFileError, UsageError
from sm12x.core.progress import Reporter
from sm12x.image.base.platforms import Platforms
from sm12x.image.bundle.context import Context
from sm12x.stack.model import series
from sm12x.stack.model.base import Base
from sm12x.wheel import selection
from sm12x.wheel.compile import cmake
from sm12x.wheel.selection import AUTO, Decision, ModuleChoice, Offer
from sm12x.wheel.source import third_party
from sm12x.wheel.toolchain import arch


@dataclass(frozen=True, kw_only=True)
class BuildMode:
    """The mode and its sources. ``third_party``: files of sources, by their place in the context.

    ``patch_levels`` names those that may be of another patch level than pinned. ``offer`` is what
    full mode would add, None in full mode.
    """

    name: str
    choice: ModuleChoice
    patch_levels: tuple[str, ...] = ()
    third_party: Mapping[str, Path] = field(default_factory=dict)
    third_party_sha256: str = ""
    offer: Offer | None = None

    def key(self, base: Base, machine: str, arch_list: str) -> str:
        """Names the work folder that an interrupted compilation goes on in.

        The name covers what ninja cannot see a change of: ninja compares dates, and a compiler, a
        header or a third-party source of another version can have older ones.
        """
        parts = (
            base.version,
            machine,
            arch_list,
            self.name,
            self.third_party_sha256,
            files.sha256(base.build_lock_path(machine)),
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def decide(
    base: Base,
    wanted: str,
    given: Mapping[str, Path],
    patch_levels: tuple[str, ...],
    targets: tuple[CudaArch, ...],
    earlier_mode: str,
    *,
    report: Reporter,
) -> BuildMode:
    """Decide the mode, report it with the reason, and find its sources.

    Args:
        wanted: "quick", "full" or "auto".
        given: folders of third-party sources, as ``parse_given`` returns them.
        patch_levels: those of ``given`` that may be of another patch level than pinned.
        targets: what is compiled for.
        earlier_mode: the mode of the bundle that is there, "" without one. After a bundle of full
            mode, memory that other programs hold at the moment does not exclude full mode: nothing
            may be left to compile.

    Raises:
        NoSpaceError: a full build is wanted, and does not fit in the memory.
        BadArchitectureError: a full build needs more of the architectures.
        BadFileError: a given folder is not of the pinned version.
    """

    @functools.cache
    def collect() -> Mapping[str, third_party.FoundSource]:
        return third_party.collect(
            base, cache=layout.cache(), given=given, patch_levels=patch_levels, say=report.say
        )

    cores = machine.cores()
    memory_gib = _all_memory_gib() if earlier_mode == "full" else cmake.free_memory_gib()

    def with_sources(names: Collection[str]) -> Decision:
        return selection.decide(
            base, cores=cores, memory_gib=memory_gib, available=names, mode=wanted
        )

    # Which modules a full build compiles, and so how long it takes, depends on the sources. Those
    # that are given are certain; the others need a network, and are looked for where they decide.
    decision = with_sources({source.name for source in base.sources})
    if wanted == AUTO and decision.mode != with_sources({*given}).mode:
        with progress.spinner("looking for third-party sources"):
            decision = with_sources(_available(collect()))
    other = "full" if decision.mode == "quick" else "quick"
    report.say(
        f"build mode {decision.mode}: {decision.reason}; {other} mode: make bundle BUILD={other}"
    )
    touched = [module.target for module in selection.for_stack(base, series.load(base))]
    if decision.mode == "quick":
        if given:
            report.say("quick mode takes no third-party source: options about them are unused")
        return BuildMode(
            name="quick",
            choice=selection.choose(base, touched, mode="quick"),
            offer=selection.offer(base, cores=cores, memory_gib=memory_gib, sure=given),
        )
    arch.require_complete(targets)
    with report.phase("third-party sources", live=False):
        sources = collect()
        staging = staged(sources)
        digest = Context(files=staging, large={}).digest() if staging else ""
    choice = selection.choose(base, touched, mode="full", available=_available(sources))
    for entry in choice.kept:
        why = "; ".join(
            f"{name}: {sources[name].reason if name in sources else ''}" for name in entry.missing
        )
        report.say(f"{entry.path} stays the official one ({why})")
    if choice.kept:
        report.say("name the folder of a missing source with --source NAME=DIR")
    return BuildMode(
        name="full",
        choice=choice,
        patch_levels=patch_levels,
        third_party=staging,
        third_party_sha256=digest,
    )


def _available(sources: Mapping[str, third_party.FoundSource]) -> set[str]:
    return {name for name, source in sources.items() if source.folder}


def flashinfer(
    base: Base, option: bool | None, mode: str, machines: Platforms, *, image: bool
) -> bool:
    """Tell whether to compile FlashInfer's modules ahead of time: by default, in full mode.

    Raises:
        UsageError: ``option`` requests them, and they cannot be compiled.
    """
    against = ""
    if not base.flashinfer:
        against = f"base {base.version} lists none of FlashInfer's modules"
    elif machines.crossing:
        against = "FlashInfer's build makes code only for the machine that it runs on"
    elif not image:
        against = "FlashInfer's modules are part of the image, and no image is made"
    if against and option:
        raise UsageError(
            f"--flashinfer: {against}",
            next_step="leave it out; a server then compiles them at its first start",
        )
    return not against and (mode == "full" if option is None else option)


def _all_memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / text.GIB


def parse_given(base: Base, words: Iterable[str]) -> dict[str, Path]:
    """Parse the folders of `--source NAME=DIR`.

    Raises:
        UsageError: it is not of that form, or the base has no such source.
        BadFileError: the folder is not there, or there is nothing in it.
    """
    folders: dict[str, Path] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not text:
            raise UsageError(
                f"--source {word} is not of the form NAME=DIR",
                next_step="write it as in --source qutlass=../qutlass",
            )
        selection.require_source(base, name)
        folders[name] = Path(text).absolute()
        if not files.has_files(folders[name]):
            raise BadFileError(
                f"--source {name}: {text} is not a folder with files",
                next_step=f"name a checkout of {name}",
            )
    return folders


def parse_patch_levels(
    base: Base, names: Iterable[str], given: Mapping[str, Path]
) -> tuple[str, ...]:
    """Check `--accept-patch-level NAME`. Raises UsageError for one that is not ``given``."""
    levels = selection.require_patch_levels(base, tuple(names))
    for name in levels:
        if name not in given:
            raise UsageError(
                f"--accept-patch-level {name} is for a folder that is given",
                next_step=f"give it with --source {name}=DIR",
            )
    return levels


def devices(mode: str, arch_list: str) -> list[str]:
    """The devices that the wheel is audited for: those that something of ``arch_list`` runs on.

    In quick mode both: the CUDA modules are the official ones, whatever is asked for.
    """
    targets = cudaarch.parse_list(arch_list)
    return [
        str(device)
        for device in DEVICES
        if mode == "quick" or any(arch.runs_on(device.major, device.minor) for arch in targets)
    ]


def staged(sources: Mapping[str, third_party.FoundSource]) -> dict[str, Path]:
    """Return the files of the sources, by their place in a build context. Links are followed."""
    return {
        f"third_party/{name}/{path.relative_to(source.folder).as_posix()}": path.resolve()
        for name, source in sorted(sources.items())
        if source.folder
        for path in _files_of(source.folder)
    }


def _files_of(folder: Path) -> list[Path]:
    """List all files below ``folder``, behind linked folders too, without git's own."""
    paths: list[Path] = []
    seen: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        # A link to a parent folder would make an endless loop.
        real = os.path.realpath(root)
        folders[:] = [] if real in seen else [name for name in folders if name != ".git"]
        if real not in seen:
            paths += [path for name in names if (path := Path(root, name)).is_file()]
        seen.add(real)
    return sorted(path for path in paths if path.name != ".git")
