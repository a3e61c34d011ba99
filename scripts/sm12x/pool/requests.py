"""What a request says of itself: which path, which model. Pure functions of bytes and text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote

# Paths that a server answers for the pool's clients. Everything else, and so everything that steers
# a server (sleep, wake-up, profiling, weights, its own health), is not passed on.
_PREFIXES = ("/v1/", "/v2/", "/inference/v1/", "/cohere/")
_EXACT = frozenset(
    {
        *("/tokenize", "/detokenize", "/tokenizer_info", "/pooling", "/classify", "/score"),
        *("/rerank", "/generative_scoring", "/invocations", "/version"),
    }
)
# These change a server for all of its users.
_STEERING = re.compile(r"/v1/(un)?load_lora_adapter/?")
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s"{}\[\],:]+')
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"(resp_[A-Za-z0-9_-]{1,128})"')
_FIELD = re.compile(rb'name="?model"?[\s;]', re.IGNORECASE)
# Bytes of the headers of a part, and of a model's name.
_PART, _NAME = 4096, 512


@dataclass(frozen=True, kw_only=True)
class Named:
    """The model in a body: its name, and where the bytes of the value are."""

    name: str
    start: int
    end: int


def is_passed_on(path: str, further: tuple[str, ...] = ()) -> bool:
    """Tell whether requests of ``path``, as it came, go to a server.

    A path that another reader could take for another one (`..`, `//`, an encoded slash) does not.
    """
    plain = unquote(path)
    if any(part in ("", ".", "..") for part in plain.split("/")[1:-1]) or "\\" in plain:
        return False
    if plain.endswith(("/..", "/.")) or "%2f" in path.lower() or "%00" in path or "%25" in path:
        return False
    if _STEERING.fullmatch(plain):
        return False
    own = any(plain == one or (one.endswith("/") and plain.startswith(one)) for one in further)
    return own or plain.rstrip("/") in _EXACT or plain.startswith(_PREFIXES)


def in_json(body: bytes) -> Named | None:
    """Return the model at the top level of a JSON object, also of one that is not all there.

    None where it is not there, or not there yet.
    """
    depth, key, is_value = 0, b"", False
    for token in _TOKENS.finditer(body):
        word = token[0]
        if word in (b"{", b"["):
            if depth == 0 and word == b"[":
                return None
            depth, is_value = depth + 1, False
        elif word in (b"}", b"]"):
            depth -= 1
            if depth <= 0:
                return None
        elif depth != 1:
            continue
        elif word == b":":
            is_value = True
        elif word == b",":
            is_value = False
        elif not is_value:
            key = word
        elif _text(key) == "model":
            name = _text(word)
            # A number, or the beginning of a text whose end has not come.
            if name is None:
                return None
            return Named(name=name, start=token.start(), end=token.end())
    return None


def _text(token: bytes) -> str | None:
    """Return the text of a JSON string; None of anything else."""
    try:
        value = json.loads(token)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def in_form(body: bytes, content_type: str) -> Named | None:
    """Return the field ``model`` of a multipart form, also of one that is not all there."""
    match = re.search(r'boundary="?([^";,\s]{1,200})', content_type, re.IGNORECASE)
    if not match:
        return None
    boundary = b"--" + match[1].encode("latin-1", "replace")
    at = body.find(boundary)
    while at >= 0:
        start = at + len(boundary)
        head = body.find(b"\r\n\r\n", start, start + _PART)
        if head < 0:
            return None
        end = body.find(b"\r\n" + boundary, head + 4)
        headers = body[start:head].lower() + b"\r\n"
        if _FIELD.search(headers) and b"filename" not in headers:
            if end < 0 or end - head > _NAME:
                return None
            name = body[head + 4 : end].decode(errors="replace")
            return Named(name=name, start=head + 4, end=end)
        at = -1 if end < 0 else end + 2
    return None


def in_body(body: bytes, content_type: str) -> Named | None:
    """Return the model that a body names, by its type; JSON where none is given."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return in_form(body, content_type)
    if kind in ("", "text/plain") or "json" in kind:
        return in_json(body)
    return None


def renamed(body: bytes, named: Named, name: str, content_type: str) -> bytes:
    """Return ``body`` with the server's own name of the model in the place of an alias."""
    form = content_type.partition(";")[0].strip().lower() == "multipart/form-data"
    value = name.encode() if form else json.dumps(name).encode()
    return body[: named.start] + value + body[named.end :]


def response_id(chunk: bytes) -> str:
    """Return the id of a stored response in the beginning of an answer; "" without one."""
    match = _RESPONSE_ID.search(chunk[:4096])
    return match[1].decode() if match else ""


def of_response(path: str) -> str:
    """Return the id of `/v1/responses/ID` and `/v1/responses/ID/cancel`; "" of other paths."""
    match = re.fullmatch(r"/v1/responses/(resp_[A-Za-z0-9_-]{1,128})(/cancel|/input_items)?", path)
    return match[1] if match else ""


def priority(text: str) -> int:
    """Return a priority, 0 to 9; 0 for what is none."""
    return int(text) if re.fullmatch(r"[0-9]", text) else 0


def error_body(path: str, status: int, message: str, code: str) -> bytes:
    """Return an error in the form that clients of the path expect: OpenAI's, or Anthropic's."""
    kinds: Mapping[int, tuple[str, str]] = {
        400: ("invalid_request_error", "invalid_request_error"),
        401: ("authentication_error", "authentication_error"),
        403: ("permission_error", "permission_error"),
        404: ("NotFoundError", "not_found_error"),
        413: ("invalid_request_error", "request_too_large"),
        429: ("rate_limit_error", "rate_limit_error"),
        503: ("service_unavailable_error", "overloaded_error"),
    }
    openai, anthropic = kinds.get(status, ("api_error", "api_error"))
    if path.startswith("/v1/messages"):
        body: dict[str, object] = {
            "type": "error",
            "error": {"type": anthropic, "message": message},
        }
    else:
        param = "model" if code == "model_not_found" else None
        body = {"error": {"message": message, "type": openai, "param": param, "code": code}}
    return json.dumps(body).encode()
