"""Fetching: against a session whose replies are made here."""

from __future__ import annotations

import errno
import hashlib
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import requests
import urllib3
from requests.adapters import BaseAdapter
from urllib3.util import Retry

from sm12x.core import download, index, pipconfig
from sm12x.core.errors import (
    BadFileError,
    FetchError,
    HashMismatchError,
    NoSpaceError,
)

NAME = "pkg-1.0.tar.gz"
BODY = bytes(range(256)) * 40
SHA = hashlib.sha256(BODY).hexdigest()
HOST = "https://index.test"

Send = Callable[[requests.PreparedRequest], "Reply | Exception"]


class Reply:
    """Status, headers and body; ``cut`` drops the end of the body that the headers promise."""

    def __init__(
        self, status: int = 200, body: bytes = b"", *, cut: int = 0, **headers: str
    ) -> None:
        self.status = status
        self.body = body[: len(body) - cut]
        self.headers = {"Content-Length": str(len(body))} | {
            key.replace("_", "-"): value for key, value in headers.items()
        }


class Adapter(BaseAdapter):
    def __init__(self, answer: Send) -> None:
        super().__init__()
        self.answer = answer
        self.seen: list[requests.PreparedRequest] = []

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(request)
        reply = self.answer(request)
        if isinstance(reply, Exception):
            raise reply
        response = requests.Response()
        response.status_code = reply.status
        response.reason = {404: "Not Found", 403: "Forbidden"}.get(reply.status, "")
        response.headers.update(reply.headers)
        response.url = str(request.url)
        response.request = request
        response.raw = urllib3.HTTPResponse(
            body=io.BytesIO(reply.body),
            headers=reply.headers,
            status=reply.status,
            preload_content=False,
            request_method="GET",
        )
        return response

    def close(self) -> None:
        pass


def page(*, sha: str = SHA, name: str = NAME) -> Reply:
    text = f'<html><a href="../../files/{name}#sha256={sha}">{name}</a></html>'
    return Reply(200, text.encode(), Content_Type="text/html")


def serving(file: Send, listing: Callable[[], Reply] = page) -> Send:
    def answer(request: requests.PreparedRequest) -> Reply | Exception:
        return listing() if "/simple/" in str(request.url) else file(request)

    return answer


def ranged(request: requests.PreparedRequest, *, cut: int = 0) -> Reply:
    asked = request.headers.get("Range")
    if not asked:
        return Reply(200, BODY, cut=cut)
    start = int(asked.removeprefix("bytes=").removesuffix("-"))
    if start >= len(BODY):
        return Reply(416, Content_Range=f"bytes */{len(BODY)}")
    whole = f"bytes {start}-{len(BODY) - 1}/{len(BODY)}"
    return Reply(206, BODY[start:], cut=min(cut, len(BODY) - start - 1), Content_Range=whole)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pipconfig.PipConfig(indexes=(f"{HOST}/simple/",), ca_bundle=None, ca_from="")
    monkeypatch.setattr(pipconfig, "load", lambda: config)
    monkeypatch.setattr(download, "_RETRY", Retry(total=3, backoff_factor=0))


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Callable[[Send], Adapter]:
    def use(answer: Send) -> Adapter:
        adapter = Adapter(answer)

        def session(config: pipconfig.PipConfig) -> requests.Session:
            made = requests.Session()
            made.mount("https://", adapter)
            return made

        monkeypatch.setattr(download, "session", session)
        return adapter

    return use


def fetch(cache: Path, **more: Any) -> Path:
    return index.fetch("Pkg", NAME, SHA, cache=cache, **more)


