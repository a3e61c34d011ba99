"""`sm12x patch`: list, check, apply, refresh, add and drop patches; show their witnesses."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from sm12x import layout
from sm12x.commands.patchoptions import (
    DIRECTORY,
    FIND_LINKS,
    JSON,
    base_option,
    cached,
    chosen,
    fetch,
)
from sm12x.core import progress
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.stack import apply as applying
from sm12x.stack import edit, refresh, render, series, tree, witness
from sm12x.stack.base import Base


@click.group()
def command() -> None:
    """List, check, apply, refresh, add or drop the patches of a base.

    Example: sm12x patch apply --unpack ../vllm
    """


@command.command("list")
@base_option
@JSON
def list_command(version: str | None, as_json: bool) -> None:
    """Show the patches of a base in order, with their upstream state.

    Example: sm12x patch list --json
    """
    base = chosen(version)
    stack = series.load(base)
    if not as_json:
        click.echo(render.stack(stack, base.version), nl=False)
        return
    patches = [
        {
            "name": patch.name,
            "sha256": patch.sha256,
            "subject": patch.subject,
            "body": patch.body,
            "upstream": patch.upstream,
            "drop_when": patch.drop_when,
            "witness": list(patch.witnesses),
            "files": [file.path for file in patch.files],
        }
        for patch in stack.patches
    ]
    _json({"base": base.version, "stack": stack.id, "patches": patches})


@command.command("check")
@base_option
@click.option(
    "--messages-only", is_flag=True, help="Lint the series and the messages; fetch nothing."
)
@FIND_LINKS
@JSON
def check_command(
    version: str | None, messages_only: bool, find_links: Path | None, as_json: bool
) -> None:
    """Lint the stack, apply it to the untouched sdist, and export it again.

    Fails if a message lacks what it must say, if a patch does not apply exactly, or if the export
    is not byte for byte the files that were applied. Everything found is listed.

    Example: sm12x patch check --messages-only
    """
    base = chosen(version)
    findings = series.check(base, root=layout.root())
    report: applying.ApplyReport | None = None
    conflict: applying.StackConflictError | None = None
    # What cannot be read cannot be applied; the findings say so.
    if not messages_only and _readable(base):
        archive = fetch(base, find_links)
        stack = series.load(base)
        with tempfile.TemporaryDirectory(prefix="sm12x-check-") as folder:
            source = Path(folder) / "source"
            with progress.spinner("applying the stack and exporting it again"):
                tree.unpack(archive, source)
                try:
                    report, faults = refresh.round_trip(base, stack, source)
                except applying.StackConflictError as error:
                    report, faults, conflict = error.report, [], error
        findings += faults
    if as_json:
        _json(
            {
                "base": base.version,
                "findings": [_finding(finding) for finding in findings],
                "apply": dataclasses.asdict(report) if report else None,
            }
        )
    else:
        for finding in findings:
            click.echo(_relative(str(finding)))
        if report:
            click.echo(render.applied(report), nl=False)
    if conflict:
        raise conflict
    if findings:
        raise FindingsError(
            f"the stack of {base.version} has {len(findings)} faults, listed above",
            next_step="mend them and run this again",
        )
    if not as_json:
        stack = series.load(base)
        what = "messages and series are in order" if messages_only else "applies, and round-trips"
        click.echo(f"stack {stack.id} of {base.version}: {len(stack.patches)} patches, {what}")


@command.command("apply")
@DIRECTORY
@base_option
@click.option("--unpack", is_flag=True, help="DIR is new: fetch the sdist and unpack it there.")
@click.option(
    "--no-repository", is_flag=True, help="Change the files only; leave no git repository."
)
@FIND_LINKS
@JSON
def apply_command(
    directory: Path,
    version: str | None,
    unpack: bool,
    no_repository: bool,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Apply the stack to DIR, an unpacked sdist of the base.

    Every patch is tried and reported; unless all apply exactly, nothing is changed. DIR becomes a
    git repository with the untouched source as the commit tagged `base` and one commit a patch, so
    that patches can be edited with git and exported with `sm12x patch refresh DIR`.

    Example: sm12x patch apply --unpack ../vllm
    """
    base = chosen(version)
    stack = series.load(base)
    archive = cached(base)
    if unpack:
        archive = fetch(base, find_links)
        with progress.spinner(f"unpacking {base.sdist.name}"):
            tree.unpack(archive, directory)
    try:
        with progress.bar("patches", len(stack.patches)) as advance:
            report = applying.apply(
                base,
                stack,
                directory,
                repository=not no_repository,
                archive=archive,
                on_patch=lambda patch: advance(1),
            )
    except applying.StackConflictError as error:
        if as_json:
            _json(dataclasses.asdict(error.report))
        else:
            click.echo(render.applied(error.report), nl=False)
        raise
    if as_json:
        _json(dataclasses.asdict(report))
        return
    click.echo(render.applied(report), nl=False)
    click.echo(f"stack {report.stack_id}: {len(report.changed)} files of {directory} changed")
    if not no_repository:
        click.echo("next: edit there with git, then export with")
        click.echo(f"  sm12x patch refresh --base {base.version} {directory}")


