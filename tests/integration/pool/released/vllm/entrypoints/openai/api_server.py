"""Stands for vLLM's server where a pool starts one in a test: plays it with played.py."""

import os
import sys

words = sys.argv[1:]
name = words[len(words) - words[::-1].index("--served-model-name")]
port = words[len(words) - words[::-1].index("--port")]
kept = [word for word in words if word == "--sleep-keep-kv"]
played = ["-m", "tests.integration.pool.played", "serve", name, "--port", port, *kept]
# The same process, as the one that started it kills that one.
os.execv(sys.executable, [sys.executable, *played])  # noqa: S606
