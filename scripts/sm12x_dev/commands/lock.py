"""`sm12x-dev lock`: make or check the locked requirements of a base."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import click

from sm12x.core import files, progress
from sm12x.core.errors import BadFileError, FindingsError
from sm12x.stack.model import base as bases
from sm12x_dev import lock


@click.command()
@click.option("--base", "version", required=True, metavar="VERSION", help="The base, e.g. 0.33.0.")
@click.option(
    "--machine",
    type=click.Choice(bases.MACHINES),
    help="Only this machine's locks. Default: those of every machine in base.toml.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if a file is not up to date.")
def lock_command(version: str, machine: str | None, check: bool) -> None:
    """Make the locked requirements of a base, or check the committed ones.

    Resolves as of the day of the release, for every machine from any machine. --check prints how
    the committed files differ from new ones, and where they contradict base.toml.

    Example: sm12x-dev lock --base 0.33.0 --check
    """
    base = bases.load(version)
    machines = [machine] if machine else list(base.locks)
    for override in base.overrides:
        on = [name for name in machines if not override.machines or name in override.machines]
        if on:
            click.echo(f"{override} ({', '.join(on)})", err=True)
    findings = lock.contradictions(base, machines) if check else []
    for line in findings:
        click.echo(line)
    with (
        progress.spinner(f"resolving for {', '.join(machines)}"),
        ThreadPoolExecutor(len(machines)) as pool,
    ):
        resolved = dict(
            zip(machines, pool.map(lambda name: lock.make(base, name), machines), strict=True)
        )
    for name, locks in resolved.items():
        for path, text in (
            (base.lock_path(name), locks.closure),
            (base.build_lock_path(name), locks.build),
        ):
            if check:
                committed = path.read_text(encoding="utf-8") if path.is_file() else ""
                difference = lock.difference(path, committed, text)
                if difference:
                    click.echo(difference, nl=False)
                    findings.append(path.name)
            else:
                # What uv made must satisfy the same rules as what is committed.
                for fault in lock.verify(base, name, locks):
                    raise BadFileError(fault, next_step="correct base.toml")
                files.write_text(path, text)
                click.echo(path)
    if findings:
        raise FindingsError(
            f"the locks of {version} are not what `make lock` makes",
            next_step=f"run `make lock BASE={version}` and read the difference before committing",
        )
