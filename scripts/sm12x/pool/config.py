"""The configuration of a pool: one YAML file, or the words of `pool A ... + B ...`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

from sm12x.core import declared, yamltext
from sm12x.core.declared import Declared, KeyFaultError, NotNull, in_file, one_of
from sm12x.core.errors import BadFileError, UsageError
from sm12x.pool.policy import Rules
from sm12x.recipes import load, options
from sm12x.recipes.model import Recipe
from sm12x.runtime import serve

USAGE = (
    "pool [--host ADDRESS] [--port N] RECIPE [key=value ...] + RECIPE [key=value ...], "
    "or pool --config FILE"
)
# How a model leaves the GPU, from the quickest. ``auto`` is chosen by the memory budgets.
RUNGS = ("kv_cache", "level_1", "level_2", "stop")
_SLEEPS = ("auto", *RUNGS, "never")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,199}")
_VERSION = "1"

_Seconds = Annotated[float, Field(gt=0, le=86400)]
_Share = Annotated[float, Field(ge=0, le=1)]


def _number(value: object) -> object:
    """A whole number is a number of seconds, too; a truth value is not."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


_Float = BeforeValidator(_number)
_S = Annotated[float, _Float, Field(gt=0, le=86400)]
_Gib = Annotated[float, _Float, Field(ge=0, le=1e6)]


def _words(value: object) -> object:
    if not isinstance(value, list) or not all(isinstance(one, str | int | float) for one in value):
        raise KeyFaultError("", "is not a list of words")
    return tuple(str(one) for one in value)


def _settings(value: object) -> object:
    if not isinstance(value, dict) or not all(
        isinstance(one, str | int | float) for one in value.values()
    ):
        raise KeyFaultError("", "is not a mapping of settings to values")
    return {
        str(key): str(one).lower() if isinstance(one, bool) else str(one)
        for key, one in value.items()
    }


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
        raise KeyFaultError("", f"is {value!r}, not the address of a server: http://HOST:PORT")
    return value.rstrip("/")


def _name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise KeyFaultError("", f"has {value[:60]!r}, which names no model")
    return value


def _version(value: object) -> object:
    if str(value) != _VERSION:
        raise KeyFaultError("", f"is {value!r}; this version reads {_VERSION!r}")
    return str(value)


_Words = Annotated[
    tuple[str, ...], BeforeValidator(_words), in_file(type="array", items={"type": "string"})
]
_Named = Annotated[str, AfterValidator(_name)]


