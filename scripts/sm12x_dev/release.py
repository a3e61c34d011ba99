"""What a release publishes: image and wheel of a finished bundle, its SBOM, notes and sums."""

from __future__ import annotations

import datetime
import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from pydantic import Field

from sm12x import layout
from sm12x.audit import report as audits
from sm12x.audit.report import AuditReport
from sm12x.core import declared, files, process, text
from sm12x.core.declared import Declared
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.image.bundle import record as records
from sm12x.image.bundle.record import AUDIT, AUDIT_TEXT, LEDGER, Record
from sm12x.image.engine.engine import Engine
from sm12x.recipes import evidence
from sm12x.recipes.evidence import Published
from sm12x.stack.model import series
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.ledger import Ledger

SBOM, NOTES, SUMS, NAME = "sbom.cdx.json", "notes.md", "SHA256SUMS", "release.json"
_SCHEMA = SchemaVersion.V1_6
# A namespace of our own for serial numbers, which are the same for the same release.
_SERIALS = uuid.uuid5(uuid.NAMESPACE_URL, "sm12x")
_DEBIAN = ("dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\\n")
_REPOSITORY = re.compile(r"[a-z0-9][a-z0-9.:-]*(?:/[a-z0-9][a-z0-9._-]*)+")
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, kw_only=True)
class Release(Declared):
    """``release.json``: one machine's part of a release. ``files``: name -> sha256.

    ``digest`` is that of the pushed image, "" before; ``commit`` is of this repository.
    """

    schema: Literal[1] = 1
    tag: str
    release: str
    stack_id: str
    mode: str
    machine: str
    commit: str
    date: str
    image: str
    image_id: str
    digest: str = ""
    ledger_sha256: _Sha256
    files: dict[str, _Sha256]


def tag(version: str, stack_id: str) -> str:
    """Return the tag of a release: that of its stack."""
    return f"{version}-{stack_id}"


def faults(folder: Path, version: str, engine: Engine | None, *, clean: bool) -> Iterator[str]:
    """Yield why the bundle in ``folder`` is not to be published.

    Args:
        engine: what has the image; None for the wheel alone.
        clean: the checkout may have no change that is not committed.
    """
    record = records.read(folder)
    if record is None or not records.is_whole(folder, record):
        yield f"{folder} has no whole bundle: run `make bundle BASE={version}`"
        return
    here = series.read_id(layout.patches() / version)
    if record.stack_id != here:
        yield f"the bundle is of stack {record.stack_id}, this checkout is {here}"
    ledger = ledgers.read(folder / LEDGER)
    if ledgers.inside(folder / record.wheel) != ledger:
        yield "the ledger in the wheel is not the one beside it"
    if ledger.stack_id != series.id_of((one.name, one.sha256) for one in ledger.patches):
        yield "the ledger's patches do not make its stack id"
    judged = audits.read(folder / AUDIT, next_step="run `make bundle` again").policy
    if judged is None or not judged.passed:
        yield "its audit was not passed"
    if engine and (not record.tags or engine.image_id(record.tags[0]) != record.image_id):
        yield f"the image {record.tags[0] if record.tags else ''} is not the one of the bundle"
    if clean and (changed := _git("status", "--porcelain", "--untracked-files=no").splitlines()):
        yield f"not committed: {text.first_of([line[3:] for line in changed], 3)}"


def _git(*words: str) -> str:
    return process.run(["git", "-C", layout.root(), *words]).stdout.strip()


