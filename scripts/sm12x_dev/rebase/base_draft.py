"""Drafting base.toml for another release: the old one, updated from the index and the source.

Nothing is guessed: a value in neither is kept from the old base and listed as still to be checked.
"""

from __future__ import annotations

import datetime
import tomllib
from collections.abc import Container, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomlkit
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from tomlkit import TOMLDocument
from tomlkit.items import AoT, Array, Table

from sm12x.core import listing
from sm12x.core.declared import MACHINES
from sm12x.core.errors import FetchError
from sm12x.core.listing import SDIST, WHEEL, ListedFile
from sm12x.core.lockfile import Lockfile
from sm12x.stack.model.base import Base, Dropped, Override
from sm12x_dev.rebase import release_facts
from sm12x_dev.rebase.release_facts import DeclaredSource, ReleaseFacts

# How much of a commit id a pin shows.
_SHORT = 7
# What NVIDIA calls the packages of its libraries.
_CUDA_LIBRARIES = "nvidia-"
# Keys of a [[source]] that hold for any revision of it.
_LASTING = (
    *("name", "pin", "override", "stand_in", "ops", "git", "submodules"),
    *("text", "version_file", "defines"),
)

# The first line of every base.toml.
_HEAD = "# Everything that is specific to vLLM {}. Nothing under scripts/ names a release."
# How wide a list may be before it is written over several lines.
_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class Release:
    """The files of one release, as the index lists them; ``given`` is the release date where the
    index has none."""

    version: str
    sdist: ListedFile
    wheels: dict[str, ListedFile]
    given: datetime.date | None = None

    @property
    def released(self) -> datetime.date | None:
        """``given``, or the day of the last of these uploads (UTC); None where unknown."""
        if self.given is not None:
            return self.given
        times = [file.uploaded for file in (self.sdist, *self.wheels.values())]
        known = [time.astimezone(datetime.UTC) for time in times if time is not None]
        return max(known).date() if len(known) == len(times) else None


@dataclass(frozen=True, kw_only=True)
class Draft:
    """base.toml of the new release, and the values that a person must check before a commit."""

    values: TOMLDocument
    to_check: tuple[str, ...]

    def text(self) -> str:
        return tomlkit.dumps(self.values)


def release(listed: Iterable[ListedFile], version: str, *, project: str) -> Release:
    """The sdist and the official wheels of ``version``.

    Raises:
        FetchError: there is no such release, or it has no sdist, or one without a sha256.
    """
    known = tuple(listed)
    files = [file for file in known if file.version == version and not file.yanked]
    sdist = next((file for file in files if file.kind == SDIST), None)
    if sdist is None or not sdist.sha256:
        what = f"no sdist with a sha256 of {project} {version}" if files else f"no {version}"
        raise FetchError(
            f"the package index has {what} of {project}" if not files else f"there is {what}",
            next_step="give a release as the package index writes it"
            + "".join(f", such as {newest}" for newest in listing.releases(known)[-1:]),
        )
    wheels: dict[str, ListedFile] = {}
    for machine in MACHINES:
        fitting = [file for file in files if file.kind == WHEEL and is_for(file.name, machine)]
        if fitting:
            # A later build replaces an earlier one of the same version.
            wheels[machine] = max(fitting, key=lambda file: parse_wheel_filename(file.name)[2])
    return Release(version=version, sdist=sdist, wheels=wheels)