@dataclass(frozen=True, kw_only=True)
class MemoryFigures(Declared):
    """GiB on each GPU, for the budgets; those of a recipe are its own."""

    awake: Annotated[_Gib | None, NotNull(), Field(description="All that it takes awake.")] = None
    weights: Annotated[
        _Gib | None, NotNull(), Field(description="Kept where the KV cache alone sleeps.")
    ] = None
    residue: Annotated[
        _Gib | None, NotNull(), Field(description="What it holds asleep at level 1.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Declared):
    """One model of the pool: a recipe, a command, or a server that runs already."""

    recipe: Annotated[str, Field(description="A recipe's name or file.")] = ""
    settings: Annotated[
        dict[str, str],
        BeforeValidator(_settings),
        in_file(type="object", additionalProperties={"type": ["string", "number", "boolean"]}),
        Field(description="Settings of the recipe."),
    ] = field(default_factory=dict)
    arguments: Annotated[_Words, Field(description="More arguments of `vllm serve`.")] = ()
    command: Annotated[
        _Words, Field(description="In place of a recipe: `vllm serve ...`, word by word.")
    ] = ()
    env: Annotated[
        dict[str, str],
        BeforeValidator(_settings),
        in_file(type="object", additionalProperties={"type": ["string", "number", "boolean"]}),
        Field(description="Variables of the server that the pool starts."),
    ] = field(default_factory=dict)
    url: Annotated[
        str,
        AfterValidator(lambda value: _url(value) if value else value),
        Field(description="In place of both: a server that runs already."),
    ] = ""
    key_variable: Annotated[
        str, Field(description="The variable with the key of that server's sleep routes.")
    ] = ""
    port: Annotated[
        int, Field(ge=0, le=65535, description="The engine's port on 127.0.0.1; 0 for the next.")
    ] = 0
    model: Annotated[str, Field(description="The name that the server has for it.")] = ""
    aliases: Annotated[
        tuple[_Named, ...], Field(description="Further names that requests may give.")
    ] = ()
    gpus: Annotated[
        tuple[Annotated[int, Field(ge=0, le=1023)], ...],
        Field(description="The GPUs it is on; as many as its recipe has, from 0, by default."),
    ] = ()
    sleep: Annotated[
        str, one_of(*_SLEEPS), Field(description="How it leaves the GPU; auto: by the budgets.")
    ] = "auto"
    running: Annotated[
        str,
        one_of("drain", "freeze"),
        Field(
            description="Requests in flight end before a sleep, or are frozen: that needs a server "
            "with --sleep-keep-kv."
        ),
    ] = "drain"
    keep_kv: Annotated[bool, Field(description="A server of `url` has --sleep-keep-kv.")] = False
    idle_seconds: Annotated[
        _S | None, NotNull(), Field(description="It sleeps after so long without a request.")
    ] = None
    preload: Annotated[
        bool, Field(description="Loaded when the pool starts, and not by its first request.")
    ] = True
    pin: Annotated[bool, Field(description="Stays awake until a person unpins it.")] = False
    canary: Annotated[
        str,
        one_of("auto", "completion", "embedding", "none"),
        Field(description="What is asked after each wake-up."),
    ] = "auto"
    memory: Annotated[MemoryFigures, Field(description="For budgets.")] = field(
        default_factory=MemoryFigures
    )

    def __post_init__(self) -> None:
        kinds = [bool(self.recipe), bool(self.command), bool(self.url)]
        if sum(kinds) != 1:
            raise KeyFaultError("recipe", "is needed, or command, or url: exactly one of them")
        if self.url and (self.settings or self.arguments or self.env or self.port):
            raise KeyFaultError("url", "is a server that runs already: it takes no settings")
        if self.url and self.sleep == "stop":
            raise KeyFaultError("sleep", "is stop, and the pool does not start that server")
        if self.command and options.server(self.command) is None:
            raise KeyFaultError("command", "is not `vllm serve`")
        if self.sleep == "level_2" and not self.url:
            raise KeyFaultError(
                "sleep", "is level_2, which takes development mode: only a server of `url` has that"
            )
        if self.pin and self.sleep != "never" and self.idle_seconds is not None:
            raise KeyFaultError("idle_seconds", "has no effect on a model that is pinned")


@dataclass(frozen=True, kw_only=True)
class PolicyConfig(Declared):
    """Who is served next, and for how long; docs/pool.md has the bounds."""

    residency_swaps: Annotated[
        float,
        _Float,
        Field(ge=0, le=1000, description="A model stays so many times its last swap; 10: 9 %."),
    ] = 10.0
    least_residency_seconds: Annotated[_S, Field(description="And at least so long.")] = 0.5
    most_residency_seconds: Annotated[
        _S, Field(description="And at most so long, where a swap is a load.")
    ] = 120.0
    burst_swaps: Annotated[
        float,
        _Float,
        Field(ge=0, le=100, description="Swaps that an idle model need not wait for; 0 for none."),
    ] = 3.0
    priority_seconds: Annotated[
        float,
        _Float,
        Field(ge=0, le=3600, description="One step of priority counts as so long a wait."),
    ] = 1.0
    boost_seconds: Annotated[
        float, _Float, Field(ge=0, le=3600, description="And all priority as no more than this.")
    ] = 10.0

    def rules(self) -> Rules:
        """Return the rules of ``policy.decide``."""
        return Rules(
            residency_swaps=self.residency_swaps,
            least_residency=self.least_residency_seconds,
            most_residency=self.most_residency_seconds,
            burst_swaps=self.burst_swaps,
            priority_seconds=self.priority_seconds,
            boost_seconds=self.boost_seconds,
        )


@dataclass(frozen=True, kw_only=True)
class LimitsConfig(Declared):
    """Bounds of time, requests and bytes."""

    hold_seconds: Annotated[_S, Field(description="A request waits so long, then 503.")] = 120.0
    drain_seconds: Annotated[_S, Field(description="Then a drain gives the swap up.")] = 30.0
    sleep_seconds: Annotated[_S, Field(description="A /sleep may take so long.")] = 120.0
    wake_seconds: Annotated[_S, Field(description="A /wake_up may take so long.")] = 120.0
    canary_seconds: Annotated[_S, Field(description="The canary may take so long.")] = 30.0
    ask_seconds: Annotated[_S, Field(description="A question about its state may.")] = 20.0
    load_seconds: Annotated[_S, Field(description="A server may load so long.")] = 3600.0
    stall_seconds: Annotated[
        _S, Field(description="A client that takes or gives no byte for so long is cut off.")
    ] = 60.0
    queue_requests: Annotated[int, Field(ge=1, description="Held for each model, then 429.")] = 1000
    queue_mib: Annotated[int, Field(ge=1, description="Bodies held for each model.")] = 256
    body_mib: Annotated[int, Field(ge=1, description="One body; then 413.")] = 256
    header_kib: Annotated[int, Field(ge=1, le=1024, description="One header, or the line.")] = 16


@dataclass(frozen=True, kw_only=True)
class CanaryConfig(Declared):
    """The question after each wake-up, and what counts as well."""

    prompt: Annotated[str, Field(min_length=1)] = (
        "Once upon a time, in a small village by the sea, there lived"
    )
    tokens: Annotated[int, Field(ge=1, le=256, description="Greedy tokens.")] = 4
    random_weights: Annotated[
        bool, Field(description="The model writes garbage by itself: compare, do not judge.")
    ] = False
    most_residue_gib: Annotated[
        _Gib, Field(description="On one GPU, of a sleeping server at level 1.")
    ] = 5.0
    least_acceptance: Annotated[
        float, _Float, Field(ge=0, le=1, description="Of the draft acceptance recorded before.")
    ] = 0.8


@dataclass(frozen=True, kw_only=True)
class KeysConfig(Declared):
    """The variables that have the keys; the file has no key itself."""

    users: Annotated[
        tuple[str, ...], Field(description="Any of them opens the models. Values may have commas.")
    ] = (options.KEY,)
    admin: Annotated[str, Field(description="Opens wake, sleep, pin and reload.")] = (
        options.POOL_KEY
    )
    priorities: Annotated[
        dict[str, Annotated[int, Field(ge=0, le=9)]],
        Field(description="Priority of requests with the key of that variable, 0 to 9."),
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class HostConfig(Declared):
    """The machine's budgets in GiB, where they are not asked of it."""

    gpu_gib: Annotated[_Gib | None, NotNull(), Field(description="Of one GPU.")] = None
    ram_gib: Annotated[_Gib | None, NotNull(), Field(description="For host copies.")] = None


@dataclass(frozen=True, kw_only=True)
class PoolConfig(Declared):
    """A pool: one address, and the models behind it."""

    pool_version: Annotated[
        str, BeforeValidator(_version), in_file(enum=[_VERSION, int(_VERSION)])
    ] = _VERSION
    host: Annotated[str, Field(description="Where the pool listens.")] = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    engine_port: Annotated[
        int, Field(ge=1, le=65000, description="The first port of the engines, on 127.0.0.1.")
    ] = 18000
    models: Annotated[dict[_Named, ModelConfig], Field(min_length=1)]
    default: Annotated[
        str, Field(description="Awake at the start, and asked where a request names no model.")
    ] = ""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    machine: HostConfig = field(default_factory=HostConfig)
    proof: Annotated[
        str,
        one_of("require", "if_seen"),
        Field(description="Freed memory has to be proved, or only where a server or NVML tells."),
    ] = "require"
    priority_header: Annotated[
        str,
        Field(description="A header with 0 to 9 that raises a request's priority; '' for none."),
    ] = ""
    paths: Annotated[
        tuple[str, ...], Field(description="Further paths to pass on: /my/route, or /my/ for all.")
    ] = ()
    run_folder: Annotated[
        str, Field(description="Records of the started servers, for the pool's own restart.")
    ] = ""

    def __post_init__(self) -> None:
        names: dict[str, str] = {}
        for key, model in self.models.items():
            for name in (key, *model.aliases):
                if name in names:
                    raise KeyFaultError(
                        "models", f"has the name {name!r} twice: {names[name]} and {key}"
                    )
                names[name] = key
        if self.default and self.default not in self.models:
            raise KeyFaultError("default", f"is {self.default!r}, which is not among the models")

    def first(self) -> str:
        """Return the model that is awake at the start."""
        return self.default or next(iter(self.models))


def read(path: Path) -> PoolConfig:
    """Read a configuration. Raises BadFileError that lists every fault of the file."""
    try:
        text = yamltext.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadFileError(f"{path} cannot be read: {error}", next_step=_CORRECT) from None
    faults = [(line, message) for line, message in text.faults]
    config = None
    if isinstance(text.data, dict):
        config, problems = declared.check(PoolConfig, text.data)
        faults += [(text.line(problem.where), problem.text) for problem in problems]
    elif not faults:
        faults.append((1, "is not a mapping of keys"))
    if config is None or faults:
        lines = "; ".join(f"{path}:{line}: {message}" for line, message in sorted(set(faults)))
        raise BadFileError(lines, next_step=_CORRECT)
    return config


_CORRECT = "correct those lines; docs/pool.md has every key"


def from_words(words: Sequence[str]) -> PoolConfig:
    """Return the configuration that the words of `pool A ... + B ...` stand for.

    Raises:
        UsageError: an option that is none, a name that is missing beside a +, or given twice.
    """
    rest = list(words)
    top: dict[str, Any] = {}
    while rest and rest[0].startswith("--"):
        name, equals, value = rest.pop(0)[2:].partition("=")
        if not equals:
            value = rest.pop(0) if rest else ""
        if name == "port" and options.is_port(value):
            top["port"] = int(value)
        elif name == "host" and value:
            top["host"] = value
        elif name == "load-seconds" and value.isdecimal() and int(value):
            top["limits"] = {"load_seconds": int(value)}
        else:
            raise UsageError(f"pool takes no --{name} {value!r}", next_step=USAGE)
    models: dict[str, Any] = {}
    for group in _split(rest):
        key = Path(group[0]).stem if group[0].endswith((".yaml", ".yml")) else group[0]
        settings, extra = serve.split(group[1:])
        # The pool has the one address; a server of it gets another.
        settings.pop("host", None)
        port = settings.pop("port", "0")
        if port != "0" and not options.is_port(port):
            raise UsageError(f"{key} is to listen on port {port!r}", next_step="port=N, 1 to 65535")
        if key in models:
            raise UsageError(
                f"{key} is named twice", next_step="name each recipe once; a copy has its own file"
            )
        models[key] = {
            "recipe": group[0],
            "settings": settings,
            "arguments": extra,
            "port": int(port),
        }
    config, problems = declared.check(PoolConfig, {**top, "models": models})
    if config is None:
        raise UsageError("; ".join(one.text for one in problems), next_step=USAGE)
    return config


def _split(words: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    for word in words:
        if word == "+":
            groups.append([])
        else:
            groups[-1].append(word)
    if not all(groups):
        raise UsageError("a recipe's name is missing beside a +", next_step=USAGE)
    return groups


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One model as it is run: what its server is started with, or where it runs.

    ``argv`` is empty for a server of ``url``, and ``arguments`` are the options of `vllm serve`,
    which may be within the text of a shell. ``served`` are the names that the server has for it,
    the first one for requests; empty where it has to be asked. ``recipe`` is None without one.
    """

    key: str
    config: ModelConfig
    url: str
    argv: tuple[str, ...] = ()
    arguments: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    served: tuple[str, ...] = ()
    gpus: frozenset[int] = frozenset()
    keeps_kv: bool = False
    sleeps: bool = True
    recipe: Recipe | None = None
    remarks: tuple[str, ...] = ()


Finder = Callable[[str], Recipe | None]


def specs(
    config: PoolConfig, find: Finder, environ: Mapping[str, str] = os.environ
) -> dict[str, Spec]:
    """Return how each model is run.

    Raises:
        UsageError: a recipe is not there, is no `vllm serve`, or two servers are on one port.
    """
    result: dict[str, Spec] = {}
    taken = {model.port for model in config.models.values() if model.port} | {config.port}
    free = iter(range(config.engine_port, 65536))
    for key, model in config.models.items():
        gpus = frozenset(model.gpus)
        if model.url:
            served = (model.model,) if model.model else ()
            result[key] = Spec(
                key=key,
                config=model,
                url=model.url,
                served=served,
                gpus=gpus or frozenset({0}),
                keeps_kv=model.keep_kv,
                sleeps=model.sleep != "never",
            )
            continue
        port = model.port or next(number for number in free if number not in taken)
        taken.add(port)
        result[key] = _started(key, model, port, find, environ)
    urls = [spec.url for spec in result.values()]
    if len(set(urls)) < len(urls) or f"http://127.0.0.1:{config.port}" in urls:
        raise UsageError(
            f"two servers, or a server and the pool, are on one address: {', '.join(urls)} and "
            f"{config.host}:{config.port}",
            next_step="give each a port of its own, or leave the ports out",
        )
    return result


def _started(
    key: str, model: ModelConfig, port: int, find: Finder, environ: Mapping[str, str]
) -> Spec:
    own = ["--host", "127.0.0.1", "--port", str(port)]
    # Settings of the pool's own environment are not those of its models.
    inherited = {name: value for name, value in environ.items() if not name.startswith("SM12X_")}
    recipe: Recipe | None = None
    remarks: tuple[str, ...] = ()
    if model.recipe:
        recipe = find(model.recipe)
        if recipe is None:
            raise UsageError(
                f"there is no recipe {model.recipe!r}", next_step="`recipes` lists them"
            )
        words = [f"{name}={value}" for name, value in model.settings.items()]
        rendered, noted = serve.prepare(recipe, [*words, "--", *model.arguments, *own], inherited)
        if rendered.serve is None:
            pool = recipe.sm12x and recipe.sm12x.pool
            step = f"run it by its name, or name {' and '.join(pool)}" if pool else "name others"
            raise UsageError(f"{recipe.key} does not run `vllm serve`", next_step=step)
        argv, env = rendered.argv, dict(rendered.env)
        arguments = options.parse(rendered.serve)
        served = _served(rendered.serve, recipe.model)
        remarks = tuple(noted)
    else:
        argv, env = (*model.command, *model.arguments, *own), {}
        rest = argv[options.server(argv) or 0 :]
        arguments = options.parse(rest)
        served = _served(rest, "")
    block = recipe.sm12x if recipe else None
    count = block.gpus if block else options.number(arguments, "tensor-parallel-size") or 1
    can_sleep = options.find(arguments, "enable-sleep-routes") is not None
    never = model.sleep == "never" or bool(
        model.sleep == "auto" and block and not block.sleep.level
    )
    if model.sleep in ("kv_cache", "level_1", "level_2") and not can_sleep:
        raise UsageError(
            f"{key} is to sleep ({model.sleep}), and its server has no sleep routes",
            next_step="give it --enable-sleep-mode --enable-sleep-routes, or sleep: stop",
        )
    gpus = model.gpus or tuple(range(count))
    keeps = options.find(arguments, "sleep-keep-kv") is not None
    if model.running == "freeze" and not keeps:
        raise UsageError(
            f"{key} is to freeze its requests, and its server does not keep the KV cache",
            next_step="give it --sleep-keep-kv, or running: drain",
        )
    return Spec(
        key=key,
        config=model,
        url=f"http://127.0.0.1:{port}",
        argv=tuple(argv),
        arguments=arguments,
        env={**env, **model.env},
        served=(model.model,) if model.model else served,
        gpus=frozenset(gpus),
        keeps_kv=keeps,
        sleeps=not never,
        recipe=recipe,
        remarks=remarks,
    )


def _served(words: Sequence[str], model: str) -> tuple[str, ...]:
    """Return the names of --served-model-name, else the model's."""
    names: list[str] = []
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option.replace("_", "-") == "--served-model-name":
            more = [value] if equals else []
            following = iter(words[at + 1 :])
            while not equals and (one := next(following, "-")) and not one.startswith("-"):
                more.append(one)
            names = more
    return tuple(names) or (
        (options.model(words) or model,) if options.model(words) or model else ()
    )


def find_in(folder: Path) -> Finder:
    """Return what finds a recipe by its name in ``folder``, or by its path."""

    def find(word: str) -> Recipe | None:
        if word.endswith((".yaml", ".yml")) and Path(word).is_file():
            return load.load(Path(word))
        path = folder / f"{word}.yaml"
        return load.load(path) if "/" not in word and path.is_file() else None

    return find
