"""The files of a project, listed from an index that is made here and from a folder."""

from __future__ import annotations

import datetime
import io
from pathlib import Path
from typing import Any

import pytest
import requests
from urllib3 import HTTPResponse

from sm12x.core import download, pipconfig
from sm12x.core.errors import FetchError
from sm12x_dev import listing
from sm12x_dev.listing import ListedFile

NAMES = ("vllm-9.9.0-cp38-abi3-manylinux_2_28_x86_64.whl", "vllm-9.9.0.tar.gz")
DAY = datetime.datetime(2027, 3, 4, 23, 30, tzinfo=datetime.UTC)


def _sdist(version: str = "9.9.0", uploaded: datetime.datetime | None = DAY) -> ListedFile:
    return ListedFile(
        name=f"vllm-{version}.tar.gz",
        version=version,
        kind="sdist",
        sha256="a" * 64,
        uploaded=uploaded,
    )


class _Index(requests.adapters.BaseAdapter):
    def __init__(self, body: str, kind: str, status: int = 200) -> None:
        super().__init__()
        self.reply = (body, kind, status)

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> Any:
        body, kind, status = self.reply
        response = requests.Response()
        response.status_code = status
        response.headers["Content-Type"] = kind
        response.raw = HTTPResponse(io.BytesIO(body.encode()), preload_content=False)
        response.url = request.url or ""
        response.request = request
        return response

    def close(self) -> None:
        pass


def _index(monkeypatch: pytest.MonkeyPatch, adapter: _Index) -> None:
    def session(config: pipconfig.PipConfig) -> requests.Session:
        web = requests.Session()
        web.mount("https://", adapter)
        return web

    config = pipconfig.load()
    monkeypatch.setattr(download, "session", session)
    changed = {"indexes": ("https://index.test/simple/",), "ca_bundle": None}
    monkeypatch.setattr(
        pipconfig, "load", lambda: pipconfig.PipConfig(**{**vars(config), **changed})
    )


HTML = (
    '<!DOCTYPE html><html><body><a href="../../f/{name}#sha256={sha}" '
    'data-requires-python="&gt;=3.10">{name}</a></body></html>'
)
JSON = (
    '{{"meta":{{"api-version":"1.1"}},"name":"vllm","versions":["9.9.0"],"files":[{{"filename":'
    '"{name}","url":"f/{name}","hashes":{{"sha256":"{sha}"}},"upload-time":"{time}",'
    '"requires-python":">=3.10","size":1}}]}}'
)


@pytest.mark.parametrize(
    ("body", "kind", "uploaded"),
    [(HTML, "text/html", None), (JSON, "application/vnd.pypi.simple.v1+json", DAY)],
)
def test_an_index_is_listed_in_either_form(
    body: str, kind: str, uploaded: datetime.datetime | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = body.format(name=NAMES[1], sha="a" * 64, time="2027-03-04T23:30:00Z")
    _index(monkeypatch, _Index(text, kind))
    (file,) = listing.of_index("vllm")
    assert file == _sdist(uploaded=uploaded)
    assert listing.releases((file, _sdist("9.10.0rc1"))) == ["9.9.0"]


@pytest.mark.parametrize(
    "adapter",
    [
        _Index("", "text/html", 404),
        _Index("", "text/html", 403),
        _Index("%PDF", "application/pdf"),
    ],
)
def test_an_index_that_does_not_list_is_an_error(
    adapter: _Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    _index(monkeypatch, adapter)
    with pytest.raises(FetchError, match=r"index\.test"):
        listing.of_index("vllm")


def test_a_folder_is_listed_with_the_hashes_of_what_is_in_it(tmp_path: Path) -> None:
    for name in (*NAMES, "other-1.0.tar.gz", "note.txt"):
        (tmp_path / name).write_text(name)
    listed = listing.of_folder("vllm", tmp_path)
    assert [(file.name, file.version, file.uploaded) for file in listed] == [
        (name, "9.9.0", None) for name in NAMES
    ]
    assert len(listed[0].sha256) == 64
