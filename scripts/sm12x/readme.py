"""The tables of the README that are made from the data they describe.

A table stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``; everything else in the
file is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from sm12x import layout, plan
from sm12x.audit import compare
from sm12x.core.errors import EXIT_CODES, BadFileError
from sm12x.plan import render
from sm12x.recipes import load
from sm12x.stack.model import base as bases
from sm12x.stack.model import series

_BLOCK = re.compile(
    r"(?P<head><!-- generated: (?P<name>[a-z-]+) -->\n).*?(?P<tail><!-- end -->)", re.DOTALL
)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a pipe in a cell is escaped, a line break becomes a blank."""
    lines = [_row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    clean = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return "| " + " | ".join(clean) + " |"


def patches_table() -> str:
    """One row a patch of every base: what it mends, the upstream thread, when it can go."""
    rows: list[tuple[str, ...]] = []
    for version in bases.versions():
        stack = series.load(bases.load(version))
        rows += [
            (version, f"`{patch.name}`", patch.subject, patch.upstream, patch.drop_when)
            for patch in stack.patches
        ]
    return markdown(("base", "patch", "what it mends", "upstream", "drop when"), rows)


def exit_codes_table() -> str:
    return markdown(
        ("exit code", "meaning"), [(str(code), text) for code, text in sorted(EXIT_CODES.items())]
    )


def plans_table() -> str:
    """One row a recipe that names its hardware: its memory plan. GiB on one GPU, and of a machine.

    A recipe that sleeps is planned beside one sleeping peer like itself.
    """
    plans = plan.overview(load.load_all(layout.recipes()).values())
    rows = [
        (f"`{name}`", *rest)
        for name, *rest in (render.summary(one, key) for key, one in plans.items())
    ]
    return markdown(render.HEADER, rows)


AUDITS = ("audit-official", "audit-full")


def audit_table() -> str:
    """One row a module: how its code runs in the official wheel and in ours of full mode.

    From the newest pair of reports in benchmarks/, `<date>-audit-official.json` and
    `<date>-audit-full.json`; "" while there is none.
    """
    found = sorted((layout.root() / "benchmarks").glob(f"*-{AUDITS[1]}.json"))
    if not found:
        return ""
    full = found[-1]
    date = full.name.removesuffix(f"-{AUDITS[1]}.json")
    official = full.with_name(f"{date}-{AUDITS[0]}.json")
    rows = compare.rows(compare.load(official), compare.load(full))
    return markdown(compare.HEADER, rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "patches": patches_table,
    "exit-codes": exit_codes_table,
    "plans": plans_table,
    "audit": audit_table,
}


def rendered(text: str, path: Path) -> str:
    """``text`` with every generated table made anew.

    Raises:
        BadFileError: a block names no known table, or one that there is no data for; a table that
            there is data for has no block.
    """
    made = {name: table() for name, table in TABLES.items()}
    seen: set[str] = set()

    def fill(block: re.Match[str]) -> str:
        name = block["name"]
        if name not in made:
            raise BadFileError(
                f"{path}: no generator makes the table {name!r} (known: {', '.join(TABLES)})",
                next_step="mend the name in the comment",
            )
        if not made[name]:
            raise BadFileError(
                f"{path}: there is no data for the table {name!r}",
                next_step="restore its file in benchmarks/, or take the block out",
            )
        seen.add(name)
        return f"{block['head']}{made[name]}{block['tail']}"

    new = _BLOCK.sub(fill, text)
    missing = [name for name, table in made.items() if table and name not in seen]
    if missing:
        raise BadFileError(
            f"{path}: no block for the generated table(s) {', '.join(missing)}",
            next_step="add `<!-- generated: NAME -->` and `<!-- end -->` where the table belongs",
        )
    return new
