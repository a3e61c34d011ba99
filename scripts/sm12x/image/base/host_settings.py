"""The host's network settings for a build: CA bundle, proxies, indexes, Debian mirror.

Users who have set these for pip, uv or apt should not have to set them again for containers. They
go into a build as secrets: files mounted for one step, in no layer, no label and no cache key.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from sm12x.core import files, pipconfig, process
from sm12x.core.errors import BadFileError

# Where distributions keep the certificates the host trusts.
_SYSTEM_CA = (
    Path("/etc/ssl/certs/ca-certificates.crt"),
    Path("/etc/pki/tls/certs/ca-bundle.crt"),
    Path("/etc/ssl/ca-bundle.pem"),
)
# BuildKit refuses a secret of more than 500 KiB.
SECRET_LIMIT = 500 * 1024
# A killed run can leave the folder behind: the owner of its parent removes it.
SECRETS_PREFIX = "secrets-"

_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
# Settings of uv that hold no path of the host.
_UV = ("UV_INSECURE_HOST", "UV_HTTP_TIMEOUT", "UV_NATIVE_TLS", "UV_CONCURRENT_DOWNLOADS")
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# How apt is asked for each of its indexes.
_TARGET = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """``secrets``: name under /run/secrets -> text. ``mirror``: the host's Debian archive, if any.

    ``host_network``: a proxy or index listens on the host's loopback, which a container on a
    network of its own does not reach.
    """

    secrets: Mapping[str, str]
    mirror: str | None
    host_network: bool

    @contextmanager
    def files(self, parent: Path) -> Iterator[dict[str, Path]]:
        """The secrets as files in ``parent`` that only this user can read, gone afterwards."""
        with TemporaryDirectory(dir=parent, prefix=SECRETS_PREFIX) as folder:
            paths = {name: Path(folder) / name for name in self.secrets}
            for name, path in paths.items():
                path.touch(mode=0o600)
                path.write_text(self.secrets[name], encoding="utf-8")
            yield paths


def collect(suite: str) -> HostConfig:
    """Read the host's settings; ``suite`` is the image's Debian release, such as "trixie".

    Raises BadFileError when a file that a setting names cannot be read.
    """
    env = os.environ
    config = pipconfig.load()
    archive, security = None, None
    if re.search(r'(?m)^ID="?debian\b', _first_text(Path("/etc/os-release"))):
        words = ("indextargets", "--format", _TARGET, "Created-By: Packages")
        archive, security = debian_mirrors(_answer("apt-get", *words))
    variables = environment(env, config)
    apt = apt_settings(_answer("apt-config", "dump"))
    sources = apt_list(archive, security, suite) if archive else ""
    user = Path(env.get("XDG_CONFIG_HOME") or files.home() / ".config")
    uv = [Path(env["UV_CONFIG_FILE"])] if env.get("UV_CONFIG_FILE") else []
    secrets = {
        "ca": certificates(_ca_bundle(config)),
        "env": "".join(f"export {key}={shlex.quote(value)}\n" for key, value in variables.items()),
        "apt.conf": apt_conf(apt, sources=bool(sources)),
        "apt.list": sources,
        "uv.toml": _first_text(*uv, user / "uv" / "uv.toml", Path("/etc/uv/uv.toml")),
        "netrc": _first_text(Path(env.get("NETRC") or files.home() / ".netrc")),
    }
    addresses = [*variables.values(), *apt.values(), archive or "", security or ""]
    return HostConfig(
        secrets={name: text for name, text in secrets.items() if text},
        mirror=archive,
        host_network=any(_on_loopback(text) for text in addresses),
    )


def environment(env: Mapping[str, str], config: pipconfig.PipConfig) -> dict[str, str]:
    """Return the variables for the steps of the build; paths of the host are left out."""
    variables = {name: env[name] for name in (*_PROXIES, *_UV) if env.get(name)}
    indexes = {
        key: value for key, value in config.uv_environment().items() if key != "SSL_CERT_FILE"
    }
    variables.update(indexes)
    variables["PIP_INDEX_URL"] = config.indexes[0]
    if config.indexes[1:]:
        variables["PIP_EXTRA_INDEX_URL"] = " ".join(config.indexes[1:])
    return variables


def certificates(bundle: Path | None) -> str:
    """The certificates of a bundle, each once and without comments, to keep the secret small.

    Raises BadFileError when the bundle cannot be read or is too big for a build secret.
    """
    if bundle is None:
        return ""
    try:
        text = bundle.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise BadFileError(
            f"the CA bundle {bundle} cannot be read: {error.strerror}",
            next_step="correct SSL_CERT_FILE, REQUESTS_CA_BUNDLE or pip's `cert` setting",
        ) from None
    small = "".join(f"{block}\n" for block in dict.fromkeys(_CERTIFICATE.findall(text)))
    if len(small) > SECRET_LIMIT:
        raise BadFileError(
            f"the CA bundle {bundle} has {len(small) // 1024} KiB of certificates, a build secret "
            f"may have {SECRET_LIMIT // 1024}",
            next_step="point SSL_CERT_FILE at a bundle with the authorities you need",
        )
    return small


def debian_mirrors(targets: str) -> tuple[str | None, str | None]:
    """The mirrors of the archive and of its security updates, from what apt lists as _TARGET.

    None stands for "as the image has it".
    """
    entries = [line.split() for line in targets.splitlines()]
    main = [(uri, suite) for uri, suite, component in entries if component == "main"]
    archive = next((uri for uri, suite in main if re.fullmatch(r"[a-z]+", suite)), None)
    security = next((uri for uri, suite in main if suite.endswith("-security")), None)
    return archive, security


def apt_settings(dump: str) -> dict[str, str]:
    """Proxies, timeouts and retries from the output of `apt-config dump`."""
    pattern = r'(?m)^(Acquire::(?:https?::(?:Proxy|Timeout)[^ ]*|Retries)) "([^"]+)";$'
    return dict(re.findall(pattern, dump))


def apt_conf(settings: Mapping[str, str], *, sources: bool) -> str:
    """apt's configuration for the steps of the build; with ``sources`` they replace the image's."""
    lines = [f'{key} "{value}";' for key, value in settings.items()]
    # The steps have the certificates as a secret; the base image has none of its own.
    lines.append('Acquire::https::CaInfo "/run/secrets/ca";')
    if sources:
        lines.append('Dir::Etc::SourceList "/run/secrets/apt.list";')
        lines.append('Dir::Etc::SourceParts "/dev/null";')
    return "".join(f"{line}\n" for line in lines)


def apt_list(archive: str, security: str | None, suite: str) -> str:
    """apt's sources for ``suite`` from the host's mirrors."""
    # Where Debian, and complete mirrors of it, keep them.
    security = security or archive.rstrip("/") + "-security"
    places = (archive, suite), (archive, f"{suite}-updates"), (security, f"{suite}-security")
    return "".join(f"deb [signed-by={_KEYRING}] {uri} {name} main\n" for uri, name in places)


def _on_loopback(text: str) -> bool:
    return any(
        urlsplit(word).hostname in ("localhost", "127.0.0.1", "::1")
        for word in text.split()
        if "://" in word
    )


def _ca_bundle(config: pipconfig.PipConfig) -> Path | None:
    if config.ca_bundle is not None and not config.ca_bundle.is_dir():
        return config.ca_bundle
    return next((path for path in _SYSTEM_CA if path.is_file()), None)


def _first_text(*paths: Path) -> str:
    """Return the text of the first of ``paths`` that is there. Raises BadFileError."""
    path = next((path for path in paths if path.is_file()), None)
    try:
        return path.read_text(encoding="utf-8") if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(
            f"{path} cannot be read: {error}", next_step="correct or remove that file"
        ) from None


def _answer(program: str, *words: str) -> str:
    """The output of a program of apt, "" where there is none."""
    if process.which(program) is None:
        return ""
    return process.run([program, *words], check=False).stdout
