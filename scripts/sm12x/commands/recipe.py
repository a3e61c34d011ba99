"""`sm12x recipe`: list, show, lint, pin, import and render recipes."""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import click

from sm12x import layout, plan
from sm12x.commands import print_json, reports, usable
from sm12x.core import files
from sm12x.core.errors import BadFileError, FindingsError, Sm12xError, UsageError
from sm12x.core.progress import spinner
from sm12x.deploy import container, local, mounts, nomad
from sm12x.deploy.container import BUNDLE, LOOPBACK, Grants
from sm12x.recipes import edit, evidence, lint, load
from sm12x.recipes.evidence import Evidence
from sm12x.recipes.lint import ERROR, WARNING, LintFinding
from sm12x.recipes.model import Recipe, ShownRecipe
from sm12x.recipes.render import filled, require_harmless
from sm12x.runtime import about, serve
from sm12x.runtime.check import check, native
from sm12x.runtime.check.report import FAIL, WARN
from sm12x.runtime.places import Places
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.wheel import ledger as ledgers


class _WithWords(click.Command):
    """sm12x's options stand before or after RECIPE; `--` and the words after it belong to vLLM."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        try:
            left = super().parse_args(ctx, args[:at])
        except click.NoSuchOption as error:
            near = error.possibilities or []
            raise UsageError(
                f"there is no option {error.option_name}",
                next_step=f"perhaps you meant {' or '.join(near)}"
                if near
                else f"put vLLM's own arguments after --: -- {error.option_name} ...",
            ) from None
        ctx.params["words"] = (*ctx.params["words"], *args[at:])
        return left


@dataclass(frozen=True, kw_only=True)
class RecipeBrief:
    """A recipe in a list; without an ``sm12x`` block what it would say is null or empty."""

    key: str
    description: str
    model: str
    hardware: tuple[str, ...] = ()
    gpus: int | None = None
    machines: int | None = None
    sleep: str | None = None
    state: str | None = None
    evidence: tuple[Evidence, ...] = ()
    blocked: str = ""
    pool: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RecipeList:
    """What `sm12x recipe list --json` prints."""

    schema: Literal[1] = 1
    recipes: tuple[RecipeBrief, ...]


@dataclass(frozen=True, kw_only=True)
class LintReport:
    """What `sm12x recipe lint --json` prints. ``parser`` says whether vLLM's own was asked."""

    schema: Literal[1] = 1
    ok: bool
    parser: str
    findings: tuple[LintFinding, ...]


@click.group("recipe")
def command() -> None:
    """List, show, lint, pin, import and render recipes.

    RECIPE is the name of a file in recipes/ without its .yaml, or the path of any recipe file,
    those of eugr's runner and of sparkrun included.

    Example: sm12x recipe render --to docker smoke port=8001
    """


@command.command("list")
@reports(RecipeList)
def list_(as_json: bool) -> None:
    """List the recipes with the hardware that they need and their status.

    Example: sm12x recipe list
    """
    recipes = load.load_all(layout.recipes())
    if as_json:
        print_json(RecipeList(recipes=tuple(map(_brief, recipes.values()))))
        return
    for key, recipe in recipes.items():
        block = recipe.sm12x
        click.echo(key)
        click.echo(f"    {recipe.description or recipe.name}")
        if block:
            machines = f" on each of {block.machines} machines" if block.machines > 1 else ""
            blocked = recipe.blocked_on(layout.release())
            state = evidence.state(recipe, evidence.of(recipe))
            state += ", cannot serve yet" if blocked else ""
            click.echo(
                f"    {block.gpus} x {' or '.join(block.hardware)}{machines}; sleep "
                f"{block.sleep}; {state}"
            )


def _brief(recipe: Recipe) -> RecipeBrief:
    block = recipe.sm12x
    brief = RecipeBrief(
        key=recipe.key, description=recipe.description or recipe.name, model=recipe.model
    )
    if block is None:
        return brief
    entries = evidence.of(recipe)
    return dataclasses.replace(
        brief,
        hardware=block.hardware,
        gpus=block.gpus,
        machines=block.machines,
        sleep=str(block.sleep),
        state="verified" if entries else block.status.state,
        evidence=tuple(entries),
        blocked=recipe.blocked_on(layout.release()),
        pool=block.pool,
    )


@command.command()
@click.argument("name", metavar="RECIPE")
@reports(ShownRecipe)
def show(name: str, as_json: bool) -> None:
    """Show a recipe with its memory, status, settings and the command that runs it.

    Example: sm12x recipe show deepseek-v4-flash-rtx-pro-6000-tp4
    """
    recipe = load.load(load.find(name))
    if as_json:
        print_json(ShownRecipe(**vars(recipe)))
        return
    click.echo(about.recipe_text(recipe, _image(recipe) or recipe.container))