@command.command("refresh")
@DIRECTORY
@base_option
@JSON
def refresh_command(directory: Path, version: str | None, as_json: bool) -> None:
    """Export the commits of DIR, made by `sm12x patch apply`, back into the base's patches.

    Commits added, dropped or reordered with git change the series accordingly.

    Example: sm12x patch refresh ../vllm
    """
    base = chosen(version)
    try:
        report = refresh.refresh(base, directory, root=layout.root())
    except refresh.MessageError as error:
        _print_findings(error)
        raise
    if as_json:
        _json(dataclasses.asdict(report))
    else:
        click.echo(render.refreshed(report, _relative(str(base.folder))), nl=False)


@command.command("new")
@DIRECTORY
@base_option
@click.option("--subject", required=True, help="What the patch does, in the imperative.")
@click.option("--body", help="What was wrong and why this fixes it.")
@click.option(
    "--body-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The same, from a file.",
)
@click.option(
    "--upstream",
    required=True,
    multiple=True,
    help="Thread and state: 'owner/repo#1 (open)', or 'none (why)'. May be repeated.",
)
@click.option("--drop-when", required=True, help="What has to happen for the patch to go.")
@click.option(
    "--witness",
    "witnesses",
    required=True,
    multiple=True,
    help="Path of its test in the checkout. May be repeated.",
)
@click.option("--author", help='"Name <mail>"; by default who git says you are.')
@JSON
def new_command(
    directory: Path,
    version: str | None,
    subject: str,
    body: str | None,
    body_file: Path | None,
    upstream: tuple[str, ...],
    drop_when: str,
    witnesses: tuple[str, ...],
    author: str | None,
    as_json: bool,
) -> None:
    """Make all changes in DIR a patch at the end of the series.

    DIR is a folder made by `sm12x patch apply`. The message is linted, the changes are committed
    there, and the commit is exported.

    \b
    Example: sm12x patch new ../vllm --subject "Reset the error state on entry" \\
        --body-file why.txt --upstream "vllm-project/vllm#35489 (closed, never merged)" \\
        --drop-when "the release resets it itself" --witness tests/witness/test_reset.py
    """
    if (body is None) == (body_file is None):
        raise click.UsageError("Give one of --body and --body-file.")
    base = chosen(version)
    text = body if body is not None else _read(body_file)
    try:
        report = edit.new(
            base,
            directory,
            edit.message(
                subject=subject,
                body=text,
                upstream=upstream,
                drop_when=drop_when,
                witness=witnesses,
            ),
            author=author,
            root=layout.root(),
        )
    except refresh.MessageError as error:
        _print_findings(error)
        raise
    if as_json:
        _json(dataclasses.asdict(report))
        return
    click.echo(f"{report.name}: {', '.join(report.files)}")
    click.echo(render.refreshed(report.refresh, _relative(str(base.folder))), nl=False)
    click.echo(f"next: sm12x patch witness --base {base.version} {report.name}")


