"""The command `sm12x`: finds the verb's module, and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import pkgutil
import signal
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NoReturn

import click

from sm12x import __version__
from sm12x.core import text as texts
from sm12x.core.errors import EXIT_CODES, INTERRUPTED, Sm12xError, of_system

# verb -> one line for `sm12x --help`; the command object is `command` in sm12x.commands.<verb>.
VERBS: Mapping[str, str] = {
    "fetch": "Fetch the sdist and the official wheel of a base, and verify their sha256.",
    "build": "The steps of a build, one at a time, as the builder image runs them.",
    "audit": "Show what machine code each library holds and how it runs on 12.0 and 12.1.",
    "bundle": "Build the image: fetch, patch, compile, audit, package.",
    "doctor": "Look at this host: driver, GPUs, engine, memory, caches, network.",
    "plan": "Say whether recipes fit in GPU and host memory, and what to cut.",
    "verify": "Put live servers to sleep, wake them up, and judge times, memory and answers.",
    "bench": "Measure a live server with pinned tools, and write a folder to share.",
    "evidence": "Make evidence for a recipe of a benchmark's folder.",
    "recipe": "List, show, lint, pin, import and render recipes.",
    "overlay": "Patch the Python files of another project's image, as files to mount over its own.",
}


class Verbs(click.Group):
    """Imports a verb's module only when it is called, so that --help stays fast."""

    verbs: Mapping[str, str] = VERBS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.verbs)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.verbs:
            return None
        command: click.Command = pkgutil.resolve_name(self.where(name))
        return command

    def where(self, name: str) -> str:
        """Return the module and the name in it of a verb's command object."""
        return f"sm12x.commands.{name}:command"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.verbs:
            ctx.fail(f"No such verb {args[0]!r}{texts.perhaps(args[0], self.verbs)}.")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # `sm12x ... | head`: the reader left; not an error, and nothing more to write. click
            # would end with 1, which means that a check has found something.
            texts.discard_stdout()
            sys.exit(0)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(self.verbs.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), text) for code, text in sorted(EXIT_CODES.items())])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def root() -> None:
    """Turn an official vLLM release into a patched, audited image for SM12x GPUs.

    Example: sm12x bundle --base 0.33.0
    """


def _terminated(signum: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def open_streams() -> None:
    """Give the null device to a standard stream that the caller has closed (`>&-`).

    Python has None for it, which has no `isatty` and no `flush`; and the next file that is opened,
    an audited one or git's, gets its number, to which programs that are called would print.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free: this one, for those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def main(command: click.Command | None = None, name: str = "sm12x") -> NoReturn:
    """Run ``command``, by default `sm12x`, and end the process with its exit code."""
    open_streams()
    texts.guard_streams()
    # `docker stop` and CI runners send SIGTERM: clean up as for Ctrl-C.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        (command or root).main(standalone_mode=False, prog_name=name)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Sm12xError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted: run the same command again to resume", err=True)
        sys.exit(INTERRUPTED)
    except OSError as refused:
        # Steps report the failures that they expect; a full disk can occur in any of them.
        failure = of_system(refused)
        if failure is None:
            raise
        click.echo(f"error: {failure}", err=True)
        sys.exit(failure.exit_code)
    sys.exit(0)
