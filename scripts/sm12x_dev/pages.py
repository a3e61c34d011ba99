"""The generated parts of README.md and docs/: tables, paragraphs and a picture, made from data.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->`` in whichever page it belongs
to; everything else in a page is left alone.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from sm12x import layout, plan
from sm12x.audit.report import AuditReport
from sm12x.core import declared
from sm12x.core.declared import Declared
from sm12x.core.errors import EXIT_CODES, BadFileError
from sm12x.core.text import markdown
from sm12x.plan import render
from sm12x.pool.config import PoolConfig
from sm12x.recipes import evidence, load
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.stack.model.patchfile import Patch
from sm12x.verify.report import limits
from sm12x_dev import machine_code

SUMMARIES = "summaries.toml"
PICTURE = "machine-code.svg"
_AUDITS = ("audit-official", "audit-full")
_BLOCK = re.compile(
    r"(?P<head><!-- generated: (?P<name>[a-z-]+) -->\n).*?(?P<tail><!-- end -->)", re.DOTALL
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`])")
# What the body of a patch message begins with.
_PREAMBLE = "What was wrong."

# What a sample of a build says of the stack; the id is also elsewhere in its page.
_STACK_ID = re.compile(r"^vLLM (?P<base>[\w.]+) \+ stack (?P<id>[0-9a-f]{8}), ", re.MULTILINE)
_COUNT = re.compile(r"^Patched: \d+ patches, ", re.MULTILINE)

# What makes the text of a part; "" where there is no data for it.
_Parts = Mapping[str, Callable[[], str]]


@dataclass(frozen=True, kw_only=True)
class Summaries(Declared):
    """``patches/summaries.toml``: the subject of a patch -> what it changes for a user."""

    schema: Literal[1]
    summaries: Annotated[Mapping[str, str], Field(alias="summary")]


def paths() -> list[Path]:
    """The pages that may have generated parts: README.md and docs/*.md."""
    return [layout.root() / "README.md", *sorted((layout.root() / "docs").glob("*.md"))]


def rendered(pages: Mapping[Path, str], parts: _Parts) -> dict[Path, str]:
    """Return the text of every page with its generated parts rendered again.

    Raises:
        BadFileError: a page names an unknown part or a part without data, or no page has a part
            that has data.
    """
    texts = {name: make() for name, make in parts.items()}
    seen: set[str] = set()

    def fill(path: Path, block: re.Match[str]) -> str:
        name = block["name"]
        if name not in texts:
            raise BadFileError(
                f"{path}: no generator makes the part {name!r} (known: {', '.join(parts)})",
                next_step="correct the name in the comment",
            )
        if not texts[name]:
            raise BadFileError(
                f"{path}: there is no data for the part {name!r}",
                next_step="restore its file in benchmarks/, or remove the block",
            )
        seen.add(name)
        return f"{block['head']}{texts[name]}{block['tail']}"

    new = {path: _BLOCK.sub(partial(fill, path), text) for path, text in pages.items()}
    missing = [name for name, text in texts.items() if text and name not in seen]
    if missing:
        raise BadFileError(
            f"no page has a block for the generated part(s) {', '.join(missing)}",
            next_step="add `<!-- generated: NAME -->` and `<!-- end -->` where the part belongs",
        )
    return new


def samples(text: str) -> str:
    """Return a page whose sample of a build names the present stack and its number of patches."""
    sample = _STACK_ID.search(text)
    if sample is None or sample["base"] not in bases.versions():
        return text
    stack = series.load(bases.load(sample["base"]))
    text = text.replace(sample["id"], stack.id)
    return _COUNT.sub(f"Patched: {len(stack.patches)} patches, ", text)


def _bases_table() -> str:
    """One row for each base."""
    default = bases.default()
    rows = []
    for version in bases.versions():
        base = bases.load(version)
        rows.append(
            (
                f"{version}{' (default)' if version == default else ''}",
                f"{base.released:%Y-%m-%d}",
                str(len(series.load(base).patches)),
                base.toolchain.torch,
                base.toolchain.cuda,
                base.python,
            )
        )
    return markdown(("base", "released", "patches", "torch", "CUDA", "Python"), rows)


def _patches() -> list[tuple[str, Patch]]:
    """Every patch of every base, with the base's version, in order."""
    return [
        (version, patch)
        for version in bases.versions()
        for patch in series.load(bases.load(version)).patches
    ]


def _patches_table() -> str:
    """One row for each patch of every base: subject, upstream threads, when it can go."""
    rows = [
        (
            version,
            f"[{patch.name[:4]}](../patches/{version}/{patch.name})",
            patch.subject,
            patch.upstream,
            patch.drop_when,
        )
        for version, patch in _patches()
    ]
    return markdown(("base", "patch", "what it does", "upstream", "drop when"), rows)


def patch_notes() -> str:
    """Render one heading and one short paragraph for each subject, whatever bases have it.

    The paragraph is that of patches/summaries.toml, else the first two sentences of the patch's
    message.

    Raises:
        BadFileError: summaries.toml is malformed, or names a subject that no patch has.
    """
    where: dict[str, list[str]] = {}
    first: dict[str, Patch] = {}
    for version, patch in _patches():
        where.setdefault(patch.subject, []).append(f"{version}: {patch.name[:4]}")
        first.setdefault(patch.subject, patch)
    path = layout.patches() / SUMMARIES
    step = f"correct {path.name}: its keys are the subjects of patches"
    summaries = declared.read_toml(Summaries, path, next_step=step).summaries
    unknown = [subject for subject in summaries if subject not in first]
    if unknown:
        raise BadFileError(f"{path}: no patch has the subject {unknown[0]!r}", next_step=step)
    notes = [
        f"### {subject}\n\n{'; '.join(where[subject])}. "
        f"{' '.join(summaries.get(subject, opening(patch.body)).split())}\n"
        for subject, patch in first.items()
    ]
    return "\n".join(notes)


def opening(body: str) -> str:
    """The first two sentences of a patch message's body."""
    text = " ".join(body.split("\n\n", 1)[0].split()).removeprefix(_PREAMBLE).strip()
    return " ".join(_SENTENCE_END.split(text)[:2])


def _exit_codes_table() -> str:
    return markdown(
        ("exit code", "meaning"), [(str(code), text) for code, text in sorted(EXIT_CODES.items())]
    )


def _limits_table() -> str:
    """One row for each limit of `sm12x verify`: its option, default and meaning."""
    rows = [
        (f"`--{name.replace('_', '-')}`", f"{default:g}", meaning)
        for name, default, meaning in limits()
    ]
    return markdown(("option", "default", "what it limits"), rows)


def _pool_table() -> str:
    """One row for each key of a pool's file: its table, default and meaning."""
    schema = declared.schema(PoolConfig)
    tables = {"": schema}
    names = {"models.NAME": "ModelConfig", "models.NAME.memory": "MemoryFigures"}
    names |= {"policy": "PolicyConfig", "limits": "LimitsConfig", "canary": "CanaryConfig"}
    names |= {"keys": "KeysConfig", "machine": "HostConfig"}
    tables |= {name: schema["$defs"][kind] for name, kind in names.items()}
    rows = []
    for table, content in tables.items():
        for key, entry in content["properties"].items():
            if meaning := entry.get("description", ""):
                value = entry.get("default")
                shown = "" if value in (None, "", [], {}) else f"`{json.dumps(value)}`"
                rows.append((f"`{table}.{key}`" if table else f"`{key}`", shown, meaning))
    return markdown(("key", "default", "meaning"), rows)


def _recipes_table() -> str:
    """One row for each recipe that has an ``sm12x`` block; a column for each base."""
    rows = []
    versions = bases.versions()
    for key, recipe in load.load_all(layout.recipes()).items():
        block = recipe.sm12x
        if block is None:
            continue
        machines = f" on each of {block.machines} machines" if block.machines > 1 else ""
        rows.append(
            (
                f"[`{key}`](../recipes/{recipe.path.name})",
                recipe.description or recipe.name,
                f"{block.gpus} x {' or '.join(block.hardware)}{machines}",
                str(block.sleep),
                evidence.state(recipe, evidence.of(recipe)),
                *(block.status.blocked_on(version) or "not blocked" for version in versions),
            )
        )
    return markdown(("recipe", "what it serves", "hardware", "sleep", "status", *versions), rows)


def _plans_table() -> str:
    """One row for each recipe that names its hardware: its memory plan, in GiB.

    A recipe that sleeps is planned beside one sleeping peer like itself.
    """
    plans = plan.overview(load.load_all(layout.recipes()).values())
    rows = [
        (f"`{name}`", *rest)
        for name, *rest in (render.summary(one, key) for key, one in plans.items())
    ]
    return markdown(render.HEADER, rows)


def _audits() -> tuple[AuditReport, AuditReport] | None:
    """Load the newest pair of reports in benchmarks/: the official wheel, and ours of full mode.

    They are `<date>-audit-official.json` and `<date>-audit-full.json`; None while there is none.
    """
    reports = sorted((layout.root() / "benchmarks").glob(f"*-{_AUDITS[1]}.json"))
    if not reports:
        return None
    full = reports[-1]
    date = full.name.removesuffix(f"-{_AUDITS[1]}.json")
    return machine_code.load(full.with_name(f"{date}-{_AUDITS[0]}.json")), machine_code.load(full)


def audit_table() -> str:
    """One row for each module: how its code runs in the official wheel and in ours."""
    audits = _audits()
    return markdown(machine_code.HEADER, machine_code.rows(*audits)) if audits else ""


def audit_picture() -> str:
    """The same as an SVG."""
    audits = _audits()
    if not audits:
        return ""
    title = "Machine code in translation units"
    return machine_code.svg(*audits, title=title, made_by="sm12x-dev docs")


def _package_table() -> str:
    """Tabulate the folders of the packages: first paragraph of the docstring, modules."""
    scripts = Path(__file__).parents[1]
    rows = []
    packages = (scripts / name for name in ("sm12x", "sm12x_dev"))
    for init in (init for package in packages for init in sorted(package.rglob("__init__.py"))):
        folder = init.parent
        summary = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        modules = sorted(path.stem for path in folder.glob("[!_]*.py"))
        rows.append(
            (
                f"`{folder.relative_to(scripts)}/`",
                summary.split("\n\n", 1)[0],
                ", ".join(modules),
            )
        )
    return markdown(("folder", "what it holds", "modules"), rows)


PARTS: _Parts = {
    "bases": _bases_table,
    "patches": _patches_table,
    "patch-notes": patch_notes,
    "exit-codes": _exit_codes_table,
    "recipes": _recipes_table,
    "limits": _limits_table,
    "pool-settings": _pool_table,
    "plans": _plans_table,
    "audit": audit_table,
    "packages": _package_table,
}
