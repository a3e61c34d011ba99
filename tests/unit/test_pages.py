"""The generated parts of README.md and docs/."""

from __future__ import annotations

import ast
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import click
import jsonschema
import pytest
from click.testing import CliRunner

from sm12x import cli, layout
from sm12x.audit.report import AuditReport, LibraryReport, RunsReport
from sm12x.core import declared
from sm12x.core.errors import EXIT_CODES, BadFileError, FindingsError
from sm12x.core.text import markdown
from sm12x.deploy import nomad
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x_dev import cli as dev
from sm12x_dev import pages
from sm12x_dev.commands import docs

README, OTHER = Path("README.md"), Path("docs/other.md")
BLOCK = "<!-- generated: t -->\nold\n<!-- end -->\n"


def test_a_cell_cannot_break_its_table() -> None:
    assert markdown(("a",), [("x | y\nz",)]) == "| a |\n| --- |\n| x \\| y z |\n"


def test_only_what_stands_between_the_marks_changes() -> None:
    found = pages.rendered(
        {README: f"before\n{BLOCK}after\n", OTHER: "x\n"}, {"t": lambda: "new\n"}
    )
    assert found[README] == "before\n<!-- generated: t -->\nnew\n<!-- end -->\nafter\n"
    assert found[OTHER] == "x\n"


def test_a_part_may_stand_in_any_page_and_in_several() -> None:
    found = pages.rendered({README: BLOCK, OTHER: BLOCK + BLOCK}, {"t": lambda: "new\n"})
    assert [text.count("new") for text in found.values()] == [1, 2]


def test_an_unknown_or_missing_part_is_named() -> None:
    with pytest.raises(BadFileError, match=r"docs/other\.md: .*'u'"):
        pages.rendered({OTHER: BLOCK.replace(": t", ": u")}, {"t": lambda: "new\n"})
    with pytest.raises(BadFileError, match=r"no page .* t\. Next"):
        pages.rendered({README: "nothing here", OTHER: ""}, {"t": lambda: "new\n"})


def test_a_part_without_data_has_no_block() -> None:
    assert pages.rendered({README: "no table"}, {"t": lambda: ""}) == {README: "no table"}
    with pytest.raises(BadFileError, match=r"README\.md: .*'t'"):
        pages.rendered({README: BLOCK}, {"t": lambda: ""})


