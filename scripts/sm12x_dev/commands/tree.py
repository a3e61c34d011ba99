"""`sm12x-dev apply|refresh|new|drop`: patches as commits of a folder, and back."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from sm12x import layout
from sm12x.commands import emit, print_json, reports, say
from sm12x.core import progress
from sm12x.core.errors import BadFileError
from sm12x.stack.model import series
from sm12x.stack.model.series import Patch, Stack
from sm12x.stack.worktree import apply as applying
from sm12x.stack.worktree import tree
from sm12x_dev import render
from sm12x_dev.commands.options import (
    BASE,
    DIRECTORY,
    FIND_LINKS,
    chosen,
    fetch,
    print_findings,
    relative,
)
from sm12x_dev.worktree import add_drop, export, lint
from sm12x_dev.worktree.repository import make_repository


@click.command("apply")
@DIRECTORY
@BASE
@click.option("--unpack", is_flag=True, help="DIR is new: fetch the sdist and unpack it there.")
@click.option(
    "--no-repository", is_flag=True, help="Change the files only; leave no git repository."
)
@click.option(
    "--up-to",
    metavar="NAME",
    help="Apply the patches up to this one (file name or number; 0 for none). A refresh leaves the "
    "later ones in the series unchanged.",
)
@FIND_LINKS
@reports(applying.ApplyReport)
def apply_command(
    directory: Path,
    version: str | None,
    unpack: bool,
    no_repository: bool,
    up_to: str | None,
    find_links: Path | None,
    as_json: bool,
) -> None:
    """Apply the stack to DIR, an unpacked sdist of the base.

    Every patch is tried and reported; unless all apply exactly, nothing is changed. DIR becomes a
    git repository with the untouched source as the commit tagged `base` and one commit per patch,
    so that patches can be edited with git and exported with `sm12x-dev refresh DIR`.

    Example: sm12x-dev apply --base 0.33.0 --unpack ../vllm
    """
    base = chosen(version)
    stack = series.load(base)
    rest = stack.after(up_to) if up_to is not None else ()
    if unpack:
        archive = fetch(base, find_links)
        with progress.spinner(f"unpacking {base.sdist.name}"):
            tree.unpack(archive, directory)
    try:
        with (
            tree.removed_on_failure(directory) if unpack else nullcontext(),
            progress.spinner(f"applying {len(stack.patches) - len(rest)} patches"),
        ):
            if no_repository:
                kept = Stack(patches=stack.patches[: len(stack.patches) - len(rest)])
                report = applying.apply(base, kept, directory)
            else:
                report = make_repository(base, stack, directory, rest=rest)
    except applying.StackConflictError as error:
        emit(as_json, error.report, render.applied(error.report))
        raise
    if as_json:
        print_json(report)
        return
    click.echo(render.applied(report), nl=False)
    for name in rest:
        click.echo(f"{name}: left out (--up-to)")
    click.echo(f"stack {report.stack_id}: {len(report.changed)} files of {directory} changed")
    if not no_repository:
        quoted = shlex.quote(str(directory))
        click.echo("next: edit there with git, then export with")
        click.echo(f"  sm12x-dev refresh --base {base.version} {quoted}")


@click.command("refresh")
@DIRECTORY
@BASE
@click.option(
    "--force",
    is_flag=True,
    help="Export even if the patches have changed since DIR was made: commit them first.",
)
@reports(export.RefreshReport)
def refresh_command(directory: Path, version: str | None, force: bool, as_json: bool) -> None:
    """Export the commits of DIR, made by `sm12x-dev apply`, back into the base's patches.

    Commits added, dropped or reordered with git change the series accordingly. Refused if the
    patches have changed since DIR was made: the export would undo those changes.

    Example: sm12x-dev refresh --base 0.33.0 ../vllm
    """
    base = chosen(version)
    try:
        report = export.refresh(base, directory, root=layout.root(), force=force)
    except export.MessageError as error:
        print_findings(error)
        raise
    emit(as_json, report, render.refreshed(report, relative(str(base.folder))))


@click.command("new")
@DIRECTORY
@BASE
@click.option("--subject", help="What the patch does, in the imperative.")
@click.option("--body", help="What was wrong and why this fixes it; long lines are wrapped.")
@click.option(
    "--body-file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="The body, from a file.",
)
@click.option(
    "--upstream",
    multiple=True,
    help="Thread and state: 'owner/repo#1 (open)', or 'none (why)'. May be repeated.",
)
@click.option("--drop-when", help="The condition for dropping the patch.")
@click.option(
    "--witness",
    multiple=True,
    help="Path of its test in the checkout. May be repeated.",
)
@click.option(
    "--like",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Take message and author from this patch file, and replace it if it is of this base.",
)
@click.option("--author", help='"Name <mail>"; by default git\'s own setting.')
@reports(add_drop.NewReport)
def new_command(
    directory: Path,
    version: str | None,
    like: Path | None,
    author: str | None,
    as_json: bool,
    **parts: Any,
) -> None:
    """Make all changes in DIR a patch at the end of the series.

    DIR is a folder made by `sm12x-dev apply`. The message is linted, the changes are committed
    there, and the commit is exported.

    \b
    Example: sm12x-dev new --base 0.33.0 ../vllm --subject "Reset the error state on entry" \\
        --body-file why.txt --upstream "vllm-project/vllm#35489 (closed, never merged)" \\
        --drop-when "the release resets it itself" --witness tests/witness/test_reset.py
    """
    model: Patch | None = None
    if like is not None:
        if any(parts.values()):
            raise click.UsageError(
                "--like takes the whole message from PATCH: leave out the options for its parts."
            )
        model = lint.parse(like)
        text, author = model.message, author or f"{model.author.name} <{model.author.email}>"
    else:
        text = _message(**parts)
    base = chosen(version)
    try:
        report = add_drop.new(
            base,
            directory,
            text,
            author=author,
            root=layout.root(),
            like=model,
        )
    except export.MessageError as error:
        print_findings(error)
        raise
    if like is not None and report.missing:
        quoted = shlex.quote(str(directory))
        say(
            f"warning: {like.name} changes {', '.join(report.missing)} as well, and {report.name} "
            f"does not: if it must, edit {directory}, `git -C {quoted} commit --all --amend`, "
            f"`sm12x-dev refresh --base {base.version} {quoted}`"
        )
    if as_json:
        print_json(report)
        return
    click.echo(f"{report.name}: {', '.join(report.files)}")
    click.echo(render.refreshed(report.refresh, relative(str(base.folder))), nl=False)
    click.echo(f"next: sm12x-dev witness --base {base.version} {report.name}")


@click.command("drop")
@click.argument("name", metavar="NAME")
@BASE
@FIND_LINKS
@reports(add_drop.DropReport)
def drop_command(name: str, version: str | None, find_links: Path | None, as_json: bool) -> None:
    """Take the patch NAME (file name or number) out of the series, if the rest still applies.

    The later patches are renumbered, and exported again where their lines moved.

    Example: sm12x-dev drop --base 0.33.0 0002
    """
    base = chosen(version)
    stack = series.load(base)
    stack.get(name)
    archive = fetch(base, find_links)
    try:
        with progress.spinner("applying the rest"):
            report = add_drop.drop(base, stack, name, archive, root=layout.root())
    except applying.StackConflictError as error:
        click.echo(render.applied(error.report), nl=False, err=as_json)
        raise
    except export.MessageError as error:
        print_findings(error)
        raise
    if as_json:
        print_json(report)
        return
    click.echo(f"dropped {report.dropped}")
    click.echo(render.refreshed(report.refresh, relative(str(base.folder))), nl=False)
    for orphan in report.orphans:
        click.echo(f"{orphan} is no longer the witness of any patch")


def _message(*, body: str | None, body_file: Path | None, **parts: Any) -> str:
    """The commit message of these parts; raises UsageError for one that is missing."""
    for name, value in parts.items():
        if not value:
            option = name.replace("_", "-")
            raise click.UsageError(f"Missing option '--{option}' (or give --like PATCH).")
    if (body is None) == (body_file is None):
        raise click.UsageError("Give one of --body and --body-file.")
    return add_drop.message(body=_read(body_file) if body is None else body, **parts)


def _read(path: Path | None) -> str:
    try:
        return path.read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(
            f"{path} cannot be read: {error}", next_step="correct that file"
        ) from None
