"""One server: its process, and what is asked of its sleep routes.

A server's answer is all that is believed of its state. Each call has a limit; what had no answer in
time is ``hung``, and its state has to be asked for.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import signal
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

from sm12x.core import process
from sm12x.core.errors import BadFileError
from sm12x.core.text import visible
from sm12x.pool.config import Spec
from sm12x.recipes import options
from sm12x.runtime import serve

# Seconds between two looks at a server that loads, and between two tries of a call that another
# one is before.
_PAUSE, _AGAIN = 0.25, 0.2
# Seconds that a server has to end by itself.
_GRACE = 30.0
# Bytes of an answer that are read, and characters of it that are shown.
_MOST, _SHOWN = 8 << 20, 240
# Seconds for an answer that needs no engine.
SOON = 5.0

Fault = Literal["refused", "hung", "gone"]


class EngineError(Exception):
    """A call that failed: ``refused`` by an answer, ``hung`` without one, or the server is gone."""

    def __init__(self, fault: Fault, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.fault: Fault = fault
        self.text = text
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Bytes of one rank by tag, asleep and awake, and of its host copies."""

    asleep: Mapping[str, int]
    awake: Mapping[str, int]
    host: int

    @property
    def freed(self) -> int:
        """Bytes that its sleep gave back."""
        return sum(self.asleep.values())


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a server tells of its sleep; ``ranks`` is empty where it does not tell."""

    asleep: bool
    ranks: tuple[Rank, ...] = ()


def told(body: object) -> Told | None:
    """Return what the body of a sleep route says; None where it says nothing."""
    if not isinstance(body, dict):
        return None
    if isinstance(body.get("is_sleeping"), bool):
        asleep = body["is_sleeping"]
    elif body.get("status") in ("sleeping", "awake"):
        asleep = body["status"] == "sleeping"
    else:
        return None
    raw = body.get("ranks")
    ranks = tuple(map(_rank, raw)) if isinstance(raw, list) else ()
    return Told(asleep=asleep, ranks=tuple(one for one in ranks if one) if all(ranks) else ())


def _rank(raw: object) -> Rank | None:
    if not isinstance(raw, dict):
        return None
    tables = []
    for name in ("asleep_bytes", "awake_bytes"):
        table = raw.get(name)
        if not isinstance(table, dict) or not all(isinstance(n, int) for n in table.values()):
            return None
        tables.append({str(tag): int(size) for tag, size in table.items()})
    host = raw.get("host_copy_bytes")
    return Rank(asleep=tables[0], awake=tables[1], host=host if isinstance(host, int) else 0)


class RunFolder:
    """Records of started servers, and the key of their routes: for the pool after its restart.

    Raises:
        BadFileError: the folder is not this user's alone.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = path.lstat()
        except OSError as error:
            raise BadFileError(f"{path}: {error.strerror}", next_step=_FOLDER) from None
        if info.st_uid != os.getuid() or not stat.S_ISDIR(info.st_mode) or info.st_mode & 0o077:
            raise BadFileError(f"{path} is not a folder of this user alone", next_step=_FOLDER)

    def key(self) -> str:
        """Return the key that the started servers ask for; made at first."""
        file = self.path / "key"
        with suppress(OSError):
            if len(word := file.read_text(encoding="ascii").strip()) >= 32:
                return word
        word = secrets.token_urlsafe(32)
        self._write(file, word)
        return word

    def read(self, name: str) -> Any:
        """Return the record ``name``; None where there is none."""
        with suppress(OSError, ValueError):
            return json.loads((self.path / f"{_safe(name)}.json").read_text(encoding="utf-8"))
        return None

    def write(self, name: str, value: object) -> None:
        """Write the record ``name``."""
        self._write(self.path / f"{_safe(name)}.json", json.dumps(value))

    def forget(self, name: str) -> None:
        """Delete the record ``name``."""
        (self.path / f"{_safe(name)}.json").unlink(missing_ok=True)

    def _write(self, file: Path, text: str) -> None:
        new = file.with_name(f"{file.name}.new")
        new.unlink(missing_ok=True)
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            out.write(text)
        new.replace(file)


_FOLDER = "name another with run_folder, or delete this one"


