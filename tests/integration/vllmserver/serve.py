"""Plays a vLLM server with sleep mode for `sm12x verify`: python serve.py '{"faults": ...}'

It prints its port, and answers as the stack's servers do: 503 while it sleeps, 409 for a call that
crosses another, 401 without the key. What its workers would hold of GPU memory it writes to a
file, which the stand-in for NVML in nvml/ reads. A fault is named by a route and, after a colon, by
which call of it: "die": "wake_up:2" ends the process in the second wake-up.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

GIB, MIB = 1 << 30, 1 << 20
SETTINGS: dict[str, Any] = {
    "key": "",
    # 0: any free one.
    "port": 0,
    "model": "tiny",
    # What its texts begin with.
    "says": "",
    "version": "0.33.0",
    "asleep": False,
    # Which routes there are: of sleep mode, and of development mode.
    "routes": True,
    "dev": False,
    "speculates": False,
    "busy": 0,
    # Of /v1/models; "" and 0 are left out.
    "root": "",
    "max_model_len": 0,
    # Seconds of a streamed token.
    "token": 0.001,
    # What /metrics says of the KV cache; "" is left out.
    "caching": "",
    # Seconds of a wake-up.
    "wake_up": 0.0,
    # And of a sleep.
    "sleep": 0.0,
    # A sleep lasts until there is this file.
    "gate": "",
    "awake_gib": 40.0,
    "residue_gib": 2.0,
    # The file for the stand-in of NVML; "" without one.
    "memory": "",
    # Faults.
    "die": "",
    "hang": "",
    # Answers with a byte now and then, and no end.
    "drip": "",
    "refuse": {},
    "nonsense": {},
    "leak_mib": 0.0,
    "keeps": False,
    "garbage_after": 0,
    "other_text_after": 0,
    "unsteady": False,
    "forgets_draft_after": 0,
    "echoes_key": False,
    "ignores_sleep": False,
    **json.loads(sys.argv[1] if sys.argv[1:] else "{}"),
}
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} %(busy)d
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 0
"""
CACHE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{cache_dtype="fp8",enable_prefix_caching="%(caching)s",engine="0"} 1.0
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0"} %(looked_up)d
# HELP vllm:prefix_cache_hits_total Prefix cache hits, in terms of number of cached tokens.
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0"} %(cached)d
"""
SPECULATION = """\
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} %(drafted)d
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} %(accepted)d
"""


class Engine:
    """What the server knows of itself."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.asleep = bool(SETTINGS["asleep"])
        self.without_weights = False
        self.in_flight = ""
        self.counts: dict[str, int] = {}
        self.calls: list[str] = []
        self.drafted = self.accepted = self.looked_up = 0
        self.sleeps = 0
        self.tell()

    def count(self, name: str) -> int:
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + 1
            return self.counts[name]

    def tell(self) -> None:
        """Write what the driver would say."""
        if not SETTINGS["memory"]:
            return
        leaked = int(SETTINGS["leak_mib"] * MIB) * self.sleeps
        small = self.asleep and not SETTINGS["keeps"]
        gib = SETTINGS["residue_gib" if small else "awake_gib"]
        path = Path(SETTINGS["memory"])
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"pid": os.getpid(), "bytes": int(gib * GIB) + leaked}))
        new.rename(path)

    def text(self, prompt: str) -> str:
        woken = self.counts.get("wake_up", 0)
        if self.without_weights:
            return ""
        if SETTINGS["garbage_after"] and woken >= SETTINGS["garbage_after"]:
            return "!" * 48
        words = f"{SETTINGS['says']}as in {prompt[-12:]!r}, one by one, and then the sea was quiet"
        if SETTINGS["other_text_after"] and woken >= SETTINGS["other_text_after"]:
            words = words.replace("quiet", "loud")
        return f"{words} {time.monotonic_ns()}" if SETTINGS["unsteady"] else words