def draft(
    base: Base,
    found: Release,
    source: ReleaseFacts,
    before: ReleaseFacts,
    *,
    tree: str,
    torch_cuda: str | None,
    overrides: Sequence[Override] = (),
) -> Draft:
    """base.toml of ``found`` after the one of ``base``, whose comments stay.

    Args:
        source: what the untouched source of the release says.
        before: what that of ``base`` says: only changed values need a check.
        tree: its git tree id.
        torch_cuda: the CUDA toolkit that the release's torch asks for, where that is known.
        overrides: what the new base's lock is made with instead of the release's own requirements.
    """
    old = (base.folder / "base.toml").read_text(encoding="utf-8")
    values = tomlkit.parse(old.replace(_HEAD.format(base.version), _HEAD.format(found.version)))
    check: list[str] = []
    values["version"] = found.version
    if found.released:
        values["released"] = found.released
    else:
        check.append(
            f"released: the index gives no upload times; {base.released} is kept, and locks have "
            "nothing newer: give --released DATE"
        )
    values["sdist"].update(name=found.sdist.name, sha256=found.sdist.sha256, tree=tree)
    for machine in base.wheels:
        wheel = found.wheels.get(machine)
        if wheel:
            values["wheel"][machine].update(name=wheel.name, sha256=wheel.sha256)
        else:
            del values["wheel"][machine]
            check.append(f"wheel.{machine}: the release has no such wheel")
    if not values["wheel"]:
        # The headers of its tables had it too.
        values["wheel"] = tomlkit.table()
    for machine in base.locks:
        # Where there is none at all, the folder that was looked into has the sdist alone.
        if machine not in found.wheels and base.locks.keys() & found.wheels.keys():
            del values["lock"][machine]
            check.append(f"lock.{machine}: cannot be made without that wheel; left out")
    _check_python(base, found, check)
    _toolchain(values["toolchain"], base, source, before, torch_cuda, check)
    _modules(values["module"], source, before, check)
    _sources(values["source"], source, check)
    _auto_needs(values["toolchain"], {str(entry["name"]) for entry in values["source"]})
    _extras(values, source, check)
    values.pop("dropped", None)
    # The old base's overrides are for the requirements of its own release.
    values.pop("override", None)
    if overrides:
        values["override"] = _tables(_written(override) for override in overrides)
    for key in ("upstream", "needed"):
        values["witness"].pop(key, None)
    check.append("module: cpu_seconds and peak_gib are those of " + base.version)
    check += [
        f"module {module['target']}: other_gpus are those of {base.version}"
        for module in values["module"]
        if module.get("other_gpus")
    ]
    check.append("image: the base image is that of " + base.version)
    if base.toolchain.not_full:
        check.append("toolchain.not_full: the reason is that of " + base.version)
    return Draft(values=values, to_check=tuple(check))


def amended(
    text: str,
    *,
    dropped: Sequence[Dropped] = (),
    upstream: Sequence[str] = (),
    needed: Sequence[str] = (),
    packages: Sequence[str] = (),
) -> str:
    """The text of a drafted base.toml with more filled in.

    Args:
        dropped: the patches that the stack leaves out.
        upstream: pytest ids of the kept patches' tests that the untouched release passes.
        needed: those of guards that it fails.
        packages: what the witnesses install.
    """
    values = tomlkit.parse(text)
    for key, words in (("packages", packages), ("upstream", upstream), ("needed", needed)):
        if words:
            values["witness"][key] = _list(words)
    if dropped:
        values["dropped"] = _tables(
            {
                "patch": entry.patch,
                "state": entry.state,
                **({"since": entry.since} if entry.since else {}),
                "why": entry.why,
            }
            for entry in dropped
        )
    return tomlkit.dumps(values)


def without_dropped(text: str, subjects: Container[str]) -> str:
    """The text of a base.toml without the [[dropped]] of patches that are in the stack.

    The rest of the text stays unchanged, comments included.

    Args:
        subjects: the patches' file names without their numbers.
    """
    kept: list[str] = []
    block: list[str] = []
    lines = [*text.splitlines(keepends=True), ""]
    for line in lines:
        if block and (not line.strip() or line.startswith("[")):
            name = tomllib.loads("".join(block))["dropped"][0].get("patch", "")
            gone = name.partition("-")[2] in subjects
            kept += [] if gone else block
            block = []
            if gone and not line.strip():
                continue
        if line.strip() == "[[dropped]]" or block:
            block.append(line)
        else:
            kept.append(line)
    return "".join(kept)


