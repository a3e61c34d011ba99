"""What `check` does in processes of its own: load libcuda, load modules, parse arguments.

A library that crashes takes the probe with it and not the check, and LD_LIBRARY_PATH is set for
the probe alone. The question comes as JSON on stdin, the answer goes as JSON to stdout; whatever
the code that is loaded prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from sm12x.core import text

DRIVER = "libcuda.so.1"
# Where releases have the parser of `vllm serve`: the first that is there.
_PARSERS = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.openai.cli_args")
_OTHER_PYTHON = re.compile(r"\.cpython-\d+[^.]*\.so$")


def driver() -> str | None:
    """The file that this process gets as the CUDA driver, None when there is none."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return None
    return _mapped()


def _mapped() -> str | None:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        # The real file is called libcuda.so.<driver version>.
        if PurePosixPath(path).name.startswith("libcuda.so"):
            return path
    return None


def modules(site: Path, libraries: list[str]) -> dict[str, Any]:
    """Load each library as the interpreter would, without importing the package around it."""
    # torch brings the libraries and the operator registry that the modules link to.
    torch = importlib.import_module("torch")

    state: dict[str, str] = {}
    for path in libraries:
        # On stderr, so that after a crash the last line names the culprit.
        sys.stderr.write(f"loading {path}\n")
        sys.stderr.flush()
        state[path] = _load(site / path)
    return {
        "driver": _mapped(),
        "libraries": state,
        "ops": sorted(torch._C._dispatch_get_all_op_names()),
    }


def _load(path: Path) -> str:
    """ "" when loaded, "other-python" when built for another interpreter, else the error."""
    suffixes = [end for end in importlib.machinery.EXTENSION_SUFFIXES if path.name.endswith(end)]
    if _OTHER_PYTHON.search(path.name) and suffixes == [".so"]:
        return "other-python"
    name = path.name.removesuffix(suffixes[0]) if suffixes else path.name
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        if spec is None:
            return "is not an extension module"
        loader.exec_module(importlib.util.module_from_spec(spec))
    except (ImportError, OSError, RuntimeError) as error:
        if "module export function" not in str(error):
            return " ".join(str(error).split())
        # Not a Python module: a plain library that registers its operators when loaded.
        try:
            ctypes.CDLL(str(path))
        except OSError as reason:
            return " ".join(str(reason).split())
    return ""