def test_what_is_committed_is_up_to_date() -> None:
    for path, text in docs.generated_files(dev.root).items():
        assert path.read_text(encoding="utf-8") == text, path


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page with one part, in a checkout of its own."""
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path))
    (tmp_path / "README.md").write_text(BLOCK)
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(pages, "PARTS", {"t": lambda: "new\n"})
    monkeypatch.setattr(docs, "commands_table", lambda root: "")
    monkeypatch.setattr(nomad, "examples", lambda recipes: {"a.nomad.hcl": "job\n"})
    monkeypatch.setattr(pages, "audit_picture", lambda: "<svg/>\n")
    (tmp_path / "data" / "schemas").mkdir(parents=True)
    monkeypatch.setattr(layout, "data", lambda: tmp_path / "data")
    return tmp_path


def test_the_command_writes_what_is_stale_and_removes_what_nothing_makes(checkout: Path) -> None:
    left = checkout / "nomad-examples" / "gone.nomad.hcl"
    left.parent.mkdir()
    left.write_text("old\n")
    checked = CliRunner().invoke(dev.root, ["docs", "--check"])
    assert checked.exit_code == 1
    schema = Path("data/schemas/recipe-1.json")
    for name in ("README.md", "docs/machine-code.svg", "a.nomad.hcl", "gone.nomad.hcl", schema):
        assert str(name) in str(checked.exception)
    assert (checkout / "README.md").read_text() == BLOCK
    assert CliRunner().invoke(dev.root, ["docs"]).exit_code == 0
    assert (checkout / "README.md").read_text() == BLOCK.replace("old", "new")
    assert (checkout / "docs" / "machine-code.svg").read_text() == "<svg/>\n"
    assert json.loads((checkout / schema).read_text())["type"] == "object"
    assert not left.exists()
    again = CliRunner().invoke(dev.root, ["docs", "--check"])
    assert again.exit_code == 0, again.output
    # An edit by hand is stale too.
    (checkout / "docs" / "machine-code.svg").write_text("<svg></svg>\n")
    assert CliRunner().invoke(dev.root, ["docs", "--check"]).exit_code == 1


def test_every_schema_is_one() -> None:
    schemas = {path.name: json.loads(path.read_text()) for path in layout.schemas().glob("*.json")}
    verbs = ("audit", "bench", "check", "doctor", "plan", "pool", "recipe", "verify")
    assert sorted(schemas) == [f"{verb}-1.json" for verb in verbs]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(
    "words",
    [
        ["plan"],
        ["plan", "deepseek-v4-flash-rtx-pro-6000-tp4", "--utilization", "0.95"],
    ],
    ids=" ".join,
)
def test_what_a_command_prints_fits_its_schema(words: list[str]) -> None:
    printed = CliRunner().invoke(cli.root, [*words, "--json"])
    assert isinstance(printed.exception, None | SystemExit | FindingsError), printed.exception
    schema = json.loads((layout.schemas() / f"{words[0]}-1.json").read_text())
    jsonschema.validate(json.loads(printed.stdout), schema)


@pytest.mark.parametrize("version", bases.versions())
def test_a_stack_is_listed_and_checked_as_json(version: str) -> None:
    listed = CliRunner().invoke(dev.root, ["list", "--json", "--base", version])
    stack = series.load(bases.load(version))
    document = json.loads(listed.stdout)
    assert document["stack"] == stack.id
    assert [one["sha256"] for one in document["patches"]] == [one.sha256 for one in stack.patches]
    checked = CliRunner().invoke(
        dev.root, ["check", "--messages-only", "--json", "--base", version]
    )
    assert json.loads(checked.stdout) == {"base": version, "findings": [], "apply": None}


def _links(text: str) -> list[str]:
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.findall(r"\]\(([^)#\s]+)\)", outside)


def _markdown() -> list[Path]:
    root = layout.root()
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]


def test_links_between_pages_lead_to_files() -> None:
    found = [(page, link) for page in _markdown() for link in _links(page.read_text())]
    assert len(found) > 40
    for page, link in found:
        assert link.startswith("https://") or (page.parent / link).exists(), f"{page}: {link}"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = _links((layout.root() / "README.md").read_text())
    for page in _markdown():
        name = str(page.relative_to(layout.root()))
        assert name == "README.md" or name in linked, name


def _modules(text: str) -> list[str]:
    """The Python files that a page names in backquotes, but for those of a release and a user."""
    inline = re.findall(r"`([\w./-]+\.py)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [one for one in inline if not one.startswith("vllm/")]


def test_every_module_that_a_page_names_is_there() -> None:
    root = layout.root()
    named = [(page.name, one) for page in _markdown() for one in _modules(page.read_text())]
    assert len(named) > 15
    places = (root, root / "scripts", root / "scripts/sm12x", root / "scripts/sm12x_dev")
    gone = [(page, one) for page, one in named if not any((at / one).is_file() for at in places)]
    assert gone == []
    assert _modules("`deploy/docker.py` and `vllm/envs.py`") == ["deploy/docker.py"]


def _commands(text: str) -> list[list[str]]:
    """The calls of `sm12x` and `sm12x-dev` in a page: code blocks, and what is in backquotes."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)).replace("\\\n", " ")
    lines = [line.split("#")[0] for line in blocks.splitlines()]
    inline = re.findall(
        r"`(sm12x(?:-dev)? [^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    )
    calls = [re.search(r"(?:^|/)(sm12x(?:-dev)? .+)", line.strip()) for line in lines]
    return [call[1].split() for call in calls if call] + [one.split() for one in inline]


def _unknown(words: list[str]) -> str:
    """The first word that is no verb or option of the call, "" where all are known."""
    command: click.Command = {"sm12x": cli.root, "sm12x-dev": dev.root}[words.pop(0)]
    while isinstance(command, click.Group):
        name = words.pop(0) if words else ""
        if not re.fullmatch(r"[a-z-]+", name) or name.startswith("-"):
            # `sm12x VERB --help`, `sm12x-dev ...`, `sm12x --help`.
            return ""
        found = command.get_command(click.Context(command), name)
        if found is None:
            return name
        command = found
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    words = words[: words.index("--")] if "--" in words else words
    given = [word.split("=")[0] for word in words if word.startswith("--")]
    return next((word for word in given if word not in {*known, "--help"}), "")


def test_every_command_in_the_pages_is_known_with_its_options() -> None:
    calls = [(page.name, call) for page in _markdown() for call in _commands(page.read_text())]
    assert len(calls) > 60
    assert [(page, unknown) for page, call in calls if (unknown := _unknown(list(call)))] == []
    assert _unknown(["sm12x", "recipe", "rendr"]) == "rendr"
    assert _unknown(["sm12x", "plan", "x", "--utilisation", "0.8"]) == "--utilisation"


def test_every_make_target_and_variable_in_the_pages_is_known() -> None:
    makefile = (layout.root() / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    variables = set(re.findall(r"^([A-Z]+) [?:]=", makefile, flags=re.MULTILINE))
    text = "\n".join(page.read_text() for page in _markdown())
    calls = re.findall(
        r"(?:^|`|&& )make ((?:[a-z-]+ ?)+)((?:[A-Z]+=\S+ ?)*)", text, flags=re.MULTILINE
    )
    assert len(calls) > 25
    for names, settings in calls:
        assert set(names.split()) <= targets, names
        assert {word.split("=")[0] for word in settings.split()} <= variables, settings


def test_the_readme_names_its_two_commands_and_stays_short() -> None:
    text = (layout.root() / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    commands = re.findall(r"^make ([a-z-]+)", text, flags=re.MULTILINE)
    assert commands[:2] == ["bundle", "test"]
    run = (layout.root() / ".ci" / "run").read_text()
    assert all(re.search(rf"^\s*make {name}\b", run, flags=re.MULTILINE) for name in commands[:2])


def test_every_exit_code_every_patch_and_every_verb_is_described() -> None:
    errors = (layout.root() / "docs" / "errors.md").read_text()
    assert all(f"| {code} | {said} |" in errors for code, said in EXIT_CODES.items())
    patches = (layout.root() / "docs" / "patches.md").read_text()
    for version in bases.versions():
        for patch in series.load(bases.load(version)).patches:
            assert f"### {patch.subject}\n" in patches
            assert f"(../patches/{version}/{patch.name})" in patches
    commands = (layout.root() / "docs" / "commands.md").read_text()
    assert all(f"| `sm12x {verb}" in commands for verb in cli.VERBS)
    assert all(f"| `sm12x-dev {verb}" in commands for verb in dev.VERBS)


def test_imports_follow_the_order_that_the_architecture_page_names() -> None:
    text = (layout.root() / "docs" / "architecture.md").read_text()
    order = re.search(r"`(core < layout <[^`]+)`", text)
    assert order
    levels = [level.split(",") for level in order[1].split("<")]
    rank = {name.strip(): n for n, level in enumerate(levels) for name in level}
    package = Path(cli.__file__).parent
    wrong = []
    for path in package.rglob("*.py"):
        here = path.relative_to(package).parts[0].removesuffix(".py")
        if here in ("__init__", "__main__"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "sm12x":
                continue
            _, *inner = str(node.module).split(".")
            for name in inner[:1] or [one.name for one in node.names]:
                if name not in (here, "__version__") and rank[name] >= rank[here]:
                    wrong.append(f"{path.relative_to(package)}: {name}")
    assert wrong == []


def _summaries(root: Path, text: str) -> None:
    """A checkout with the bases of this one and another summaries.toml."""
    (root / "patches").mkdir()
    for version in bases.versions():
        (root / "patches" / version).symlink_to(layout.patches() / version)
    (root / "patches" / pages.SUMMARIES).write_text(text)


def test_a_patch_without_a_paragraph_is_described_by_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = bases.default()
    patch = series.load(bases.load(version)).patches[0]
    _summaries(tmp_path, "schema = 1\n[summary]\n")
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path))
    notes = pages.patch_notes()
    assert f"### {patch.subject}\n\n{version}: 0001. {pages.opening(patch.body)}\n" in notes
    assert pages.opening(patch.body) in " ".join(patch.body.split())
    assert 10 < len(pages.opening(patch.body).split()) < 80


def test_a_paragraph_of_a_patch_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _summaries(tmp_path, 'schema = 1\n[summary]\n"No such subject" = "x"\n')
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path))
    with pytest.raises(BadFileError, match=r"summaries\.toml: .*'No such subject'"):
        pages.patch_notes()


