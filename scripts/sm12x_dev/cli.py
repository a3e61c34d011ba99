"""The command `sm12x-dev`: what maintainers of the stack do with a checkout."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from sm12x import __version__, cli, layout

# verb -> one line for `sm12x-dev --help`.
VERBS = {
    "list": "Show the patches of a base in order, with their upstream state.",
    "check": "Lint the stack, apply it to the untouched sdist, and export it again.",
    "apply": "Apply the stack to an unpacked sdist, one git commit for each patch.",
    "refresh": "Export the commits of a folder that `apply` made as patches.",
    "new": "Make all changes in such a folder a patch at the end of the series.",
    "drop": "Take a patch out of the series, if the rest still applies.",
    "rebase": "Port a base's stack to another release.",
    "witness": "Run the patches' witnesses: red on the untouched base, green on the patched.",
    "upstream-tests": "Run the release's own tests of the files that the stack changes.",
    "mutate": "Mutate lines of the patched source, and see whether witnesses turn red.",
    "base": "Compare the bases with the newest release, and their locks with advisories.",
    "lock": "Make or check the locked requirements of a base.",
    "cache": "List the witnesses' environments in the cache, and delete unused ones.",
    "memory": "Ask vLLM in the image for the memory of recipes, and write recipes/memory/.",
    "release": "Make what is published of a bundle, check it, push it, and record it.",
    "docs": "Write the generated parts of README.md, docs/ and nomad-examples/, or check them.",
}
# Verbs that share a module of sm12x_dev.commands; another is in the module of its name.
_MODULES = {
    **dict.fromkeys(("list", "check"), "stack"),
    **dict.fromkeys(("apply", "refresh", "new", "drop"), "tree"),
    **dict.fromkeys(("witness", "upstream-tests"), "tests"),
}


class Verbs(cli.Verbs):
    """Imports a verb's module only when it is called."""

    verbs = VERBS

    def where(self, name: str) -> str:
        """Return the module and the name in it of a verb's command object."""
        if name == "mutate":
            # One of the tests' own tools, which share code as tests.<folder>.<module>.
            sys.path.append(str(layout.root()))
            return "tests.tools.mutate:mutate_command"
        module = _MODULES.get(name, name)
        return f"sm12x_dev.commands.{module}:{name.replace('-', '_')}_command"


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def root() -> None:
    """Maintain the stack of fixes: patches, witnesses, bases, locks and generated pages.

    Example: sm12x-dev apply --base 0.33.0 --unpack ../vllm
    """


def main() -> NoReturn:
    """Run `sm12x-dev`."""
    cli.main(root, "sm12x-dev")