def imports(names: list[str]) -> dict[str, str]:
    """Import each module, and return the error of each, "" for one that can be imported."""
    problems = {}
    for name in names:
        sys.stderr.write(f"importing {name}\n")
        sys.stderr.flush()
        try:
            importlib.import_module(name)
            problems[name] = ""
        except Exception as error:
            # A package may raise anything while it is imported; the check names it.
            problems[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return problems


def first_there(names: Sequence[str]) -> Any:
    """The first module of ``names`` that exists. Raises the last one's ModuleNotFoundError."""
    for name in names[:-1]:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Not the module itself but something that it imports: that is a fault.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
    return importlib.import_module(names[-1])


def arguments(commands: dict[str, list[str]], env: dict[str, list[str]]) -> dict[str, Any]:
    """Give each command to the release's own parser, and look up each VLLM_ variable.

    A variable that the release does not know is a warning, as in the release itself.

    The platform is put in place before anything asks for it: without a GPU the release would
    find none, and refuse to say what its device is.
    """
    # Imported by name: the check is typed and tested where vLLM is not installed.
    load = importlib.import_module
    platforms: Any = load("vllm.platforms")
    platforms.current_platform = load("vllm.platforms.cuda").CudaPlatform()
    envs = load("vllm.envs")
    cli = first_there(_PARSERS)
    reasoning = load("vllm.reasoning").ReasoningParserManager
    tools = load("vllm.tool_parsers").ToolParserManager
    base: Any = load("vllm.utils.argparse_utils").FlexibleArgumentParser

    class Parser(base):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise ValueError(message)

    parser = cli.make_arg_parser(Parser(prog="vllm serve"))
    answers: dict[str, list[str]] = {}
    warnings: dict[str, list[str]] = {}
    for key, words in commands.items():
        problems: list[str] = []
        try:
            parsed = parser.parse_args(words)
            cli.validate_parsed_serve_args(parsed)
            if not parsed.model_tag:
                problems.append("no model is given")
            # The parser takes any name here; the server looks it up after loading the model.
            name, names = parsed.reasoning_parser, reasoning.list_registered()
            if name and not parsed.reasoning_parser_plugin and name not in names:
                problems.append(f"--reasoning-parser {name} is unknown{text.perhaps(name, names)}")
            name, names = parsed.tool_call_parser, tools.list_registered()
            if name and not parsed.tool_parser_plugin and name not in names:
                problems.append(f"--tool-call-parser {name} is unknown{text.perhaps(name, names)}")
        except Exception as error:
            # The parser of a release raises whatever its option types raise.
            reason = " ".join(str(error).split())
            unknown = re.findall(r"--[\w.-]+", reason.partition("unrecognized arguments:")[2])
            hints = [text.perhaps(word, parser._option_string_actions) for word in unknown]
            problems.append(reason + "".join(dict.fromkeys(hints)))
        except SystemExit as stop:
            problems.append(f"the parser stopped with {stop.code}")
        answers[key] = problems
        warnings[key] = [
            f"{name} is not a variable of this release"
            f"{text.perhaps(name, envs.environment_variables)}"
            for name in env.get(key, [])
            if name.startswith("VLLM_") and name not in envs.environment_variables
        ]
    return {"driver": _mapped(), "problems": answers, "warnings": warnings}


def kernels(folder: Path, capabilities: list[int]) -> list[dict[str, Any]]:
    """Compile each configuration that a module of the package lists, on all cores.

    The package imports torch and Triton alone; that of vLLM around it is not imported.
    """
    sys.path.insert(0, str(folder.parent))
    package = folder.name
    jobs = []
    for path in sorted(folder.glob("*.py")):
        module = importlib.import_module(f"{package}.{path.stem}")
        if path.stem != "__init__" and hasattr(module, "configurations"):
            for place in range(len(module.configurations())):
                jobs += [(module.__name__, place, capability) for capability in capabilities]
    # Started anew: a fork of a process with torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    # Each has torch loaded, about 0.5 GiB.
    workers = min(8, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(_compile, jobs))


def _compile(job: tuple[str, int, int]) -> dict[str, Any]:
    """One of ``kernels``' jobs; a process that is started anew has sys.path of its parent."""
    module, place, capability = job
    configuration = importlib.import_module(module).configurations()[place]
    answer = {"name": configuration.name, "capability": capability, "shared": 0, "error": ""}
    try:
        compile_for = importlib.import_module(f"{module.rpartition('.')[0]}.compile").compile_for
        answer["shared"] = compile_for(configuration, capability).shared_memory
    except Exception as error:
        # Whatever Triton, LLVM or ptxas raise; the check names it.
        answer["error"] = " ".join(str(error).split())
    return answer


def main() -> None:
    # vLLM logs to stdout: keep the real one for the answer.
    answer_to = os.dup(1)
    os.dup2(2, 1)
    kind = sys.argv[1]
    question = json.load(sys.stdin)
    answer: Any
    if kind == "driver":
        answer = driver()
    elif kind == "modules":
        answer = modules(Path(question["site"]), question["libraries"])
    elif kind == "imports":
        answer = imports(question)
    elif kind == "arguments":
        answer = arguments(question["commands"], question["env"])
    elif kind == "kernels":
        answer = kernels(Path(question["folder"]), question["capabilities"])
    else:
        raise SystemExit(f"no such probe: {kind}")
    with os.fdopen(answer_to, "w", encoding="utf-8") as handle:
        json.dump(answer, handle)
        handle.flush()
    # Skip the teardown of the loaded libraries: with a stand-in driver some of them abort in it.
    os._exit(0)


if __name__ == "__main__":
    main()