def _safe(name: str) -> str:
    plain = "".join(char if char.isalnum() or char in "._-" else "_" for char in name)
    return f"{plain[:60]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _ticks(pid: int) -> str:
    """Return when a process started, in the kernel's ticks; "" where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The name is in brackets, and may have any character.
    words = text.rpartition(")")[2].split()
    return "" if words[0] == "Z" else words[19]


class _Child(process.Background):
    """A server that this pool has started."""

    @property
    def pid(self) -> int:
        """The process, which leads its group."""
        return self._process.pid


class Engine:
    """The server of one model. ``folder`` has its record; ``devices`` are its GPUs for CUDA."""

    def __init__(
        self, spec: Spec, session: aiohttp.ClientSession, folder: RunFolder, devices: str
    ) -> None:
        self.spec = spec
        self.folder = folder
        self._session = session
        self._devices = devices
        # Seconds for an answer that needs the engine.
        self.patience = 20.0
        self._child: _Child | None = None
        self._pid, self._began = 0, ""
        name = spec.config.key_variable
        key = os.environ.get(name, "") if name else ""
        if spec.argv:
            key = folder.key()
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    @property
    def owned(self) -> bool:
        """Whether the pool starts and ends this server."""
        return bool(self.spec.argv)

    @property
    def pid(self) -> int:
        """The process of a server that the pool has started, 0 without one."""
        return self._pid

    def fingerprint(self) -> str:
        """Return a digest of what the server is started with."""
        words = [list(self.spec.argv), sorted(self.spec.env.items()), self._devices]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()

    def adopt(self) -> bool:
        """Take over the server that a pool before this one has started; False without one."""
        record = self.folder.read(self.spec.key)
        if not self.owned or not isinstance(record, dict):
            return False
        pid, began = record.get("pid"), record.get("began")
        if not isinstance(pid, int) or pid <= 1 or not began or _ticks(pid) != began:
            self.folder.forget(self.spec.key)
            return False
        self._pid, self._began = pid, str(began)
        return bool(record.get("fingerprint") == self.fingerprint())

    def start(self) -> None:
        """Start the server. Raises EngineError where that is not possible."""
        secret = self.headers["Authorization"].removeprefix("Bearer ")
        env: dict[str, str | None] = {**serve.identity(os.environ), **self.spec.env}
        env |= {name: None for name in os.environ if name.startswith("SM12X_POOL_")}
        block = self.spec.recipe.sm12x if self.spec.recipe else None
        resident = block.memory.resident if block else 0.0
        jobs = serve.compilers({**os.environ, **self.spec.env}, resident)
        env |= {**jobs, options.KEY: secret, options.SLEEP_KEY: secret}
        # The pool has no use for what steers a server beyond its sleep.
        env["VLLM_SERVER_DEV_MODE"] = None
        if self._devices:
            env["CUDA_VISIBLE_DEVICES"] = self._devices
        try:
            self._child = _Child(self.spec.argv, log=None, env=env)
        except Exception as error:
            raise EngineError("gone", f"it cannot be started: {error}") from error
        self._pid = self._child.pid
        self._began = _ticks(self._pid)
        self.folder.write(
            self.spec.key,
            {"pid": self._pid, "began": self._began, "fingerprint": self.fingerprint()},
        )

    def ended(self) -> str:
        """Return how the server's process has ended; "" while it runs, or is not the pool's."""
        if not self.owned:
            return ""
        if self._child is not None:
            code = self._child.poll()
            return "" if code is None else f"its process ended with {code}"
        if not self._pid:
            return "it has not been started"
        return "" if _ticks(self._pid) == self._began else "its process has ended"

    async def stop(self, grace: float = _GRACE) -> None:
        """End the server and all of its processes; its memory is free then."""
        if not self._pid:
            return
        end = time.monotonic() + grace
        if not self.ended():
            self._signal(signal.SIGTERM)
            while not self.ended() and time.monotonic() < end:
                await asyncio.sleep(0.05)
        # Workers may outlive the process that has started them.
        self._signal(signal.SIGKILL)
        while not self.ended():
            await asyncio.sleep(0.02)
        self.folder.forget(self.spec.key)
        self._child, self._pid, self._began = None, 0, ""

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    async def call(
        self, method: str, path: str, limit: float, body: object = None
    ) -> tuple[int, bytes]:
        """Return status and body of an answer. Raises EngineError without one."""
        try:
            async with self._session.request(
                method,
                self.spec.url + path,
                headers=self.headers,
                json=body,
                timeout=aiohttp.ClientTimeout(total=limit),
                allow_redirects=False,
            ) as response:
                return response.status, await response.content.read(_MOST)
        except TimeoutError:
            raise EngineError("hung", f"no answer to {path} within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError("gone", f"{path}: {self.ended() or error or repr(error)}") from None

    async def ask(self, method: str, path: str, limit: float, body: object = None) -> Any:
        """Return the JSON of an answer of status 200, None where it is none. Raises EngineError."""
        end = time.monotonic() + limit
        while True:
            left = max(0.05, end - time.monotonic())
            status, raw = await self.call(method, path, left, body)
            if status != 409 or end - time.monotonic() < _AGAIN:
                break
            # Another call is in flight.
            await asyncio.sleep(_AGAIN)
        if status != 200:
            text = visible(raw[: 2 * _SHOWN].decode(errors="replace"))[:_SHOWN]
            raise EngineError("refused", f"{path} answers {status}: {text}", status)
        try:
            return json.loads(raw)
        except ValueError:
            return None

    async def healthy(self) -> bool:
        """Tell whether the server answers, and its engine lives."""
        try:
            return (await self.call("GET", "/health", SOON))[0] == 200
        except EngineError:
            return False

    async def state(self) -> Told:
        """Ask whether the server sleeps. Raises EngineError where it does not tell."""
        try:
            answer = told(await self.ask("GET", "/is_sleeping", self.patience))
        except EngineError as error:
            if error.status != 404 or self.spec.config.sleep not in ("never", "stop", "auto"):
                raise
            # It has no sleep routes, so it cannot sleep.
            status, _ = await self.call("GET", "/health", SOON)
            if status != 200:
                raise EngineError("refused", f"/health answers {status}", status) from None
            return Told(asleep=False)
        if answer is None:
            raise EngineError("refused", "/is_sleeping says neither true nor false")
        return answer

    async def sleep(self, rung: str, *, keep: bool, limit: float) -> Told:
        """Put the server to sleep, and return what it tells then. Raises EngineError."""
        path = "/sleep?level=2" if rung == "level_2" else "/sleep?level=1"
        path += "&tags=kv_cache" if rung == "kv_cache" else ""
        path += "&mode=keep&keep_kv=true" if keep else ""
        answer = told(await self.ask("POST", path, limit))
        return answer or await self.state()

    async def wake(self, rung: str, limit: float) -> Told:
        """Wake the server up, and return what it tells then. Raises EngineError."""
        if rung == "level_2":
            await self.ask("POST", "/wake_up?tags=weights", limit)
            await self.ask("POST", "/collective_rpc", limit, {"method": "reload_weights"})
        answer = told(await self.ask("POST", "/wake_up", limit))
        return answer or await self.state()

    async def loaded(self, limit: float) -> None:
        """Wait until a started server answers. Raises EngineError where it ends, or is too slow."""
        end = time.monotonic() + limit
        while not await self.healthy():
            if why := self.ended():
                raise EngineError("gone", why)
            if time.monotonic() > end:
                raise EngineError("hung", f"it has not loaded within {limit:g} s")
            await asyncio.sleep(_PAUSE)

    async def names(self) -> list[dict[str, Any]]:
        """Return the entries of the server's own /v1/models. Raises EngineError."""
        answer = await self.ask("GET", "/v1/models", self.patience)
        entries = answer.get("data") if isinstance(answer, dict) else None
        return [
            one
            for one in (entries if isinstance(entries, list) else ())
            if isinstance(one, dict) and isinstance(one.get("id"), str)
        ]

    async def generate(self, model: str, prompt: str, tokens: int, limit: float) -> str:
        """Return the greedy text after a prompt. Raises EngineError."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "seed": 0}
        answer = await self.ask("POST", "/v1/completions", limit, body)
        try:
            return str(answer["choices"][0]["text"])
        except (LookupError, TypeError):
            raise EngineError("refused", "/v1/completions answers without a text") from None

    async def embed(self, model: str, text: str, limit: float) -> Sequence[float]:
        """Return the embedding of a text. Raises EngineError."""
        answer = await self.ask("POST", "/v1/embeddings", limit, {"model": model, "input": text})
        try:
            return [float(number) for number in answer["data"][0]["embedding"]]
        except (LookupError, TypeError, ValueError):
            raise EngineError("refused", "/v1/embeddings answers without numbers") from None

    async def metrics(self, limit: float = SOON) -> str:
        """Return the text of the server's /metrics; "" where it does not answer."""
        try:
            status, raw = await self.call("GET", "/metrics", limit)
        except EngineError:
            return ""
        return raw.decode(errors="replace") if status == 200 else ""