@command.command("lint")
@click.argument("names", metavar="[RECIPE]...", nargs=-1)
@reports(LintReport)
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
def lint_(names: tuple[str, ...], as_json: bool, strict: bool) -> None:
    """Check recipes: schema, conflicts between flags, memory plan, pins, vLLM's own parser.

    Without a name, all of recipes/. Exit code 1 when there is an error. Without vLLM installed its
    parser does not run: the last line has the command that runs it in the image.

    Example: sm12x recipe lint recipes/smoke.yaml
    """
    paths = [load.find(name) for name in names] or sorted(layout.recipes().glob("*.yaml"))
    if not paths:
        raise BadFileError(
            f"{layout.recipes()} holds no recipe", next_step="name the files to check"
        )
    findings: list[LintFinding] = []
    recipes: dict[str, Recipe] = {}
    for path in paths:
        recipe, faults = lint.lint(path)
        findings += faults
        if recipe:
            recipes[str(path)] = recipe
            findings += _memory(recipe) + _mounts(recipe)
    findings += lint.evidence_findings(paths, recipes)
    has_parser = importlib.util.find_spec("vllm") is not None
    if has_parser:
        with spinner("vLLM's argument parser, about 20 s"):
            findings += _parser(recipes)
    order = {path: number for number, path in enumerate(paths)}
    findings.sort(key=lambda finding: (order.get(finding.path, len(order)), finding.line))
    parser = "asked" if has_parser else "not asked: vLLM is not installed here"
    how = f"docker run --rm {_tag() or BUNDLE} check" + (
        "" if not names else " (or mount the file and run `sm12x recipe lint FILE` in the image)"
    )
    errors = [finding for finding in findings if finding.level == ERROR]
    warnings = [finding for finding in findings if finding.level == WARNING]
    if as_json:
        print_json(LintReport(ok=not errors, parser=parser, findings=tuple(findings)))
    else:
        for finding in findings:
            click.echo(str(finding))
        click.echo(f"{len(paths)} recipes: {len(errors)} errors, {len(warnings)} warnings")
        click.echo(f"vLLM's own parser: {parser}" + ("" if has_parser else f"; {how} runs it"))
    if errors or (strict and warnings):
        raise FindingsError(
            f"{len(errors)} errors and {len(warnings)} warnings in {len(paths)} recipes",
            next_step="correct the lines above",
        )


def _memory(recipe: Recipe) -> list[LintFinding]:
    """Return the findings of the memory plan; a plan that cannot tell is a warning."""
    line = recipe.lines.get("sm12x.memory") or recipe.lines.get("sm12x") or 1
    try:
        problems = plan.check(recipe)
    except Sm12xError as error:
        return [LintFinding(path=recipe.path, line=line, level=ERROR, text=error.message)]
    soft = ("cannot tell", ": cut: ", "sleeps at level 1")
    return [
        LintFinding(
            path=recipe.path,
            line=line,
            level=WARNING if any(word in text for word in soft) else ERROR,
            text=text,
        )
        for text in problems
    ]


def _mounts(recipe: Recipe) -> list[LintFinding]:
    """A model in a folder that no container may have."""
    try:
        if path := container.model_path(recipe, {}):
            mounts.of_model(path)
    except UsageError as error:
        line = recipe.lines.get("defaults.model", 1)
        return [LintFinding(path=recipe.path, line=line, level=ERROR, text=error.message)]
    return []


def _parser(recipes: dict[str, Recipe]) -> list[LintFinding]:
    """Run vLLM's own parser on all recipes, in one process, and return its findings."""
    with check.scratch() as folder:
        ask = native.prober(folder)
        driver, _ = native.check_driver(Places.of_image(), ask, "")
        lines = native.check_arguments(recipes, driver, ask)
    findings = []
    for line in lines:
        if line.state in (FAIL, WARN):
            key = next((key for key in recipes if line.text.startswith(f"{key}: ")), None)
            recipe = recipes[key] if key else next(iter(recipes.values()))
            text = line.text.removeprefix(f"{key}: ") if key else line.text
            level, at = ERROR, recipe.lines.get("command", 1)
            if line.state == WARN:
                level, at = WARNING, recipe.lines.get(f"env.{text.split()[0]}", at)
            findings.append(LintFinding(path=recipe.path, line=at, level=level, text=text))
    return findings