def make(folder: Path, out: Path, engine: Engine | None) -> Release:
    """Write all that is published of a bundle into ``out``, an empty folder.

    Raises BadFileError where the SBOM is not what its schema takes.
    """
    record = records.read(folder)
    assert record is not None  # noqa: S101 - `faults` has read it
    ledger = ledgers.read(folder / LEDGER)
    audit = audits.read(folder / AUDIT, next_step="run `make bundle` again")
    commit, date = _git("log", "-1", "--format=%H %cI").split()
    debian = engine.run(record.tags[0], *_DEBIAN) if engine else ""
    image = record.tags[0] if engine else ""
    for name in (record.wheel, LEDGER, AUDIT, AUDIT_TEXT):
        files.link(folder / name, out / _named(name, record))
    files.write_text(out / _named(SBOM, record), sbom(record, ledger, debian, date))
    files.write_text(out / NOTES, notes(record, ledger, audit, commit))
    sums = {path.name: files.sha256(path) for path in sorted(out.iterdir()) if path.name != NOTES}
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sums.items())
    files.write_text(out / _named(SUMS, record), lines)
    release = Release(
        tag=tag(record.version, record.stack_id),
        release=record.version,
        stack_id=record.stack_id,
        mode=record.mode,
        machine=record.machine,
        commit=commit,
        date=date,
        image=image,
        image_id=record.image_id if engine else "",
        ledger_sha256=record.ledger_sha256,
        files=sums,
    )
    declared.write_json(out / NAME, release)
    return release


def _named(name: str, record: Record) -> str:
    """Return a file's name in a release, where two machines' files are side by side."""
    if name == record.wheel:
        return name
    stem, dot, rest = name.partition(".")
    return f"{stem}-{record.machine}{dot}{rest}"


def sbom(record: Record, ledger: Ledger, debian: str, date: str) -> str:
    """Return the CycloneDX document of an image: the wheel, its closure, Debian's packages.

    Args:
        debian: name, version and architecture of each package, a line each.
        date: of the commit, ISO 8601; the same release has the same document.

    Raises:
        BadFileError: the document is not what the schema of CycloneDX takes.
    """
    patches = [
        Property(name="sm12x:patch", value=f"{patch.name} sha256:{patch.sha256}")
        for patch in ledger.patches
    ]
    about = {
        "stack_id": record.stack_id,
        "mode": record.mode,
        "ledger_sha256": record.ledger_sha256,
        "sdist_sha256": ledger.sdist_sha256,
        "base_image": f"{record.base_image}@{record.base_digest}",
    }
    wheel = Component(
        type=ComponentType.LIBRARY,
        bom_ref=record.wheel,
        name="vllm",
        version=ledger.wheel_version,
        purl=PackageURL("pypi", None, "vllm", ledger.wheel_version),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=record.wheel_sha256)],
        properties=patches,
    )
    image = Component(
        type=ComponentType.CONTAINER,
        bom_ref=f"image-{record.machine}",
        name="vllm-sm12x",
        version=tag(record.version, record.stack_id),
        properties=[Property(name=f"sm12x:{key}", value=value) for key, value in about.items()],
    )
    closure = [
        Component(
            type=ComponentType.LIBRARY,
            bom_ref=f"pypi-{name}",
            name=name,
            version=version,
            purl=PackageURL("pypi", None, name, version),
        )
        for name, version in sorted(ledger.dependencies.items())
    ]
    system = [
        Component(
            type=ComponentType.LIBRARY,
            bom_ref=f"deb-{name}-{arch}",
            name=name,
            version=version,
            purl=PackageURL("deb", "debian", name, version, {"arch": arch}),
        )
        for name, version, arch in sorted(map(str.split, debian.splitlines()))
    ]
    document = Bom(
        serial_number=uuid.uuid5(_SERIALS, f"{record.machine} {record.ledger_sha256} {debian}"),
        metadata=BomMetaData(component=image, timestamp=datetime.datetime.fromisoformat(date)),
        components=[wheel, *closure, *system],
    )
    document.register_dependency(image, [wheel, *system])
    document.register_dependency(wheel, closure)
    result = make_outputter(document, OutputFormat.JSON, _SCHEMA).output_as_string(indent=1)
    if fault := JsonStrictValidator(_SCHEMA).validate_str(result):
        first = str(getattr(fault, "data", fault)).splitlines()[0][:300]
        raise BadFileError(f"the SBOM is not valid: {first}", next_step="report this defect")
    return result + "\n"


