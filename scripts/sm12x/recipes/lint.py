"""Faults of a recipe that its schema cannot express.

Three parts need more than the file and live elsewhere: vLLM's own argument parser (the image's
`check`), the memory plan (`sm12x.plan`), and the printing (`sm12x recipe lint`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sm12x import layout
from sm12x.core.errors import Sm12xError
from sm12x.core.text import perhaps
from sm12x.recipes import load, options
from sm12x.recipes.model import Block, Recipe
from sm12x.recipes.render import Rendered, render

ERROR, WARNING, NOTE = "error", "warning", "note"
# Tags that may name another image later.
_FLOATING = ("latest", "nightly", "main", "master", "dev", "edge", "stable")
_REFERENCE = re.compile(r"\$(?:\w+|\{\w+(?::?\?[^}]*)?\})")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """``line`` counts from 1; ``level`` is ERROR, WARNING or NOTE."""

    path: Path
    line: int
    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.level}: {self.text}"


def lint(path: Path) -> tuple[Recipe | None, list[LintFinding]]:
    """Read a recipe and list what is wrong with it; the recipe is None if it cannot be read."""
    recipe, faults = load.inspect(path)
    found = [
        LintFinding(
            path=path,
            line=fault.line,
            level=ERROR,
            text=f"{fault.text}: {fault.next_step}" if fault.next_step else fault.text,
        )
        for fault in faults
    ]
    if recipe is None or faults:
        return None, found
    try:
        rendered = filled(recipe)
    except Sm12xError as error:
        line = recipe.lines.get("command", 1)
        return None, [LintFinding(path=path, line=line, level=ERROR, text=error.message)]
    found += _Rules(recipe, rendered).all()
    return recipe, sorted(found, key=lambda finding: finding.line)


def filled(recipe: Recipe) -> Rendered:
    """The command with the defaults, as it would run."""
    solo = recipe.sm12x is None and not recipe.cluster_only
    return render(recipe, settings={}, environ={}, solo=solo)


def _at(host: str) -> str:
    return f"on {host}" if host else "on every address, for it names no host"


class _Rules:
    def __init__(self, recipe: Recipe, rendered: Rendered) -> None:
        self.recipe = recipe
        self.rendered = rendered
        self.block: Block | None = recipe.sm12x
        self.env = rendered.env
        self.words = rendered.serve
        self.options = options.parse(rendered.serve or ())
        self.found: list[LintFinding] = []
        self.error, self.warn = partial(self.add, ERROR), partial(self.add, WARNING)

    def all(self) -> list[LintFinding]:
        rules: list[Callable[[], None]] = [self.pins, self.notices]
        if self.words is not None:
            rules += [self.dev_mode, self.sleep_routes, self.utilization, self.secrets]
        for rule in rules:
            rule()
        if self.block:
            self.machines(self.block)
            self.pair(self.block)
        if self.block and self.words is not None:
            self.sleep(self.block)
            self.parallel(self.block)
        return self.found

    def add(self, level: str, key: str, text: str) -> None:
        line = self.recipe.lines.get(key) or self.recipe.lines.get(key.split(".")[0]) or 1
        self.found.append(LintFinding(path=self.recipe.path, line=line, level=level, text=text))

    def pins(self) -> None:
        recipe = self.recipe
        name, _, digest = recipe.container.partition("@")
        _, _, tag = name.rpartition("/")[2].partition(":")
        if not digest and (not tag or tag in _FLOATING):
            what = f"the tag {tag!r}" if tag else "no tag"
            self.warn(
                "container",
                f"container has {what} and no digest: the tag may later name another image; "
                "`sm12x recipe pin` writes one",
            )
        if self.rendered.unpinned:
            self.warn(
                "model_revision",
                f"model_revision is not applied to this command: {self.rendered.unpinned}",
            )
        if self.words is None:
            return
        served = options.model(self.words)
        pinned = recipe.model_revision or "revision" in self.options
        if _HUB_NAME.fullmatch(served) and not pinned:
            self.warn(
                "model",
                f"{served} has no model_revision: the branch may later be at another commit; "
                "`sm12x recipe pin` writes one",
            )
        if recipe.model and served and recipe.model != served:
            self.warn("model", f"model is {recipe.model}, the command serves {served}")

    def notices(self) -> None:
        if self.recipe.mods:
            names = ", ".join(self.recipe.mods)
            self.warn("mods", f"mods are not applied here: {names}")
        if self.recipe.not_applied:
            names = ", ".join(self.recipe.not_applied)
            self.warn(self.recipe.not_applied[0], f"{names}: of sparkrun, not applied here")
        if self.words is None and not (self.block and self.block.pair):
            why = self.rendered.unchecked
            self.add(NOTE, "command", f"the command's arguments are not checked: {why}")
        for release in self.block.status.blocked if self.block else ():
            known = [folder.name for folder in layout.patches().glob("*/")]
            if known and release and release not in known:
                near = perhaps(release, known)
                self.error("sm12x.status", f"blocked names {release}, no base here{near}")
        if self.block is None:
            self.add(
                NOTE, "name", "there is no sm12x block: hardware, memory and sleep are not checked"
            )

    def dev_mode(self) -> None:
        host = self.options.get("host", "")
        if options.is_true(self.env.get("VLLM_SERVER_DEV_MODE", "")) and options.is_public(host):
            self.error(
                "env.VLLM_SERVER_DEV_MODE",
                f"VLLM_SERVER_DEV_MODE opens /sleep, /collective_rpc and more {_at(host)}, and API "
                "keys do not cover them: listen on 127.0.0.1 behind a proxy that passes /v1 alone",
            )

    def sleep_routes(self) -> None:
        host = self.options.get("host", "")
        given = "enable-sleep-routes" in self.options and "api-key" not in self.options
        if given and options.is_public(host):
            self.warn(
                "command",
                f"--enable-sleep-routes opens /sleep and /wake_up {_at(host)}: give an API key "
                "with -e VLLM_API_KEY, which they then ask for",
            )

    def utilization(self) -> None:
        text = self.options.get("gpu-memory-utilization", "")
        key = "defaults.gpu_memory_utilization"
        try:
            share = float(text or "0.9")
        except ValueError:
            # Forks of vLLM take `auto` or "0.5g"; the release's own parser has the last word.
            self.warn(key, f"gpu_memory_utilization is {text!r}, not a share of the memory")
            return
        if not 0 < share <= 1:
            self.error(key, f"gpu_memory_utilization is {text}, not a share of at most 1")

    def secrets(self) -> None:
        for name in ("api-key", "hf-token"):
            # `$NAME` is looked up where the command runs.
            if (value := self.options.get(name)) and not _REFERENCE.fullmatch(value):
                self.warn(
                    "command",
                    f"--{name} is in the file for every reader to see: give it with -e "
                    "VLLM_API_KEY or HF_TOKEN",
                )

    def sleep(self, block: Block) -> None:
        sleep, enabled = block.sleep, "enable-sleep-mode" in self.options
        if sleep.level and not enabled:
            self.error(
                "sm12x.sleep",
                f"sleep is {sleep} but the command has no --enable-sleep-mode: nothing would be "
                "released",
            )
        if enabled and not sleep.level:
            self.error(
                "sm12x.sleep", "sleep is never but the command has --enable-sleep-mode: take it out"
            )
        dev_mode = options.is_true(self.env.get("VLLM_SERVER_DEV_MODE", ""))
        if sleep.level and not (dev_mode or "enable-sleep-routes" in self.options):
            self.error(
                "command",
                f"sleep is {sleep} but the command has no --enable-sleep-routes: without it, or "
                "VLLM_SERVER_DEV_MODE in env, there is no /sleep",
            )
        elif sleep.level == 2 and not dev_mode:
            self.error(
                "env",
                "after a level-2 sleep the weights are reloaded with /collective_rpc, which needs "
                "VLLM_SERVER_DEV_MODE, and env does not set that",
            )
        if sleep.level == 2 and "speculative-config" in self.options:
            self.error(
                "sm12x.sleep",
                "level-2 sleep loses the weights of the draft model (vllm#52479): sleep at level 1",
            )
        if sleep.level == 1 and "gb10" in block.hardware:
            self.warn(
                "sm12x.sleep",
                "on GB10 a level-1 copy takes the same memory again, and a wake can crash the host "
                "(vllm#50011, #57629, #55206)",
            )

    def parallel(self, block: Block) -> None:
        sizes = {
            name: options.number(self.options, f"{name}-parallel-size")
            for name in ("tensor", "pipeline", "data")
        }
        there = block.gpus * block.machines
        wanted = 1
        for name, size in sizes.items():
            if size is None:
                text = self.options[f"{name}-parallel-size"]
                self.error("command", f"{name} parallel size is {text!r}, not a number")
                return
            wanted *= size
        if wanted != there:
            told = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
            self.error(
                "sm12x.gpus",
                f"the command uses {wanted} GPUs ({told or 'no parallel size'}), the block has "
                f"{block.gpus} on {block.machines} machines",
            )
        nodes = options.number(self.options, "nnodes")
        backend = self.options.get("distributed-executor-backend", "")
        if backend != "ray" and nodes is not None and nodes != block.machines:
            self.error(
                "sm12x.machines",
                f"the command names {nodes} machines (--nnodes), the block {block.machines}",
            )

    def machines(self, block: Block) -> None:
        several = block.machines > 1
        if several and self.recipe.solo_only:
            self.error("solo_only", f"solo_only, but the block has {block.machines} machines")
        if self.recipe.cluster_only and not several:
            self.error("cluster_only", "cluster_only, but the block has one machine")
        if "gb10" in block.hardware and block.gpus > 1:
            self.error("sm12x.gpus", f"a GB10 has one GPU, not {block.gpus}")

    def pair(self, block: Block) -> None:
        members = []
        for name in block.pair:
            path = self.recipe.path.with_name(f"{name}.yaml")
            if not path.is_file():
                others = [other.stem for other in self.recipe.path.parent.glob("*.yaml")]
                hint = perhaps(name, others)
                self.error("sm12x.pair", f"there is no recipe {name!r} beside this{hint}")
                continue
            member, faults = load.inspect(path)
            if member is None or member.sm12x is None or faults:
                self.error("sm12x.pair", f"{name} cannot be used: lint it")
                continue
            if not member.sm12x.sleep.level:
                self.error("sm12x.pair", f"{name} never sleeps: {member.sm12x.sleep.reason}")
            members.append(member.sm12x)
        places = {(one.gpus, one.machines) for one in members}
        if len(places) > 1 or (members and places != {(block.gpus, block.machines)}):
            self.error(
                "sm12x.pair", "both recipes and this one must have the same gpus and machines"
            )