@command.command()
@click.argument("name", metavar="RECIPE")
@click.option("--model-revision", default="", metavar="COMMIT", help="40 hex digits.")
@click.option("--container-digest", default="", metavar="DIGEST", help="sha256:...")
def pin(name: str, model_revision: str, container_digest: str) -> None:
    """Write a model's commit and an image's digest into a recipe; the rest of the file stays.

    A pinned commit is given to vLLM as --revision when the recipe runs.

    Example: sm12x recipe pin my.yaml --model-revision 0123456789abcdef0123456789abcdef01234567
    """
    path = load.find(name)
    recipe = edit.pin(path, revision=model_revision, digest=container_digest)
    click.echo(f"{path}: container {recipe.container}")
    click.echo(f"{path}: model_revision {recipe.model_revision or 'none'}")
    if why := filled(recipe).unpinned:
        click.echo(f"{path}: model_revision is not applied to this command: {why}")


@command.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write there instead of printing.",
)
def import_(file: Path, output: Path | None) -> None:
    """Copy a recipe of eugr's runner or of sparkrun and append an sm12x block to fill in.

    Example: sm12x recipe import their.yaml --output recipes/mine.yaml
    """
    text = edit.imported(file)
    if output is None:
        click.echo(text, nl=False)
        return
    if output.exists():
        raise UsageError(f"{output} exists already", next_step="name another file")
    files.write_output(output, text)
    quoted = shlex.quote(str(output))
    click.echo(f"{output}: fill in the sm12x block, then `sm12x recipe lint {quoted}`")


_TARGETS: dict[str, Callable[..., str]] = {
    "docker": local.docker,
    "compose": local.compose,
    "nomad": nomad.render,
    "nomad-overlay": nomad.render_overlay,
    "shell": local.shell,
    "llama-swap": local.llama_swap,
}
# Those that make one text of the recipes of a pool.
_OF_POOLS = ("nomad", "llama-swap")
# Those whose text the user can give more to; a Nomad job has variables for it.
_GRANTED = ("docker", "compose", "shell", "llama-swap")


@command.command(cls=_WithWords)
@click.option(
    "--to", "target", type=click.Choice(list(_TARGETS)), required=True, help="What to render for."
)
@click.option(
    "--image",
    default="",
    help="Image to run. Default: the recipe's container; for the bundle's image, its tag.",
)
@click.option(
    "--publish",
    default=LOOPBACK,
    metavar="ADDRESS",
    help="Address of this machine that clients reach the server on. Default: 127.0.0.1.",
)
@click.option(
    "--pass",
    "passed",
    multiple=True,
    metavar="NAME",
    help="Pass this variable of the environment as well, such as HF_TOKEN.",
)
@click.option(
    "--cache",
    default="",
    metavar="VOLUME",
    help="Volume or folder of the caches. Default: one for each level of trust.",
)
@click.argument("name", metavar="RECIPE")
@click.argument("words", metavar="[KEY=VALUE]... [-- ARG...]", nargs=-1, type=click.UNPROCESSED)
def render(
    target: str,
    image: str,
    publish: str,
    passed: tuple[str, ...],
    cache: str,
    name: str,
    words: tuple[str, ...],
) -> None:
    """Print a recipe as a command or a file that runs it.

    KEY=VALUE changes a setting; the words after -- go to vLLM, where the last of equal options
    counts. The text names VLLM_API_KEY and never its value: give it in the environment.

    Example: sm12x recipe render smoke port=8001 --to compose -- --seed 3
    """
    recipe = load.load(load.find(name))
    settings, extra = serve.split(words)
    grants = Grants(publish=publish, passed=passed, cache=cache)
    granted = {"grants": grants} if target in _GRANTED else {}
    if not granted and grants != Grants():
        raise UsageError(
            f"--publish, --pass and --cache are for {', '.join(_GRANTED)}",
            next_step="set the variables of the Nomad job: host_network, cache_volume",
        )
    for one in load.pool(recipe) or [recipe]:
        own = settings if one is recipe else {}
        require_harmless(one, container.live(one, settings=own, extra=extra).serve)
    image = image or _image(recipe)
    peers = {"peers": load.pool(recipe)} if target in _OF_POOLS else {}
    text = _TARGETS[target](recipe, image=image, settings=settings, extra=extra, **peers, **granted)
    click.echo(usable(text), nl=False)


def _image(recipe: Recipe) -> str:
    """The image to name instead of the recipe's container, "" for that: a bundle has a tag."""
    return _tag() if recipe.container == BUNDLE else ""


def _tag() -> str:
    """The tag of the image that `make bundle` makes here, or of the image this runs in.

    "" where neither is known. The stack's id is computed from the bytes of the patches, without
    parsing them.
    """
    if layout.patches().is_dir():
        version = bases.default()
        return f"{BUNDLE}:{version}-{series.read_id(layout.patches() / version)}"
    path = Places.of_image().ledger
    if not path.is_file():
        return ""
    ledger = ledgers.read(path)
    return f"{BUNDLE}:{ledger.base_version}-{ledger.stack_id}"
