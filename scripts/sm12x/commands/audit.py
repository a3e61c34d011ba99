"""`sm12x audit`: what machine code there is, how it runs, and whether the policy allows it."""

from __future__ import annotations

import email.parser
import shutil
import sys
import zipfile
import zlib
from pathlib import Path, PurePosixPath

import click
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from sm12x import layout
from sm12x.audit import library, policy, render, report, scan
from sm12x.audit.model import DEVICES, Audit, Device
from sm12x.commands import reports
from sm12x.core import declared, files, progress, unpack
from sm12x.core import text as texts
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.stack.model import base as bases
from sm12x.wheel import ledger

_PROJECT = "vllm"
_METADATA = "*.dist-info/METADATA"
_WIDEST = 140
# Of the metadata: name and version are among the first lines.
_METADATA_BYTES = 65536


@click.command("audit")
@click.argument("subject", metavar="PATH|IMAGE")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    envvar="SM12X_AUDIT_DEVICES",
    metavar="CC",
    help="Device to judge for; can be repeated. Default: 12.0 and 12.1.",
)
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path),
    help="Policy to judge by. Default: the base's policy, else data/policies/default.toml.",
)
@click.option("--base", "version", help="Base whose policy to judge by. Default: the wheel's.")
@click.option(
    "--ledger",
    "ledger_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Ledger that names the libraries compiled here, for which a policy may have stricter "
    "rules. Default: the one in the wheel or folder.",
)
@reports(report.AuditReport)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report there, in a folder that exists, instead of printing it.",
)
def command(
    subject: str,
    archs: tuple[str, ...],
    policy_file: Path | None,
    version: str | None,
    ledger_file: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    """Show what machine code each library holds and how it runs on 12.0 and 12.1.

    PATH is a file of code (a shared library, .o, .a, .cubin, .fatbin, .ptx), a folder, a wheel, or
    a tar of an image (`docker save`, OCI, or `docker export`); IMAGE is an image's name,
    "docker:NAME", "podman:NAME" or "buildah:NAME" to ask one engine only. The exit status is 1 when
    a library does not meet the policy.

    Example: sm12x audit dist/0.33.0/vllm-*.whl --json --output audit.json
    """
    devices = tuple(dict.fromkeys(Device.parse(text) for text in archs)) or DEVICES
    if output is not None and not output.parent.is_dir():
        raise BadFileError(
            f"--output {output}: there is no folder {output.parent}",
            next_step="make that folder, or name a file in an existing folder",
        )
    try:
        _report(subject, devices, policy_file, version, ledger_file, as_json, output)
    except MemoryError:
        raise library.no_memory(subject) from None


def _report(
    subject: str,
    devices: tuple[Device, ...],
    policy_file: Path | None,
    version: str | None,
    ledger_file: Path | None,
    as_json: bool,
    output: Path | None,
) -> None:
    rules = policy.load(_policy_file(subject, policy_file, version))
    compiled = _compiled(subject, ledger_file) if ledger_file or rules.asks_a_ledger else None
    audit = _scan(subject)
    if not audit.libraries:
        raise BadFileError(
            f"{subject} holds no library and no device code",
            next_step="name a wheel, folder or image that has shared libraries",
        )
    judgement = policy.judge(audit, rules, devices, compiled=compiled)
    if as_json:
        text = declared.to_json(report.document(audit, judgement, devices))
    else:
        width = render.WIDTH
        if output is None and sys.stdout.isatty():
            width = min(shutil.get_terminal_size().columns, _WIDEST)
        text = render.text(audit, judgement, devices, width=width)
    if output:
        files.write_output(output, text)
    else:
        click.echo(text, nl=False)
    if not judgement.passed:
        offenders = tuple(dict.fromkeys(offender.path for offender in judgement.offenders))
        where = f"is in {output}" if output else "is above"
        # A user without a ledger did not build it, and can only state what is acceptable.
        step = (
            "correct the build, or state the exception and its reason in the policy file"
            if compiled is not None
            else "where a finding is acceptable, state it and its reason in a policy (--policy)"
        )
        raise FindingsError(
            f"{audit.subject} does not meet the policy `{judgement.name}`: "
            f"{texts.first_of(offenders, 6)}",
            next_step=f"the report with each reason {where}; {step}",
        )


def _compiled(subject: str, given: Path | None) -> dict[str, str] | None:
    """Map path to sha256 of the libraries that the ledger lists as compiled; None without it."""
    build_ledger = ledger.read(given) if given else ledger.inside(Path(subject))
    if build_ledger is None:
        return None
    return {
        entry.path: entry.sha256 for entry in build_ledger.libraries if entry.origin == "compiled"
    }


def _policy_file(subject: str, given: Path | None, version: str | None) -> Path:
    if given is not None:
        if not given.is_file():
            raise BadFileError(
                f"--policy {given}: there is no such file",
                next_step=f"check that path; {layout.data() / 'policies' / 'default.toml'} shows "
                "the layout of a policy",
            )
        return given
    if version is not None:
        return bases.load(version).folder / "audit-policy.toml"
    release = _release(Path(subject))
    if release is not None:
        path = layout.patches() / release / "audit-policy.toml"
        if path.is_file():
            return path
    return layout.data() / "policies" / "default.toml"


def _release(path: Path) -> str | None:
    """Return the vLLM release in the metadata of a wheel, packed or unpacked.

    The file name is not read, as it can be anything. None for any other path, and for a damaged
    wheel: the audit reports the damage.
    """
    metadata: list[str] = []
    try:
        if path.is_dir():
            for file in path.glob(_METADATA):
                with file.open(encoding="utf-8") as text:
                    metadata.append(text.read(_METADATA_BYTES))
        elif path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for info in archive.infolist():
                    name = PurePosixPath(info.filename)
                    if len(name.parts) == 2 and name.match(_METADATA):
                        data = unpack.small(archive, info, _METADATA_BYTES)
                        metadata.append(data.decode("utf-8", "replace"))
        for one in metadata:
            headers = email.parser.Parser().parsestr(one, headersonly=True)
            if canonicalize_name(str(headers["Name"])) == _PROJECT:
                return Version(str(headers["Version"])).public
    except (
        *(zipfile.BadZipFile, zlib.error, OSError, NotImplementedError, RuntimeError),
        *(EOFError, ValueError, InvalidVersion),
    ):
        pass
    return None


def _scan(subject: str) -> Audit:
    path = Path(subject)
    if path.exists() or not scan.looks_like_image(subject):
        plan = scan.plan(path)
        with progress.bar("reading", plan.total, unit="bytes") as advance:
            return scan.run(plan, on_progress=advance)
    with progress.spinner(f"reading the image {subject}"):
        return scan.image(subject)
