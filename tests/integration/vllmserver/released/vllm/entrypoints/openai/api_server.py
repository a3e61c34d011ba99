"""Stands for vLLM's server where tests.gpu starts one: plays it with ../../../../serve.py.

SM12X_TEST_MEMORY is the folder of what processes hold, SM12X_TEST_SERVERS the settings of a server
by the name of its model's folder.
"""

import json
import os
import sys
from pathlib import Path

port = int(sys.argv[sys.argv.index("--port") + 1])
folder = Path(sys.argv[sys.argv.index("--model") + 1]).name
settings = json.loads(os.environ.get("SM12X_TEST_SERVERS", "{}")).get(folder, {})
memory = Path(os.environ["SM12X_TEST_MEMORY"]) / f"{port}.json"
settings = {"model": "model", "memory": f"{memory}", "says": folder, **settings, "port": port}
player = Path(__file__).parents[4] / "serve.py"
# The same process, as the one that started it kills that one.
os.execv(sys.executable, [sys.executable, f"{player}", json.dumps(settings)])  # noqa: S606