def witness_packages(
    packages: Sequence[str], old: Lockfile, new: Lockfile, *, torch: Iterable[str] = ()
) -> tuple[list[str], list[str]]:
    """The witnesses' packages in the new lock, and notes on what to check.

    These are the packages of the old list that the new lock still has, their dependencies that only
    the new lock has, and the CUDA libraries in ``torch``'s requirements, since the set that torch
    loads at import changes from release to release.
    """
    names = new.versions
    kept = [name for name in packages if name in names]
    gone = [name for name in packages if name not in names]
    fresh = {pin.name: pin.via for pin in new.pins if pin.name not in old.versions}
    added = [
        name
        for name in torch
        if name.startswith(_CUDA_LIBRARIES) and name in names and name not in kept
    ]
    while more := [
        name
        for name, via in fresh.items()
        if name not in added and any(asker in kept or asker in added for asker in via)
    ]:
        added += more
    notes = []
    if gone:
        notes.append(f"witness.packages: not in the new lock, left out: {', '.join(gone)}")
    if added:
        notes.append(f"witness.packages: added as dependencies of these: {', '.join(added)}")
    return sorted([*kept, *added]), notes


def _list(words: Sequence[str]) -> Array:
    """A list in rows of at most _WIDTH characters."""
    made = tomlkit.array()
    if sum(len(word) + 4 for word in words) < _WIDTH - 20:
        made.extend(words)
        return made
    row: list[str] = []
    for word in words:
        if row and sum(len(entry) + 4 for entry in [*row, word]) > _WIDTH:
            made.add_line(*row, indent="  ")
            row = []
        row.append(word)
    made.add_line(*row, indent="  ")
    made.add_line(indent="")
    return made


def _tables(entries: Iterable[dict[str, Any]]) -> AoT:
    made = tomlkit.aot()
    for entry in entries:
        made.append(_table(entry))
    return made


def _written(override: Override) -> dict[str, Any]:
    """An override without its optional keys where they have default values."""
    plain = Override(requirement="", instead_of="", why="")
    return {key: value for key, value in asdict(override).items() if value != getattr(plain, key)}


def _table(entry: dict[str, Any]) -> Table:
    made = tomlkit.table()
    for key, value in entry.items():
        made[key] = _list(value) if isinstance(value, list | tuple) else value
    return made


def is_for(name: str, machine: str) -> bool:
    """Whether a wheel of this file name is for Linux on ``machine``."""
    try:
        tags = parse_wheel_filename(name)[3]
    except InvalidWheelFilename:
        return False
    return any(tag.platform.endswith(f"_{machine}") and "linux" in tag.platform for tag in tags)


def _check_python(base: Base, found: Release, check: list[str]) -> None:
    wanted = found.sdist.requires_python
    try:
        fits = not wanted or SpecifierSet(wanted).contains(base.python)
    except InvalidSpecifier:
        fits = False
    if not fits:
        check.append(f"python: {base.python} is not in what the release asks for, {wanted}")


def _toolchain(
    tools: Any,
    base: Base,
    source: ReleaseFacts,
    before: ReleaseFacts,
    torch_cuda: str | None,
    check: list[str],
) -> None:
    if source.torch:
        tools["torch"] = source.torch
    else:
        check.append(f"toolchain.torch: not found in the source; {base.toolchain.torch} is kept")
    cuda = torch_cuda or source.cuda
    if cuda:
        tools["cuda"] = cuda
    else:
        check.append(f"toolchain.cuda: not found in the source; {base.toolchain.cuda} is kept")
    if torch_cuda and source.cuda and not _same_version(torch_cuda, source.cuda):
        check.append(
            f"toolchain.cuda: torch asks for {torch_cuda}, the release's image has {source.cuda}"
        )
    if source.build_requires is None:
        check.append("toolchain.build_requires: not found in the source; the old ones are kept")
        return
    # The requirements that this base took from its release's list, in the new release's versions.
    known = {_name(text): text for text in source.build_requires}
    old = [_name(text) for text in base.toolchain.build_requires]
    tools["build_requires"] = _list(
        [
            known.get(name) or text
            for name, text in zip(old, base.toolchain.build_requires, strict=True)
        ]
    )
    check += [
        f"toolchain.build_requires: the release no longer asks for {name}"
        for name in old
        if name not in known
    ]
    seen = {*old, *map(_name, before.build_requires or ())}
    unused = [text for name, text in known.items() if name not in seen]
    if unused:
        check.append("toolchain.build_requires: not taken over: " + ", ".join(unused))