def part_of(cache: Path) -> Path:
    path = cache / "files" / SHA / f"{NAME}.part"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_a_file_is_fetched_once_and_verified_each_time(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    adapter = web(serving(ranged))
    moved: list[tuple[int, int | None]] = []

    path = fetch(tmp_path, on_progress=lambda done, total: moved.append((done, total)))

    assert path.name == NAME
    assert path.read_bytes() == BODY
    assert moved[0] == (0, len(BODY))
    assert moved[-1] == (len(BODY), len(BODY))
    assert [str(seen.url) for seen in adapter.seen] == [
        f"{HOST}/simple/pkg/",
        f"{HOST}/files/{NAME}",
    ]
    assert fetch(tmp_path) == path
    assert len(adapter.seen) == 2
    assert [entry.name for entry in path.parent.iterdir()] == [NAME]


def test_a_cached_file_that_went_bad_is_deleted_and_said_so(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    web(serving(ranged))
    path = fetch(tmp_path)
    path.write_bytes(b"rot")

    with pytest.raises(HashMismatchError):
        fetch(tmp_path)
    assert not path.exists()
    assert fetch(tmp_path).read_bytes() == BODY


def test_what_is_there_is_not_fetched_again(tmp_path: Path, web: Callable[[Send], Adapter]) -> None:
    adapter = web(serving(ranged))
    part_of(tmp_path).write_bytes(BODY[:1000])
    assert fetch(tmp_path).read_bytes() == BODY
    assert adapter.seen[-1].headers["Range"] == "bytes=1000-"


@pytest.mark.parametrize("left", [BODY, BODY + b"more"])
def test_a_part_that_is_whole_or_too_long(
    tmp_path: Path, web: Callable[[Send], Adapter], left: bytes
) -> None:
    web(serving(ranged))
    part_of(tmp_path).write_bytes(left)
    assert fetch(tmp_path).read_bytes() == BODY


def test_a_server_without_ranges_starts_over(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    web(serving(lambda request: Reply(200, BODY)))
    part_of(tmp_path).write_bytes(b"x" * 500)
    assert fetch(tmp_path).read_bytes() == BODY


@pytest.mark.parametrize("damage", [b"x" * 500, b"x" * len(BODY)])
def test_a_part_of_another_file_is_thrown_away_by_itself(
    tmp_path: Path, web: Callable[[Send], Adapter], damage: bytes
) -> None:
    web(serving(ranged))
    part_of(tmp_path).write_bytes(damage)
    assert fetch(tmp_path).read_bytes() == BODY


def test_a_server_that_goes_on_elsewhere_starts_over(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    def elsewhere(request: requests.PreparedRequest) -> Reply:
        if "Range" not in request.headers:
            return Reply(200, BODY)
        return Reply(206, BODY[500:], Content_Range=f"bytes 500-{len(BODY) - 1}/{len(BODY)}")

    web(serving(elsewhere))
    part_of(tmp_path).write_bytes(BODY[:1000])
    assert fetch(tmp_path).read_bytes() == BODY


def test_a_connection_that_keeps_breaking_but_moves_on_gets_there(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    step = len(BODY) // 8

    def cut(request: requests.PreparedRequest) -> Reply:
        reply = ranged(request)
        promised = reply.body
        return Reply(
            reply.status, promised, cut=max(0, len(promised) - step), **_underscored(reply.headers)
        )

    adapter = web(serving(cut))
    assert fetch(tmp_path).read_bytes() == BODY
    assert len(adapter.seen) == 1 + 8


def _underscored(headers: dict[str, str]) -> dict[str, str]:
    return {key.replace("-", "_"): value for key, value in headers.items()}


def test_a_connection_that_breaks_at_one_place_is_given_up(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    web(serving(lambda request: Reply(200, BODY, cut=100)))
    with pytest.raises(FetchError, match=f"{len(BODY) - 100} bytes"):
        fetch(tmp_path)
    assert part_of(tmp_path).stat().st_size == len(BODY) - 100


def test_wrong_content_is_deleted_with_both_hashes_named(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    wrong = b"y" * len(BODY)
    web(serving(lambda request: Reply(200, wrong)))
    with pytest.raises(HashMismatchError) as caught:
        fetch(tmp_path)
    assert SHA in str(caught.value)
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert list(part_of(tmp_path).parent.iterdir()) == []


def test_an_index_with_another_hash_is_not_even_asked_for_the_file(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    adapter = web(serving(ranged, lambda: page(sha="0" * 64)))
    with pytest.raises(HashMismatchError):
        fetch(tmp_path)
    assert len(adapter.seen) == 1


@pytest.mark.parametrize(
    ("listing", "fact"),
    [
        (lambda: Reply(404), "Pkg"),
        (lambda: page(name="pkg-2.0.tar.gz"), "1 files of Pkg"),
        (lambda: Reply(403), "403 Forbidden"),
        (lambda: Reply(200, b"<svg/>", Content_Type="image/svg"), HOST),
        (lambda: Reply(200, b"{", Content_Type="application/vnd.pypi.simple.v1+json"), HOST),
    ],
)
def test_what_an_index_can_lack(
    tmp_path: Path, web: Callable[[Send], Adapter], listing: Callable[[], Reply], fact: str
) -> None:
    web(serving(ranged, listing))
    with pytest.raises(FetchError, match=fact) as caught:
        fetch(tmp_path)
    assert "\n" not in str(caught.value)
    assert not part_of(tmp_path).exists()


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (requests.ConnectionError("Name or service not known"), "proxy"),
        (requests.Timeout("timed out"), "proxy"),
        (requests.exceptions.SSLError("self-signed"), "REQUESTS_CA_BUNDLE"),
    ],
)
def test_no_network(
    tmp_path: Path, web: Callable[[Send], Adapter], error: Exception, step: str
) -> None:
    web(lambda request: error)
    with pytest.raises(FetchError, match=str(error)) as caught:
        fetch(tmp_path)
    assert step in caught.value.next_step


def test_the_second_index_is_asked_when_the_first_has_no_such_project(
    tmp_path: Path, web: Callable[[Send], Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pipconfig.PipConfig(
        indexes=("https://user:secret@first.test/simple/", f"{HOST}/simple/"),
        ca_bundle=None,
        ca_from="",
    )
    monkeypatch.setattr(pipconfig, "load", lambda: config)

    def answer(request: requests.PreparedRequest) -> Reply | Exception:
        return Reply(404) if "first.test" in str(request.url) else serving(ranged)(request)

    web(answer)
    assert fetch(tmp_path).read_bytes() == BODY

    web(lambda request: Reply(404))
    with pytest.raises(FetchError) as caught:
        index.fetch("Pkg", "other", SHA, cache=tmp_path)
    assert "secret" not in str(caught.value)


def test_credentials_follow_to_files_of_the_same_host_only(
    tmp_path: Path, web: Callable[[Send], Adapter], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pipconfig.PipConfig(
        indexes=("https://user:p%40ss@index.test/simple/",), ca_bundle=None, ca_from=""
    )
    monkeypatch.setattr(pipconfig, "load", lambda: config)
    for host, sent in (("index.test", True), ("files.test", False)):
        link = f'<a href="https://{host}/files/{NAME}">{NAME}</a>'.encode()
        listing = Reply(200, link, Content_Type="text/html")
        adapter = web(serving(ranged, partial(_same, listing)))
        fetch(tmp_path / host)
        assert ("Authorization" in adapter.seen[-1].headers) is sent


def _same(reply: Reply) -> Reply:
    return reply


def test_find_links_opens_no_connection(tmp_path: Path) -> None:
    # The guard in conftest.py raises at any attempt, and no session has been replaced here.
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / NAME).write_bytes(BODY)
    path = fetch(tmp_path / "cache", find_links=folder)
    assert path.read_bytes() == BODY

    (folder / NAME).write_bytes(b"another")
    with pytest.raises(HashMismatchError):
        fetch(tmp_path / "second", find_links=folder)
    assert (folder / NAME).exists()
    (folder / NAME).unlink()
    with pytest.raises(FetchError, match=str(folder)):
        fetch(tmp_path / "second", find_links=folder)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full(
    tmp_path: Path,
    web: Callable[[Send], Adapter],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    web(serving(ranged))

    def full(*args: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    part_of(tmp_path).write_bytes(BODY[:10])
    monkeypatch.setattr(download, "_receive", full)
    with pytest.raises(NoSpaceError, match=SHA):
        fetch(tmp_path)
    assert part_of(tmp_path).read_bytes() == BODY[:10]


def test_too_little_space_is_said_before_the_transfer(
    tmp_path: Path, web: Callable[[Send], Adapter]
) -> None:
    huge = (
        '{"meta": {"api-version": "1.1"}, "name": "pkg", "versions": [], "files": [{"filename": '
        f'"{NAME}", "url": "../../files/{NAME}", "hashes": {{"sha256": "{SHA}"}}, '
        '"size": 1000000000000000}]}'
    ).encode()
    adapter = web(
        serving(
            ranged, lambda: Reply(200, huge, Content_Type="application/vnd.pypi.simple.v1+json")
        )
    )
    with pytest.raises(NoSpaceError, match=NAME):
        fetch(tmp_path)
    assert len(adapter.seen) == 1


def test_a_ca_bundle_that_is_not_there_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = pipconfig.PipConfig(
        indexes=(f"{HOST}/simple/",), ca_bundle=tmp_path / "no.pem", ca_from="PIP_CERT"
    )
    monkeypatch.setattr(pipconfig, "load", lambda: config)
    with pytest.raises(BadFileError, match="PIP_CERT"):
        fetch(tmp_path)
