"""Where the user's package clients get packages from: index addresses and the CA bundle.

Companies put a mirror and a CA of their own into pip's or uv's settings; users should not have to
repeat these settings here. Environment variables win over pip's files, as in pip.
"""

from __future__ import annotations

import configparser
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from sm12x.core import files
from sm12x.core.errors import BadFileError, ToolMissingError

# That of pypi_simple, a package that the environment of the witnesses does not have.
PYPI_SIMPLE_ENDPOINT = "https://pypi.org/simple/"
_SYSTEM_FILE = Path("/etc/pip.conf")
# requests itself reads the first two, and lets them win over what a session is told: so must we.
_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT", "SSL_CERT_FILE")


@dataclass(frozen=True, kw_only=True)
class PipConfig:
    """``indexes`` in the order to ask them; ``ca_bundle`` is None for the built-in one.

    ``ca_from`` names the variable or file that ``ca_bundle`` was read from, for error messages.
    """

    indexes: tuple[str, ...]
    ca_bundle: Path | None
    ca_from: str

    def uv_environment(self) -> dict[str, str]:
        """Return variables that give uv, which does not read pip's files, the same settings."""
        variables: dict[str, str] = {}
        # Without such settings uv's own file may still have some.
        if self.indexes[0] != PYPI_SIMPLE_ENDPOINT:
            variables["UV_DEFAULT_INDEX"] = self.indexes[0]
        if len(self.indexes) > 1:
            variables["UV_INDEX"] = " ".join(self.indexes[1:])
        if self.ca_bundle is not None:
            variables["SSL_CERT_FILE"] = str(self.ca_bundle)
        return variables


def load(environ: Mapping[str, str] | None = None) -> PipConfig:
    """Read the environment (default: ours), then pip's configuration files.

    Raises BadFileError if a configuration file cannot be parsed.
    """
    env = os.environ if environ is None else environ
    files = _pip_files(env)

    def first(variables: tuple[str, ...], option: str) -> str:
        for variable in variables:
            if env.get(variable):
                return env[variable]
        return files.get(option, ("", ""))[0]

    default = first(("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"), "index-url")
    extra = first(("UV_INDEX", "UV_EXTRA_INDEX_URL", "PIP_EXTRA_INDEX_URL"), "extra-index-url")
    # uv allows `name=address`.
    words = [re.sub(r"^[\w.-]+=(?=\w+://)", "", word) for word in extra.split()]
    main = re.sub(r"^[\w.-]+=(?=\w+://)", "", default.strip()) or PYPI_SIMPLE_ENDPOINT
    ca, ca_from = next(
        ((env[name], name) for name in _CA_VARIABLES if env.get(name)), files.get("cert", ("", ""))
    )
    return PipConfig(
        indexes=tuple(dict.fromkeys([main, *words])),
        ca_bundle=Path(ca).expanduser() if ca else None,
        ca_from=ca_from,
    )


def without_credentials(address: str) -> str:
    """Return ``address`` fit for a message: no user name, password, query or fragment."""
    parts = urlsplit(address)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _pip_files(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Map option to (value, file) from pip's files; a later file wins over an earlier one."""
    home = Path(env.get("HOME") or files.home())
    named = env.get("PIP_CONFIG_FILE", "")
    if named == os.devnull:
        # pip's way to say: no configuration file at all.
        return {}
    shared = [
        Path(folder) for folder in env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":") if folder
    ]
    paths = [
        *(folder / "pip" / "pip.conf" for folder in reversed(shared)),
        _SYSTEM_FILE,
        home / ".pip" / "pip.conf",
        Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf",
        Path(sys.prefix) / "pip.conf",
        *([Path(named)] if named else []),
    ]
    options: dict[str, tuple[str, str]] = {}
    for path in paths:
        if not path.is_file():
            continue
        # pip does not interpolate, and a password may well contain a percent sign.
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
        except (OSError, UnicodeDecodeError, configparser.Error) as error:
            reason = " ".join(str(error).split())
            raise BadFileError(
                f"{path} cannot be read: {reason}",
                next_step="correct that file, or set PIP_CONFIG_FILE=/dev/null to ignore it",
            ) from None
        for section in ("global", "install", "download"):
            if parser.has_section(section):
                for option, value in parser.items(section):
                    if value:
                        options[option.replace("_", "-")] = (value, str(path))
    return options


def find_uv() -> str:
    """Return the path of the uv beside this Python. Raises ToolMissingError."""
    # A package of the build machine alone.
    import uv

    try:
        return uv.find_uv_bin()
    except FileNotFoundError:
        raise ToolMissingError(
            "uv is not installed beside this Python", next_step="install it there: pip install uv"
        ) from None
