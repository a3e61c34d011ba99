"""Reads the options of a `vllm serve` command line without vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import PurePosixPath

# The variables of the keys that a server asks its clients for: of all routes, and of the sleep
# routes alone; the latter is good for all routes too.
KEY, SLEEP_KEY = "VLLM_API_KEY", "VLLM_SLEEP_API_KEY"
# That of the key with which a pool is steered.
POOL_KEY = "SM12X_POOL_ADMIN_KEY"
# The short forms that recipes use.
_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-n": "nnodes",
    "-r": "node-rank",
    "-q": "quantization",
}
# human_readable_int of vLLM's utils/argparse_utils.py.
_FACTORS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kmgt", start=1)},
    **{unit: 1024**power for power, unit in enumerate("KMGT", start=1)},
}
# `vllm serve`, and `python -m vllm.entrypoints.cli.main serve`.
_PROGRAMS = ("vllm", "vllm.entrypoints.cli.main")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TRUE = ("1", "true", "yes")


def parse(words: Sequence[str]) -> dict[str, str]:
    """Parse long options, the last of each; "" for a flag. vLLM takes `_` for `-` in names."""
    values: dict[str, str] = {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in _SHORT:
            name = f"--{_SHORT[name]}"
        if not name.startswith("--"):
            continue
        following = words[index + 1] if index + 1 < len(words) else ""
        if not equals:
            value = "" if following.startswith("-") and not _negative(following) else following
        values[name[2:].replace("_", "-")] = value
    return values


def find(given: Mapping[str, str], name: str) -> str | None:
    """The value of an option of ``parse``, also where it is cut short, as vLLM's parser takes it.

    None where it is not given.
    """
    short = (key for key in given if len(key) > 2 and name.startswith(key))
    return given.get(name, next((given[key] for key in short), None))


def _negative(word: str) -> bool:
    return word[1:2].isdigit()


def server(words: Sequence[str]) -> int | None:
    """Where the arguments of vLLM's server begin in a command line, None where it starts none."""
    for at, word in enumerate(words):
        if word == "vllm.entrypoints.openai.api_server":
            return at + 1
        if list(words[at + 1 : at + 2]) == ["serve"] and PurePosixPath(word).name in _PROGRAMS:
            return at + 2
    return None


def model(words: Sequence[str]) -> str:
    """The model a command serves, "" when it names none."""
    if words and not words[0].startswith("-"):
        return words[0]
    return parse(words).get("model", "")


def number(options: Mapping[str, str], name: str, default: int = 1) -> int | None:
    """A whole number among the options; None for what is none, such as `auto`."""
    text = options.get(name, "")
    if not text:
        return default
    return integer(text)


def integer(text: str) -> int | None:
    """Parse an integer as vLLM does, `32768`, `32k` (1000) or `32K` (1024); None for others."""
    match = re.fullmatch(r"([0-9]{1,18})([kmgtKMGT]?)", text) or re.fullmatch(
        r"([0-9]{1,18}\.[0-9]{1,9})([kmgt])", text
    )
    return int(Decimal(match[1]) * _FACTORS[match[2]]) if match else None


def is_port(text: str) -> bool:
    """Whether a setting is the number of a port, from 1 to 65535."""
    return bool(re.fullmatch(r"[0-9]{1,5}", text)) and 0 < int(text) < 1 << 16


def is_public(host: str) -> bool:
    """Whether other machines can reach a server that listens on ``host``.

    vLLM listens on every address when it is given none.
    """
    return host not in _LOOPBACK


def trusts_code(given: Mapping[str, str]) -> bool:
    """Whether a server with these options runs Python files of a model's repository."""
    return find(given, "trust-remote-code") is not None


def is_keyless(given: Mapping[str, str], env: Mapping[str, str]) -> bool:
    """Whether other machines reach a server with these options, and need no key for it."""
    key = find(given, "api-key") or env.get(KEY)
    return is_public(find(given, "host") or "") and not key


def is_true(text: str) -> bool:
    """How vLLM reads a variable that is a switch."""
    return text.strip().lower() in _TRUE