def notes(record: Record, ledger: Ledger, audit: AuditReport, commit: str) -> str:
    """Return the notes of a release, made of its ledger and audit."""
    devices = audit.devices
    rows = [
        (f"`{one.path}`", *(one.runs[device].verdict for device in devices))
        for one in audit.libraries
        if one.cubins or one.ptx
    ]
    compiled = [one.path for one in ledger.libraries if one.origin == "compiled"]
    changes = [
        (patch.name[:4], patch.subject, patch.upstream, patch.native or "Python")
        for patch in ledger.patches
    ]
    name = tag(record.version, record.stack_id)
    return (
        f"# vLLM {record.version} for SM12x, stack {record.stack_id}\n\n"
        f"{text.counted(len(ledger.patches), 'patch')} on vLLM {record.version}, {record.mode} "
        f"mode, for {record.arch_list}; {text.counted(len(compiled), 'module')} of "
        f"{len(ledger.libraries)} compiled here. Commit {commit}.\n\n"
        "Check what you have fetched: `sha256sum -c SHA256SUMS-MACHINE`, and its provenance: "
        "`gh attestation verify FILE --repo REPOSITORY`. `docker run --rm IMAGE check` compares "
        "the image with its ledger.\n\n"
        f"## Patches\n\n{text.markdown(('', 'patch', 'upstream', 'in effect'), changes)}\n"
        f"## Machine code of {name} on {record.machine}\n\n"
        f"{text.markdown(('library', *(f'on {device}' for device in devices)), rows)}"
    )


def read(folder: Path) -> Release:
    """Read a machine's part, and check that its files are there as it names them.

    Raises:
        BadFileError: the folder has no release.
        FindingsError: a file is not the one that it names.
    """
    step = "make it again: `sm12x-dev release make`"
    release = declared.read_json(Release, folder / NAME, next_step=step, what="release")
    for name, sha256 in release.files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file() or files.sha256(path) != sha256:
            raise FindingsError(f"{path} is not the file of the release", next_step=step)
    return release


def require_repository(name: str) -> str:
    """Return the name of an image's repository. Raises BadFileError where it is none."""
    if not _REPOSITORY.fullmatch(name):
        raise BadFileError(
            f"{name!r} names no repository of images", next_step="write it as HOST/OWNER/NAME"
        )
    return name


def push_words(release: Release, repository: str) -> list[list[str]]:
    """Return the commands that push a machine's image, without the engine's program."""
    name = f"{repository}:{release.tag}-{release.machine}"
    return [["tag", release.image, name], ["push", name]]


def publish_words(releases: Sequence[Release], repository: str) -> list[list[str]]:
    """Return the commands that put the machines' images under one tag, without `docker`.

    Raises:
        FindingsError: they are not of one release, or one was not pushed.
    """
    if len({(one.tag, one.commit, one.mode) for one in releases}) != 1:
        raise FindingsError(
            "the parts are not of one commit, stack and mode",
            next_step="make all of them of the same commit",
        )
    if missing := [one.machine for one in releases if not one.digest]:
        raise FindingsError(
            f"the image for {', '.join(missing)} was not pushed", next_step="sm12x-dev release push"
        )
    name = f"{repository}:{releases[0].tag}"
    parts = [f"{repository}@{one.digest}" for one in releases]
    return [["buildx", "imagetools", "create", "--tag", name, *parts]]


def published_text(releases: Sequence[Release]) -> str:
    """Return patches/released.toml with these parts added, in order of publication."""
    first = releases[0]
    new = Published(
        release=first.release,
        stack_id=first.stack_id,
        date=first.date[:10],
        ledgers={f"{one.machine} {one.mode}": one.ledger_sha256 for one in releases},
    )
    known = [one for one in evidence.published() if one.stack_id != new.stack_id]
    lines = [
        "# The published stacks, by `sm12x-dev release record`: evidence names one.",
        "schema = 1",
    ]
    for one in [*known, new]:
        sums = ", ".join(f"{json.dumps(key)} = {json.dumps(v)}" for key, v in one.ledgers.items())
        fields: Mapping[str, str] = {
            "release": one.release,
            "stack_id": one.stack_id,
            "date": one.date,
        }
        lines += ["", "[[stack]]", *(f"{key} = {json.dumps(v)}" for key, v in fields.items())]
        lines.append(f"ledgers = {{ {sums} }}")
    return "\n".join(lines) + "\n"
