"""What a build is told of the host's network settings, and what it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sm12x.core.errors import BadFileError
from sm12x.core.pipconfig import PipConfig
from sm12x.image.base import host_settings

ONE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
TWO = "-----BEGIN CERTIFICATE-----\nBBBB\n-----END CERTIFICATE-----"


def test_certificates_are_kept_once_and_without_comments(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text(f"# A root\n{ONE}\n# again\n{ONE}\n{TWO}\n")
    assert host_settings.certificates(bundle) == f"{ONE}\n{TWO}\n"
    assert host_settings.certificates(None) == ""


def test_a_bundle_that_is_missing_or_too_big_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadFileError, match=r"nowhere\.crt"):
        host_settings.certificates(tmp_path / "nowhere.crt")
    monkeypatch.setattr(host_settings, "SECRET_LIMIT", 10)
    (tmp_path / "ca.crt").write_text(ONE)
    with pytest.raises(BadFileError, match=r"ca\.crt"):
        host_settings.certificates(tmp_path / "ca.crt")


def test_indexes_and_proxies_pass_paths_of_the_host_do_not() -> None:
    config = PipConfig(
        indexes=("https://one.example/simple", "https://two.example/simple"),
        ca_bundle=Path("/host/ca.crt"),
        ca_from="PIP_CERT",
    )
    env = {"https_proxy": "http://proxy.example:3128", "PIP_FIND_LINKS": "/host/wheels"}
    assert host_settings.environment(env, config) == {
        "https_proxy": "http://proxy.example:3128",
        "UV_DEFAULT_INDEX": "https://one.example/simple",
        "UV_INDEX": "https://two.example/simple",
        "PIP_INDEX_URL": "https://one.example/simple",
        "PIP_EXTRA_INDEX_URL": "https://two.example/simple",
    }


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (
            "https://packages.example/tool stable contrib\n"
            "https://mirror.example/debian/ bookworm main\n"
            "https://mirror.example/debian/ bookworm-updates main\n"
            "https://mirror.example/debian-security/ bookworm-security main\n",
            ("https://mirror.example/debian/", "https://mirror.example/debian-security/"),
        ),
        ("https://mirror.example/debian bookworm main\n", ("https://mirror.example/debian", None)),
        ("", (None, None)),
    ],
)
def test_mirrors_of_the_host(targets: str, expected: tuple[str | None, str | None]) -> None:
    assert host_settings.debian_mirrors(targets) == expected


def test_the_hosts_mirror_is_used_for_the_images_release() -> None:
    text = host_settings.apt_list("https://mirror.example/debian", None, "trixie")
    assert " https://mirror.example/debian trixie main\n" in text
    assert " https://mirror.example/debian-security trixie-security main\n" in text
    conf = host_settings.apt_conf({"Acquire::Retries": "3"}, sources=True)
    assert 'Acquire::Retries "3";' in conf
    assert 'Dir::Etc::SourceList "/run/secrets/apt.list";' in conf
    assert "SourceList" not in host_settings.apt_conf({}, sources=False)


def test_proxies_of_apt_are_found() -> None:
    dump = (
        'APT::Architecture "amd64";\n'
        'Acquire::http::Proxy "http://localhost:3142";\n'
        'Acquire::http::Proxy::mirror.example "DIRECT";\n'
        'Acquire::Languages "none";\n'
    )
    assert host_settings.apt_settings(dump) == {
        "Acquire::http::Proxy": "http://localhost:3142",
        "Acquire::http::Proxy::mirror.example": "DIRECT",
    }


def test_secrets_are_private_files_and_gone_afterwards(tmp_path: Path) -> None:
    host = host_settings.HostConfig(secrets={"ca": ONE}, mirror="", host_network=False)
    with host.files(tmp_path) as paths:
        assert paths["ca"].read_text() == ONE
        assert paths["ca"].stat().st_mode & 0o077 == 0
        assert paths["ca"].parent.stat().st_mode & 0o077 == 0
    assert not paths["ca"].exists()
