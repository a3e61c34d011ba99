"""`sm12x-dev list|check`: the patches of a base, listed and checked."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import click

from sm12x import layout
from sm12x.commands import print_json, reports
from sm12x.core import progress
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.stack.model import series
from sm12x.stack.model.patchfile import MessageFault
from sm12x.stack.worktree import apply as applying
from sm12x.stack.worktree import tree
from sm12x_dev import render
from sm12x_dev.commands.options import BASE, FIND_LINKS, chosen, fetch, relative
from sm12x_dev.witness import mutations
from sm12x_dev.worktree import export, lint


@dataclass(frozen=True, kw_only=True)
class ListedPatch:
    """A patch, with its trailers; ``witness`` are paths, ``files`` those that it changes."""

    name: str
    sha256: str
    subject: str
    body: str
    upstream: str
    drop_when: str
    witness: tuple[str, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class PatchList:
    """What `sm12x-dev list --json` prints; ``stack`` is the stack's id."""

    base: str
    stack: str
    patches: tuple[ListedPatch, ...]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What `sm12x-dev check --json` prints; ``apply`` is null where nothing was applied."""

    base: str
    findings: tuple[MessageFault, ...]
    apply: applying.ApplyReport | None


@click.command("list")
@BASE
@reports(PatchList)
def list_command(version: str | None, as_json: bool) -> None:
    """Show the patches of a base in order, with their upstream state.

    Example: sm12x-dev list --base 0.33.0 --json
    """
    base = chosen(version)
    stack = series.load(base)
    if not as_json:
        click.echo(render.stack(stack, base.version), nl=False)
        return
    same = ("name", "sha256", "subject", "body", "upstream", "drop_when")
    patches = tuple(
        ListedPatch(
            witness=patch.witnesses,
            files=tuple(file.path for file in patch.files),
            **{name: getattr(patch, name) for name in same},
        )
        for patch in stack.patches
    )
    print_json(PatchList(base=base.version, stack=stack.id, patches=patches))


@click.command("check")
@BASE
@click.option(
    "--messages-only", is_flag=True, help="Lint the series and the messages; fetch nothing."
)
@FIND_LINKS
@reports(CheckReport)
def check_command(
    version: str | None, messages_only: bool, find_links: Path | None, as_json: bool
) -> None:
    """Lint the stack, apply it to the untouched sdist, and export it again.

    Fails if a message lacks a required part, if a patch does not apply exactly, or if the export is
    not byte for byte the files that were applied. Every fault is listed.

    Example: sm12x-dev check --base 0.33.0 --messages-only
    """
    base = chosen(version)
    findings = lint.check(base, root=layout.root())
    report: applying.ApplyReport | None = None
    conflict: applying.StackConflictError | None = None
    stack = None
    with suppress(BadFileError):
        # What cannot be read cannot be applied; the findings say so.
        stack = series.load(base)
    if stack and messages_only:
        findings += mutations.check(base, stack, None, layout.root())
    elif stack:
        archive = fetch(base, find_links)
        with tempfile.TemporaryDirectory(prefix="sm12x-check-") as folder:
            source = Path(folder) / "source"
            with progress.spinner("applying the stack and exporting it again"):
                tree.unpack(archive, source)
                try:
                    report, faults = export.round_trip(base, stack, source)
                    # The source is patched now: the mutations' texts have to be there.
                    faults += mutations.check(base, stack, source, layout.root())
                except applying.StackConflictError as error:
                    report, faults, conflict = error.report, [], error
        findings += faults
    if as_json:
        shown = tuple(replace(one, path=Path(relative(str(one.path)))) for one in findings)
        print_json(CheckReport(base=base.version, findings=shown, apply=report))
    else:
        for finding in findings:
            click.echo(relative(str(finding)))
        if report:
            click.echo(render.applied(report), nl=False)
    if conflict:
        raise conflict
    if findings or stack is None:
        raise FindingsError(
            f"the stack of {base.version} has {len(findings)} faults, listed above",
            next_step="correct them and run this again",
        )
    if not as_json:
        what = "messages and series are in order" if messages_only else "applies, and round-trips"
        click.echo(f"stack {stack.id} of {base.version}: {len(stack.patches)} patches, {what}")
