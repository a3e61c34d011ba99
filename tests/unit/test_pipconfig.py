"""Index addresses and CA: what wins over what."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pypi_simple import PYPI_SIMPLE_ENDPOINT

from sm12x.core import pipconfig
from sm12x.core.errors import BadFileError


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A home of its own, with none of this machine's files."""
    monkeypatch.setattr(pipconfig, "_SYSTEM_FILE", tmp_path / "none")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path / "xdg")}


def write(env: dict[str, str], text: str) -> Path:
    path = Path(env["HOME"]) / "named.conf"
    path.write_text(text)
    env["PIP_CONFIG_FILE"] = str(path)
    return path


def test_nothing_set_means_the_public_index(env: dict[str, str]) -> None:
    config = pipconfig.load(env | {"PIP_CONFIG_FILE": "/dev/null"})
    assert config.indexes == (PYPI_SIMPLE_ENDPOINT,)
    assert config.ca_bundle is None
    assert config.uv_environment() == {}


def test_pip_files_are_read(env: dict[str, str]) -> None:
    path = write(
        env,
        "[global]\nindex_url = https://u:100%25@mirror.test/simple\ncert = /etc/own.pem\n"
        "[install]\nextra-index-url =\n  https://a.test/simple\n  https://b.test/simple\n",
    )
    config = pipconfig.load(env)
    assert config.indexes == (
        "https://u:100%25@mirror.test/simple",
        "https://a.test/simple",
        "https://b.test/simple",
    )
    assert config.ca_bundle == Path("/etc/own.pem")
    assert config.ca_from == str(path)
    assert config.uv_environment() == {
        "UV_DEFAULT_INDEX": "https://u:100%25@mirror.test/simple",
        "UV_INDEX": "https://a.test/simple https://b.test/simple",
        "SSL_CERT_FILE": "/etc/own.pem",
    }


def test_variables_win_over_files(env: dict[str, str]) -> None:
    write(env, "[global]\nindex-url = https://file.test/simple\ncert = /file.pem\n")
    env |= {"PIP_INDEX_URL": "https://pip.test/simple", "PIP_CERT": "/pip.pem"}
    assert pipconfig.load(env).indexes == ("https://pip.test/simple",)
    assert pipconfig.load(env).ca_bundle == Path("/pip.pem")
    env |= {"UV_DEFAULT_INDEX": "own=https://uv.test/simple", "REQUESTS_CA_BUNDLE": "/r.pem"}
    config = pipconfig.load(env)
    assert config.indexes == ("https://uv.test/simple",)
    assert (config.ca_bundle, config.ca_from) == (Path("/r.pem"), "REQUESTS_CA_BUNDLE")


def test_the_users_own_file_wins_over_the_systems(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    system = Path(env["HOME"]) / "system.conf"
    system.write_text("[global]\nindex-url = https://s.test/simple\ncert = /s.pem\n")
    monkeypatch.setattr(pipconfig, "_SYSTEM_FILE", system)
    own = Path(env["HOME"]) / ".config" / "pip" / "pip.conf"
    own.parent.mkdir(parents=True)
    own.write_text("[global]\nindex-url = https://own.test/simple\n")
    config = pipconfig.load(env)
    assert config.indexes == ("https://own.test/simple",)
    assert config.ca_bundle == Path("/s.pem")
    assert pipconfig.load(env | {"PIP_CONFIG_FILE": "/dev/null"}).ca_bundle is None


def test_a_broken_file_is_named(env: dict[str, str]) -> None:
    path = write(env, "index-url = no section\n")
    with pytest.raises(BadFileError, match=str(path)) as caught:
        pipconfig.load(env)
    assert "\n" not in str(caught.value)


def test_no_credentials_in_messages() -> None:
    shown = pipconfig.without_credentials("https://u:p@h.test:8443/simple/x?token=1#f")
    assert shown == "https://h.test:8443/simple/x"