ENGINE = Engine()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: Any = None, **headers: str) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(b" ")
                time.sleep(0.2)

    def refused(self, name: str) -> bool:
        """Whether a fault, or a missing key, has answered."""
        ENGINE.calls.append(f"{self.command} {self.path}")
        nth = f"{name}:{ENGINE.count(name)}"
        if SETTINGS["die"] in (name, nth):
            os._exit(1)
        if SETTINGS["hang"] in (name, nth):
            time.sleep(600)
        if SETTINGS["drip"] in (name, nth):
            self.drip()
            return True
        for each in (name, nth):
            if each in SETTINGS["nonsense"]:
                self.answer(200, SETTINGS["nonsense"][each])
                return True
            if each in SETTINGS["refuse"]:
                status = SETTINGS["refuse"][each]
                self.answer(status, {"error": {"message": f"as {each} was told", "code": status}})
                return True
        guarded = ("completions", "models", "sleep", "wake_up", "is_sleeping")
        sent = self.headers.get("Authorization", "")
        if SETTINGS["key"] and name in guarded and sent != f"Bearer {SETTINGS['key']}":
            said = f"Unauthorized: {sent}" if SETTINGS["echoes_key"] else "Unauthorized"
            self.answer(401, {"error": said})
            return True
        return False

    def do_GET(self) -> None:
        name = urlsplit(self.path).path.rsplit("/", 1)[-1]
        if name == "calls":
            self.answer(200, ENGINE.calls)
            return
        if self.refused(name):
            return
        if name == "health":
            self.answer(200, "")
        elif name == "version":
            self.answer(200, {"version": SETTINGS["version"]})
        elif name == "models":
            about = {key: SETTINGS[key] for key in ("root", "max_model_len") if SETTINGS[key]}
            self.answer(200, {"object": "list", "data": [{"id": SETTINGS["model"], **about}]})
        elif name == "is_sleeping" and SETTINGS["routes"]:
            self.answer(200, {"is_sleeping": ENGINE.asleep})
        elif name == "metrics":
            spent = {"drafted": ENGINE.drafted, "accepted": ENGINE.accepted}
            text = METRICS % SETTINGS
            if SETTINGS["caching"]:
                text += CACHE % {**SETTINGS, "looked_up": ENGINE.looked_up, "cached": 0}
            self.answer(200, text + SPECULATION % spent if SETTINGS["speculates"] else text)
        elif name == "collective_rpc" and SETTINGS["dev"]:
            self.answer(405, {"detail": "Method Not Allowed"})
        else:
            self.answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        name = parts.path.rsplit("/", 1)[-1]
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        query = parse_qs(parts.query)
        if name == "completions":
            if not self.refused(name):
                self.complete(json.loads(raw))
            return
        if name in ("sleep", "wake_up") and SETTINGS["routes"]:
            with ENGINE.lock:
                busy, ENGINE.in_flight = ENGINE.in_flight, ENGINE.in_flight or name
            if busy:
                said = f"/{name} was not begun: /{busy} is in flight."
                self.answer(409, {"error": {"message": said}})
                return
            try:
                if not self.refused(name):
                    self.change(name, query)
            finally:
                ENGINE.in_flight = ""
        elif name == "collective_rpc" and SETTINGS["dev"]:
            if not self.refused(name):
                if json.loads(raw)["method"] == "reload_weights":
                    ENGINE.without_weights = False
                self.answer(200, {"results": [None]})
        else:
            self.answer(404, {"detail": "Not Found"})

    def change(self, name: str, query: dict[str, list[str]]) -> None:
        time.sleep(SETTINGS[name])
        while name == "sleep" and SETTINGS["gate"] and not Path(SETTINGS["gate"]).exists():
            time.sleep(0.05)
        if name == "sleep":
            ENGINE.asleep = not SETTINGS["ignores_sleep"]
            ENGINE.without_weights = query.get("level") == ["2"]
            ENGINE.sleeps += 1
        else:
            ENGINE.asleep = query.get("tags") == ["weights"]
        ENGINE.tell()
        self.answer(200, "")

    def complete(self, body: dict[str, Any]) -> None:
        if ENGINE.asleep:
            self.answer(503, {"error": {"message": "The model is asleep"}}, Retry_After="1")
            return
        if "messages" in body or body.get("stream"):
            self.chat(body)
            return
        text = ENGINE.text(body["prompt"])
        woken = ENGINE.counts.get("wake_up", 0)
        lost = SETTINGS["forgets_draft_after"] and woken >= SETTINGS["forgets_draft_after"]
        ENGINE.drafted += 20
        ENGINE.accepted += 1 if lost else 15
        self.answer(
            200,
            {
                "choices": [{"text": text, "token_ids": list(text.encode())}],
                "usage": {"completion_tokens": min(len(text), body["max_tokens"])},
            },
        )

    def chat(self, body: dict[str, Any]) -> None:
        """Answer a chat, each token in an event of its own; a few where more would be allowed."""
        messages = body.get("messages") or [{"content": body.get("prompt")}]
        prompt = " ".join(str(message.get("content") or "") for message in messages)
        most = body.get("max_tokens") or 8
        count = int(body.get("min_tokens") or (most if body.get("ignore_eos") else min(most, 8)))
        read = max(1, len(prompt) // 4)
        with ENGINE.lock:
            ENGINE.looked_up += read
        usage = {"prompt_tokens": read, "completion_tokens": count, "total_tokens": read + count}
        about = {"id": "x", "created": 0, "model": SETTINGS["model"]}
        if not body.get("stream"):
            message = {"role": "assistant", "content": "the answer is 4"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.answer(
                200,
                {**about, "object": "chat.completion", "choices": [choice], "usage": usage},
                Content_Type="application/json",
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        about["object"] = "chat.completion.chunk"
        with contextlib.suppress(OSError):
            for number in range(count):
                time.sleep(SETTINGS["token"])
                last = "stop" if number + 1 == count else None
                delta = {"role": "assistant", "content": "a "}
                choice = {"index": 0, "token_ids": [number], "finish_reason": last}
                choice |= {"delta": delta} if "messages" in body else {"text": "a "}
                self.event({**about, "choices": [choice]})
            self.event({**about, "choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, body: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        pass


class Listener(http.server.ThreadingHTTPServer):
    # A connection that finds the queue full is tried again after a second.
    request_queue_size = 128


if __name__ == "__main__":
    server = Listener(("127.0.0.1", SETTINGS["port"]), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
