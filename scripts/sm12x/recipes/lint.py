"""Faults of a recipe that its schema cannot express.

Three parts need more than the file and live elsewhere: vLLM's own argument parser (the image's
`check`), the memory plan (`sm12x.plan`), and the printing (`sm12x recipe lint`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from sm12x import layout
from sm12x.core.errors import Sm12xError, UsageError
from sm12x.core.text import perhaps
from sm12x.recipes import evidence, load, options, planned
from sm12x.recipes.model import Block, Recipe
from sm12x.recipes.render import Rendered, filled, require_harmless, unpinned_code

ERROR, WARNING, NOTE = "error", "warning", "note"
# Tags that may name another image later.
_FLOATING = ("latest", "nightly", "main", "master", "dev", "edge", "stable")
_REFERENCE = re.compile(r"\$(?:\w+|\{\w+(?::?\?[^}]*)?\})")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The image of a bundle, and a name that no resolver knows (RFC 6761).
_OURS = "vllm-sm12x"
_NO_HOST = "none.invalid"
# What tells, without the checkpoint, that a model takes pictures, sound or video.
_MEDIA_OPTIONS = ("limit-mm", "media-io", "mm-", "video-", "interleave-mm", "skip-mm")
_MEDIA_MODEL = re.compile(r"(?i)vision|omni|multimodal|(?<![a-z])vl(?![a-z])")
_SECRET = re.compile(
    r"(?i)(^|_)(token|secret|password|passwd|credentials?|(api|access)_?key)s?(_|$)"
)
# `NAME=value`, wherever a shell or `env` may have it.
_ASSIGNED = re.compile(r"(?:^|[\s;&|(])([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;&|)]*)")
# Variables and options of vLLM 0.33.0 (envs.py, arg_utils.py, common/cli_args.py) with which those
# who reach a server can do more than ask the model; what they can do then. Errors are ways to run
# code or to read any file.
_VARIABLES = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": (ERROR, "unpickles messages, which run any code"),
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": (ERROR, "loads an adapter from any path on request"),
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": (
        WARNING,
        "follows a redirect of a media URL to any host, also past --allowed-media-domains",
    ),
    "VLLM_ENABLE_RESPONSES_API_STORE": (WARNING, "gives a stored answer to any client with its id"),
}
# Side channels without a key, which listen on the address in these.
_CHANNELS = ("VLLM_NIXL", "VLLM_P2P", "VLLM_EC")
_OPTIONS = {
    "enable-mm-embeds": (WARNING, "takes tensors from requests, which can end the engine"),
    "enable-prompt-embeds": (WARNING, "takes tensors from requests, which can end the engine"),
    "enable-tokenizer-info-endpoint": (WARNING, "shows the chat template and the tokenizer"),
    "grpc-port": (WARNING, "opens a second port, whose requests need no key"),
    "kv-events-config": (WARNING, "publishes events on a socket without a key"),
    "kv-transfer-config": (WARNING, "moves caches over a link without a key"),
    "profiler-config": (WARNING, "opens routes that start and stop a profiler"),
    "root-path": (WARNING, "changes which paths need the key: test that yours do"),
    "tool-server": (WARNING, "runs tools, such as a Python interpreter, for requests"),
    "trust-request-chat-template": (WARNING, "runs a template that a request brings"),
    "trust-request-mm-kwargs": (WARNING, "takes processor settings that a request brings"),
    "unauthenticated-metrics": (WARNING, "shows /metrics to clients without a key"),
    "weight-transfer-config": (WARNING, "opens a group in which others replace the weights"),
}


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
    findings = [
        LintFinding(
            path=path,
            line=fault.line,
            level=ERROR,
            text=f"{fault.text}: {fault.next_step}" if fault.next_step else fault.text,
        )
        for fault in faults
    ]
    if recipe is None or faults:
        return None, findings
    try:
        rendered = filled(recipe)
    except Sm12xError as error:
        line = recipe.lines.get("command", 1)
        return None, [LintFinding(path=path, line=line, level=ERROR, text=error.message)]
    findings += _Rules(recipe, rendered).all()
    return recipe, sorted(findings, key=lambda finding: finding.line)


def evidence_findings(paths: Sequence[Path], recipes: Mapping[str, Recipe]) -> list[LintFinding]:
    """Return what is wrong with the evidence beside ``paths``: entries that do not hold.

    ``recipes``: path -> recipe, of those that could be read; of others nothing is said.
    """
    findings = []
    by_key = {recipe.key: recipe for recipe in recipes.values()}
    names = {path.stem for path in paths}
    for folder in dict.fromkeys(path.parent for path in paths):
        known = {path.stem for path in folder.glob("*.yaml")}
        for path, entry, why in evidence.inspect(folder):
            key = path.parent.name
            if key not in names and key in known:
                continue
            reasons = [why] if entry is None else []
            if key not in known:
                reasons.append(f"there is no recipe {key}{perhaps(key, known)}")
            elif entry is not None and key in by_key:
                reasons += evidence.faults(entry, by_key[key])
            findings += [
                LintFinding(path=path, line=1, level=ERROR, text=reason) for reason in reasons
            ]
    return findings


def _at(host: str) -> str:
    return f"on {host}" if host else "on every address, for it names no host"


class _Rules:
    def __init__(self, recipe: Recipe, rendered: Rendered) -> None:
        self.recipe = recipe
        self.rendered = rendered
        self.block: Block | None = recipe.sm12x
        # `export A=1 && env B=2 vllm serve` sets variables as `env` of the recipe does.
        text = " ".join(rendered.argv)
        prefixes = {name: value.strip("\"'") for name, value in _ASSIGNED.findall(text)}
        self.env = {**rendered.env, **prefixes}
        self.words = rendered.serve
        self.options = options.parse(rendered.serve or ())
        self.findings: list[LintFinding] = []
        self.error, self.warn = partial(self.add, ERROR), partial(self.add, WARNING)

    def all(self) -> list[LintFinding]:
        rules: list[Callable[[], None]] = [self.pins, self.notices, self.variables, self.keys]
        if self.words is not None:
            rules += [self.dev_mode, self.keyless, self.utilization, self.secrets]
            rules += [self.remote_code, self.openings, self.media]
        for rule in rules:
            rule()
        if self.block:
            self.machines(self.block)
            self.pool(self.block)
        if self.block and self.words is not None:
            self.sleep(self.block)
            self.parallel(self.block)
        return self.findings

    def add(self, level: str, key: str, text: str) -> None:
        line = self.recipe.lines.get(key) or self.recipe.lines.get(key.split(".")[0]) or 1
        self.findings.append(LintFinding(path=self.recipe.path, line=line, level=level, text=text))

    def pins(self) -> None:
        recipe = self.recipe
        name, _, digest = recipe.container.partition("@")
        _, _, tag = name.rpartition("/")[2].partition(":")
        if name.partition(":")[0] != _OURS:
            self.warn(
                "container",
                f"container is {recipe.container}, an image of others: what it runs is not this "
                "project's, so it gets no token and a cache of its own",
            )
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
        figures = planned.read(recipe)
        if figures and figures.arguments != tuple(self.words):
            self.warn(
                "sm12x.memory",
                f"{planned.place(recipe)} is of other arguments: make it again with "
                f"`sm12x-dev memory {recipe.key}`",
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
        if self.words is None and not (self.block and self.block.pool):
            why = self.rendered.unchecked
            self.add(NOTE, "command", f"the command's arguments are not checked: {why}")
        for release in self.block.status.blocked if self.block else ():
            releases = [folder.name for folder in layout.patches().glob("*/")]
            if releases and release and release not in releases:
                near = perhaps(release, releases)
                self.error("sm12x.status", f"blocked names {release}, no base here{near}")
        if self.block is None:
            self.add(
                NOTE, "name", "there is no sm12x block: hardware, memory and sleep are not checked"
            )

    def dev_mode(self) -> None:
        host = self.options.get("host", "")
        if options.is_true(self.env.get("VLLM_SERVER_DEV_MODE", "")) and options.is_public(host):
            self.error(
                self.set_in("VLLM_SERVER_DEV_MODE"),
                f"VLLM_SERVER_DEV_MODE opens /sleep, /collective_rpc and more {_at(host)}, and API "
                "keys do not cover them: listen on 127.0.0.1 behind a proxy that passes /v1 alone",
            )

    def keyless(self) -> None:
        host = options.find(self.options, "host") or ""
        key = "defaults.host" if "defaults.host" in self.recipe.lines else "command"
        if not options.is_keyless(self.options, {}):
            return
        if options.find(self.options, "enable-sleep-routes") is not None:
            self.error(
                key,
                f"--enable-sleep-routes opens /sleep and /wake_up {_at(host)}: listen on 127.0.0.1 "
                "by default, and let those who set another host set VLLM_API_KEY too",
            )
        elif self.env.get(options.KEY) is None:
            self.warn(
                key,
                f"the server listens {_at(host)}, and asks for a key only where VLLM_API_KEY is "
                "set: `recipe render` publishes its port on 127.0.0.1 alone",
            )

    def set_in(self, name: str) -> str:
        """The key of the file that sets a variable."""
        return f"env.{name}" if name in self.recipe.env else "command"

    def keys(self) -> None:
        try:
            require_harmless(self.recipe, None)
        except UsageError as error:
            self.error("env", error.message)

    def variables(self) -> None:
        """What ``env``, and assignments in the command, open or show."""
        for name, value in self.env.items():
            key = self.set_in(name)
            level, what = _VARIABLES.get(name, (WARNING, ""))
            if what and options.is_true(value):
                self.add(level, key, f"{name} opens the server: it {what}")
            if name.startswith(_CHANNELS) and name.endswith("_HOST") and options.is_public(value):
                self.warn(key, f"{name} opens a channel without a key {_at(value)}")
            if _SECRET.search(name) and value and "$" not in value and not value.isdigit():
                self.warn(
                    key,
                    f"{name} is in the file for every reader to see: take it out, and pass it "
                    f"with -e {name}",
                )

    def openings(self) -> None:
        for name, (level, what) in _OPTIONS.items():
            if options.find(self.options, name) is not None:
                self.add(level, "command", f"--{name} opens the server: it {what}")
        if options.find(self.options, "config") is not None:
            self.warn("command", "--config: the options in that file are not checked here")

    def media(self) -> None:
        """Check that a request cannot make the server read what its sender cannot reach."""
        path = options.find(self.options, "allowed-local-media-path")
        if path:
            deep = len(PurePosixPath(path).parts) > 2 and not path.startswith(("/etc/", "/proc/"))
            self.add(
                WARNING if deep else ERROR,
                "command",
                f"--allowed-local-media-path lets every client read what lies in {path}",
            )
        domains = options.find(self.options, "allowed-media-domains")
        limits = options.find(self.options, "limit-mm-per-prompt") or ""
        none = re.fullmatch(r"\{(\s*\"\w+\"\s*:\s*0\s*,?)+\}", limits)
        if none or options.find(self.options, "language-model-only") is not None:
            return
        media_options = [name for name in self.options if name.startswith(_MEDIA_OPTIONS)]
        if domains is None and (
            media_options or _MEDIA_MODEL.search(options.model(self.words or ()))
        ):
            self.warn(
                "command",
                "the server fetches any URL that a request names, inside your network too: "
                f"--allowed-media-domains {_NO_HOST}, or the hosts you trust",
            )
        elif (
            domains not in (None, _NO_HOST)
            and self.env.get("VLLM_MEDIA_URL_ALLOW_REDIRECTS") != "0"
        ):
            self.warn(
                "command",
                "--allowed-media-domains is not asked again after a redirect: set "
                'VLLM_MEDIA_URL_ALLOW_REDIRECTS to "0" in env',
            )

    def remote_code(self) -> None:
        repository = unpinned_code(self.words)
        if not repository:
            return
        # A setting without a value: rendering and starting ask the user for it.
        by_user = self.recipe.defaults.get("revision") == ""
        self.add(
            WARNING if by_user else ERROR,
            "model_revision",
            f"--trust-remote-code runs Python files of {repository}, whoever changes them: "
            + (
                "the user gives the commit, revision=COMMIT"
                if by_user
                else "`sm12x recipe pin` writes the commit that you have read"
            ),
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
        product = 1
        for name, size in sizes.items():
            if size is None:
                text = self.options[f"{name}-parallel-size"]
                self.error("command", f"{name} parallel size is {text!r}, not a number")
                return
            product *= size
        if product != there:
            factors = " x ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
            self.error(
                "sm12x.gpus",
                f"the command uses {product} GPUs ({factors or 'no parallel size'}), the block has "
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

    def pool(self, block: Block) -> None:
        members = []
        for name in block.pool:
            path = self.recipe.path.with_name(f"{name}.yaml")
            if not path.is_file():
                others = [other.stem for other in self.recipe.path.parent.glob("*.yaml")]
                hint = perhaps(name, others)
                self.error("sm12x.pool", f"there is no recipe {name!r} beside this{hint}")
                continue
            member, faults = load.inspect(path)
            if member is None or member.sm12x is None or faults:
                self.error("sm12x.pool", f"{name} cannot be used: lint it")
                continue
            if not member.sm12x.sleep.level:
                self.error("sm12x.pool", f"{name} never sleeps: {member.sm12x.sleep.reason}")
            members.append(member.sm12x)
        places = {(one.gpus, one.machines) for one in members}
        if len(places) > 1 or (members and places != {(block.gpus, block.machines)}):
            self.error(
                "sm12x.pool", "its recipes and this one must have the same gpus and machines"
            )