def _auto_needs(tools: Any, names: Container[str]) -> None:
    """Remove names of sources that the release no longer has."""
    old = [str(name) for name in tools.get("auto_needs", ())]
    kept = [name for name in old if name in names]
    if not kept:
        tools.pop("auto_needs", None)
    elif kept != old:
        tools["auto_needs"] = _list(kept)


def _modules(modules: AoT, source: ReleaseFacts, before: ReleaseFacts, check: list[str]) -> None:
    for module in list(modules):
        name = module["target"]
        # A target that a third-party source brings is in neither.
        if name in before.targets and name not in source.targets:
            check.append(f"module {name}: no longer a target of the release; left out")
            modules.remove(module)
            continue
        old = release_facts.unmatched(module["inputs"], before.files)
        check += [
            f"module {name}: inputs {glob} matches no file of the release"
            for glob in release_facts.unmatched(module["inputs"], source.files)
            if glob not in old
        ]
    new = [target for target in source.targets if target not in before.targets]
    if new:
        check.append(f"module: new targets, not listed, so official: {', '.join(new)}")


def _extras(values: Any, source: ReleaseFacts, check: list[str]) -> None:
    """Keep the extras that the release still has, with its new pins."""
    for entry in list(values.get("extra", ())):
        name, old = entry["name"], str(entry["requirement"])
        brought = () if source.extras is None else source.extras.get(name)
        if brought is None:
            check.append(f"extra {name}: the release no longer has it; left out")
            values["extra"].remove(entry)
        elif len(brought) != 1 or release_facts.pinned(_name(brought[0]), brought) is None:
            what = "its metadata is missing" if source.extras is None else "it has no single pin"
            check.append(f"extra {name}: {what}; {old} is kept")
        elif brought[0] != old:
            entry["requirement"] = brought[0]
            check.append(f"extra {name}: license and modules are those of {old}")
    if not values.get("extra"):
        values.pop("extra", None)


def _sources(sources: AoT, found: ReleaseFacts, check: list[str]) -> None:
    declared = {source.override: source for source in found.sources}
    for entry in list(sources):
        now = declared.pop(entry["override"], None)
        if now is None:
            check.append(f"source {entry['name']}: the release no longer declares it; left out")
            sources.remove(entry)
        else:
            _source(entry, now, check)
    for override, now in declared.items():
        name = Path(now.file).stem
        added = {
            "name": name,
            "pin": _short(now.pins[0]) if now.pins else "unknown",
            "override": override,
            "stand_in": [],
        }
        sources.append(_table(added))
        check.append(f"source {name}: new; find the files that its stand-in needs ({now.file})")
        _ambiguous(name, now, check)


def _source(entry: Table, now: DeclaredSource, check: list[str]) -> None:
    name, old = entry["name"], str(entry["pin"])
    _ambiguous(name, now, check)
    if any(pin.startswith(old) for pin in now.pins) or not now.pins:
        return
    pin = now.pins[-1]
    entry["pin"] = _short(pin)
    if "commit" in entry:
        entry["commit"] = pin
    gone = [key for key in entry if key not in {*_LASTING, "commit"}]
    for key in gone:
        del entry[key]
    if gone:
        check.append(f"source {name}: {', '.join(gone)} was for {old}; left out")


def _ambiguous(name: str, now: DeclaredSource, check: list[str]) -> None:
    if len(now.pins) != 1:
        what = f"one of {', '.join(map(_short, now.pins))}" if now.pins else "not found"
        check.append(f"source {name}: its pin is {what} ({now.file})")


def _short(pin: str) -> str:
    full = len(pin) == 40 and all(c in "0123456789abcdef" for c in pin)
    return pin[:_SHORT] if full else pin


def _name(requirement: str) -> str:
    try:
        return canonicalize_name(Requirement(requirement).name)
    except InvalidRequirement:
        return requirement


def _same_version(one: str, other: str) -> bool:
    parts = zip(one.split("."), other.split("."), strict=False)
    return all(a == b for a, b in parts)
