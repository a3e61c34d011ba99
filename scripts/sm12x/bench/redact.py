"""What must not be shared: secrets, names of hosts and users, addresses, paths of home folders."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from typing import Self, TypeVar, get_args

from sm12x.bench import presets
from sm12x.bench.report import BenchVerdict, StepKind, StepState
from sm12x.core import files
from sm12x.core import text as texts
from sm12x.verify.report import CheckVerdict, RunVerdict, TextVerdict, When

_T = TypeVar("_T")

_HOME = re.compile(r"(?<![\w.-])(?:/var)?/(?:home|Users)/[^/\s\"':,;]+|(?<![\w./-])/root(?![\w.-])")
_ADDRESS = re.compile(
    r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)"
    r"|(?<![\w:.])[0-9A-Fa-f]*:[0-9A-Fa-f:.]+(?![\w:])"
)
# Keys of services, as those write them, and what a header carries.
_KEY = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|nvapi-[\w-]{16,}|gh[opsu]_\w{16,}|github_pat_\w{16,})"
    r"|(?<=[Bb]earer )[^\s\"'<]+"
)
# A shorter name would be a part of many words.
_LEAST = 2
_KINDS = (StepKind, StepState, BenchVerdict, CheckVerdict, RunVerdict, TextVerdict, When)
# Names that say nothing of whose they are, and words of reports.
_EVERYWHERE = {
    *("localhost", "root", "user", "vllm", "ubuntu", "nobody", "docker", "host", "spark", "gpu"),
    *("model", "server", "tools", *presets.load().presets),
    *(word for kind in _KINDS for word in get_args(kind)),
}


class Redaction:
    """Replaces what must not be shared. ``secrets``: secret -> its name; ``names``: name -> kind.

    Names are those of hosts and users, whole words in any case.
    """

    def __init__(self, secrets: Mapping[str, str], names: Mapping[str, str], home: str) -> None:
        self._secrets = dict(secrets)
        if len(home) > 1:
            self._secrets[home] = "home"
        kinds = {
            name.lower(): kind
            for name, kind in names.items()
            if len(name) >= _LEAST and name.lower() not in _EVERYWHERE
        }
        self._kinds = kinds
        longest = sorted(kinds, key=len, reverse=True)
        # Without any: what never fits.
        words = "|".join(map(re.escape, longest)) or r"(?!)"
        self._names = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE)

    @classmethod
    def here(
        cls, secrets: Mapping[str, str], hosts: Iterable[str] = (), folders: Mapping[str, str] = {}
    ) -> Self:
        """Return that of this machine and user, of ``hosts`` that are asked, and of ``folders``.

        ``folders``: path -> what it is.
        """
        mine = socket.gethostname()
        names = dict.fromkeys((mine, mine.partition(".")[0], *filter(_is_name, hosts)), "host")
        names |= dict.fromkeys((os.environ.get(v, "") for v in ("USER", "LOGNAME")), "user")
        return cls({**folders, **secrets}, names, str(files.home()))

    def text(self, text: str) -> str:
        """Return ``text`` without what must not be shared."""
        text = _KEY.sub("<secret>", texts.without(text, self._secrets))
        text = _ADDRESS.sub(_address, _HOME.sub("<home>", text))
        return self._names.sub(lambda match: f"<{self._kinds[match[0].lower()]}>", text)

    def value(self, value: _T) -> _T:
        """Return ``value`` without that in any of its texts."""
        return texts.each(value, self.text)


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def _address(match: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(match[0].rstrip(".:"))
    except ValueError:
        return match[0]
    return match[0] if address.is_loopback or address.is_unspecified else "<address>"