@pytest.mark.parametrize(
    ("body", "opening"),
    [
        ("What was wrong. One `a.b` thing.\nTwo! Three.\n\nWhy.", "One `a.b` thing. Two!"),
        ("A sentence without an end\n\nmore", "A sentence without an end"),
        ("What was wrong. `x` is. wake_up fails. More.", "`x` is. wake_up fails. More."),
    ],
)
def test_the_opening_of_a_message(body: str, opening: str) -> None:
    assert pages.opening(body) == opening


def _runs(native: int, ptx: int, none: int) -> RunsReport:
    units = {"native": native, "ptx": ptx, "none": none, "unknown": 0}
    return RunsReport(verdict="mixed", units=units)


def _report(subject: str, *libraries: tuple[str, float, RunsReport, RunsReport]) -> str:
    found = tuple(
        LibraryReport(
            path=path,
            sha256="",
            size=int(mib * 1024**2),
            machine="x86_64",
            cubins={},
            ptx={},
            unknown=(),
            runs={"12.0": on_120, "12.1": on_121},
        )
        for path, mib, on_120, on_121 in libraries
    )
    made = AuditReport(
        subject=subject, kind="wheel", devices=("12.0", "12.1"), libraries=found, policy=None
    )
    return declared.to_json(made)


@pytest.fixture
def benchmarks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SM12X_ROOT", str(tmp_path))
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    return folder


