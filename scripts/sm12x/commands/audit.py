"""`sm12x audit`: what machine code there is, how it runs, and whether the policy allows it."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import click

from sm12x import layout
from sm12x.audit import images, policy, render, report, scan
from sm12x.audit.model import DEVICES, Audit, Device
from sm12x.build import ledger
from sm12x.core import files, progress
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.stack import base as bases

_WHEEL = re.compile(r"vllm-(?P<version>[^-+]+)(\+[^-]+)?-.*\.whl")
_WIDEST = 140


@click.command("audit")
@click.argument("subject", metavar="PATH|IMAGE")
@click.option(
    "--arch",
    "archs",
    multiple=True,
    envvar="SM12X_AUDIT_DEVICES",
    metavar="CC",
    help="Device to judge for; can be given again. Default: 12.0 and 12.1.",
)
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path),
    help="Policy to judge by. Default: that of the base, else data/policies/default.toml.",
)
@click.option("--base", "version", help="Base whose policy to judge by. Default: the wheel's.")
@click.option(
    "--ledger",
    "ledger_file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Ledger that says what was compiled here, which the policy may ask more of. Default: that "
    "in the wheel or folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (data/schemas/audit-1.json).")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the report there instead of printing it.",
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

    PATH is a shared library, a folder, a wheel, or a tar of an image (`docker save`, OCI, or
    `docker export`); IMAGE is an image's name, "docker:NAME", "podman:NAME" or "buildah:NAME" to
    ask one engine only. The exit status is 1 when a library breaks the policy.

    Example: sm12x audit dist/0.21.0/vllm-*.whl --json --output audit.json
    """
    devices = tuple(dict.fromkeys(Device.parse(text) for text in archs)) or DEVICES
    rules = policy.load(_policy_file(subject, policy_file, version))
    compiled = _compiled(subject, ledger_file) if ledger_file or rules.asks_a_ledger else None
    audit = _scan(subject)
    if not audit.libraries:
        raise BadFileError(
            f"{subject} holds no shared library", next_step="check that it is the right one"
        )
    judgement = policy.judge(audit, rules, devices, compiled=compiled)
    if as_json:
        text = report.to_json(audit, judgement, devices)
    else:
        width = render.WIDTH
        if output is None and sys.stdout.isatty():
            width = min(shutil.get_terminal_size().columns, _WIDEST)
        text = render.text(audit, judgement, devices, width=width)
    if output:
        files.write_text(output, text)
    else:
        click.echo(text, nl=False)
    if not judgement.passed:
        offenders = list(dict.fromkeys(offender.path for offender in judgement.offenders))
        where = f"is in {output}" if output else "is above"
        raise FindingsError(
            f"{audit.subject} breaks the policy `{judgement.policy}`: {', '.join(offenders)}",
            next_step=f"the report with each reason {where}; mend the build, or state the "
            "exception and its reason in the policy file",
        )


def _compiled(subject: str, given: Path | None) -> dict[str, str] | None:
    """What the ledger says was compiled here, path -> sha256; None where there is no ledger."""
    made = ledger.read(given) if given else ledger.inside(Path(subject))
    if made is None:
        return None
    return {entry.path: entry.sha256 for entry in made.libraries if entry.origin == "compiled"}


def _policy_file(subject: str, given: Path | None, version: str | None) -> Path:
    if given is not None:
        return given
    if version is not None:
        return bases.load(version).folder / "audit-policy.toml"
    wheel = _WHEEL.fullmatch(Path(subject).name)
    if wheel is not None:
        path = layout.patches() / wheel["version"] / "audit-policy.toml"
        if path.is_file():
            return path
    return layout.data() / "policies" / "default.toml"


def _scan(subject: str) -> Audit:
    path = Path(subject)
    if path.exists() or not images.looks_like_image(subject):
        plan = scan.plan(path)
        with progress.bar("reading", plan.total, unit="bytes") as advance:
            return scan.run(plan, on_progress=advance)
    with progress.spinner(f"reading the image {subject}"):
        return images.audit(subject)