@command.command("drop")
@click.argument("name", metavar="NAME")
@base_option
@FIND_LINKS
@JSON
def drop_command(name: str, version: str | None, find_links: Path | None, as_json: bool) -> None:
    """Take the patch NAME (file name or number) out of the series, if the rest still applies.

    What follows it is renumbered, and exported anew where its lines moved.

    Example: sm12x patch drop 0002
    """
    base = chosen(version)
    stack = series.load(base)
    stack.get(name)
    archive = fetch(base, find_links)
    try:
        with progress.spinner("applying the rest"):
            report = edit.drop(base, stack, name, archive, root=layout.root())
    except applying.StackConflictError as error:
        click.echo(render.applied(error.report), nl=False, err=as_json)
        raise
    except refresh.MessageError as error:
        _print_findings(error)
        raise
    if as_json:
        _json(dataclasses.asdict(report))
        return
    click.echo(f"dropped {report.dropped}")
    click.echo(render.refreshed(report.refresh, _relative(str(base.folder))), nl=False)
    for orphan in report.orphans:
        click.echo(f"{orphan} is the witness of no patch any more")


@command.command("witness")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@base_option
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    help="Interpreter with pytest and torch; by default one is set up from the base's lock.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=1),
    default=witness.TIME_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="For one witness on one tree.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How many run at a time; each may take 2 GiB of memory.",
)
@FIND_LINKS
@JSON
def witness_command(
    names: tuple[str, ...],
    version: str | None,
    python: Path | None,
    time_limit: float,
    jobs: int,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Run the patches' witnesses: red on the untouched base, green on the patched one.

    NAME is a patch's file name or number; without one, all are run. A test that is neither, or
    that is green on the base and no guard, fails the run. Needs a C++ compiler, no GPU.

    Example: sm12x patch witness 0001
    """
    base = chosen(version)
    stack = series.load(base)
    patches = [stack.get(name) for name in names] if names else list(stack.patches)
    archive = fetch(base, find_links)
    root = layout.root()
    if python is None and patches:
        with progress.spinner("setting up the witnesses' environment"):
            python = witness.environment(base, root=root, cache=layout.cache(), say=_say)
    report = witness.run(
        base,
        stack,
        patches,
        archive=archive,
        python=(python or Path(sys.executable)).absolute(),
        root=root,
        seconds=time_limit,
        jobs=jobs,
        on_run=lambda path, side: _say(f"{path} on the {side} tree"),
    )
    if as_json:
        _json(
            {
                **dataclasses.asdict(report),
                "passed": report.passed,
                "failed": report.failed,
            }
        )
    else:
        click.echo(render.witnessed(report), nl=False)
    if report.failed:
        raise FindingsError(
            f"{report.failed} of {len(report.checks)} checks failed",
            next_step="see the lines marked ! above",
        )


def _say(text: str) -> None:
    click.echo(text, err=True)


def _readable(base: Base) -> bool:
    try:
        series.load(base)
    except BadFileError:
        return False
    return True


def _read(path: Path | None) -> str:
    try:
        return path.read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(f"{path} cannot be read: {error}", next_step="mend that file") from None


def _print_findings(error: refresh.MessageError) -> None:
    for finding in error.findings:
        click.echo(f"{finding.path.name}:{finding.line}: {finding.message}", err=True)


def _finding(finding: Any) -> dict[str, Any]:
    return {
        "path": _relative(str(finding.path)),
        "line": finding.line,
        "message": finding.message,
    }


def _relative(text: str) -> str:
    return text.removeprefix(f"{Path.cwd()}/")


def _json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))