def _write(benchmarks: Path, *, alike: bool) -> None:
    host = _runs(0, 0, 0)
    on_121 = _runs(60, 0, 2) if alike else _runs(58, 2, 2)
    before = (
        ("vllm/_C.so", 84, _runs(40, 20, 22), _runs(40, 20, 22)),
        ("vllm/fa2.so", 181.9, _runs(0, 52, 0), _runs(0, 52, 0)),
        ("vllm/host.so", 1, host, host),
    )
    after = (
        ("vllm/_C.so", 60.5, _runs(60, 0, 2), on_121),
        ("vllm/fa2.so", 181.9, _runs(0, 52, 0), _runs(0, 52, 0)),
    )
    official = _report("official <&> wheel", *before)
    (benchmarks / "2026-11-20-audit-official.json").write_text(official)
    (benchmarks / "2026-11-20-audit-full.json").write_text(_report("ours", *after))
    (benchmarks / "2026-11-19-audit-full.json").write_text("older")


def test_the_audit_before_and_after(benchmarks: Path) -> None:
    _write(benchmarks, alike=False)
    assert pages.audit_table().splitlines()[2:] == [
        "| `vllm/_C.so` | 40 → 60 | 40 → 58 | 20 → 0/2 | 22 → 2 | 84.0 → 60.5 |",
        "| `vllm/fa2.so` | 0 | 0 | 52 | 0 | 181.9 |",
        "| all | 40 → 60 | 40 → 58 | 72 → 52/54 | 22 → 2 | 265.9 → 242.4 |",
    ]
    (benchmarks / "2026-11-20-audit-official.json").unlink()
    for made in (pages.audit_table, pages.audit_picture):
        with pytest.raises(BadFileError, match=r"audit-official\.json cannot be read"):
            made()


def test_without_reports_there_is_neither_table_nor_picture(benchmarks: Path) -> None:
    assert pages.audit_table() == pages.audit_picture() == ""


_SVG = "{http://www.w3.org/2000/svg}"


def _drawn(svg: str) -> tuple[list[str], list[tuple[str, float]]]:
    """The texts of a picture, and its bars' parts (those right of the labels) with their widths."""
    root = ElementTree.fromstring(svg)  # noqa: S314 - made here
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    bars = []
    for box in root.iter(f"{_SVG}rect"):
        left, top, wide, high = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= left <= left + wide <= width
        assert 0 <= top <= top + high <= height
        if left >= 200:
            bars.append((box.attrib["class"], wide))
    texts = [text.text or "" for text in root.iter(f"{_SVG}text")]
    tops = [float(text.attrib["y"]) for text in root.iter(f"{_SVG}text")]
    assert max(tops) <= height
    return texts, bars


def test_the_picture_has_the_units_of_each_wheel_to_scale(benchmarks: Path) -> None:
    _write(benchmarks, alike=True)
    svg = pages.audit_picture()
    assert svg.startswith("<!-- Made by `sm12x-dev docs`")
    texts, bars = _drawn(svg)
    assert [kind for kind, _ in bars] == ["native", "ptx", "none", "native", "none", "ptx"]
    scale = bars[0][1] / 40
    assert [round(width / scale) for _, width in bars] == [40, 20, 22, 60, 2, 52]
    for said in (
        *("40 native, 20 PTX, 22 none", "60 native, 2 none", "52 PTX"),
        *("_C", "fa2", "official: official <&> wheel", "full build: ours"),
        "40 native, 72 PTX, 22 none  →  60 native, 52 PTX, 2 none",
    ):
        assert texts.count(said) == 1, said
    # No unit of it is device code.
    assert "host" not in texts
    # A theme is followed where it is known, and no background is drawn.
    assert {"light", "dark"} == set(re.findall(r"prefers-color-scheme: (\w+)", svg))


def test_devices_that_differ_have_a_panel_each(benchmarks: Path) -> None:
    _write(benchmarks, alike=False)
    texts, bars = _drawn(pages.audit_picture())
    assert len([text for text in texts if text.endswith("on 12.0")]) == 1
    assert len([text for text in texts if text.endswith("on 12.1")]) == 1
    assert "58 native, 2 PTX, 2 none" in texts
    assert len(bars) == 6 + 7


def test_a_sample_names_the_present_stack() -> None:
    stack = series.load(bases.load(bases.default()))
    sample = "vLLM {} + stack {}, quick mode\nPatched: {} patches, 1\n`{}`\n"
    text = sample.format(bases.default(), "0123abcd", 1, "0123abcd")
    new = sample.format(bases.default(), stack.id, len(stack.patches), stack.id)
    assert pages.samples(text) == new
    assert pages.samples("0123abcd") == "0123abcd"
