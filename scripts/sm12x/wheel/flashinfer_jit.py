"""Builds or loads modules by FlashInfer itself; a program, as its settings are variables.

FlashInfer reads FLASHINFER_CUDA_ARCH_LIST, FLASHINFER_WORKSPACE_BASE and CUDA_HOME while it is
imported. The question is a JSON file, the answer another one: FlashInfer and ninja print on stdout.

    python -P -m sm12x.wheel.flashinfer_jit build|load QUESTION ANSWER
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BUILD, LOAD = "build", "load"


def specs(modules: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Make FlashInfer's ``JitSpec`` of each module. Raises ValueError if its name differs."""
    torch = importlib.import_module("torch")

    def value(argument: object) -> object:
        attribute = getattr(torch, argument, None) if isinstance(argument, str) else None
        return attribute if isinstance(attribute, torch.dtype) else argument

    jit_specs = []
    for module in modules:
        package, _, function = module["generator"].partition(":")
        generator = getattr(importlib.import_module(package), function)
        spec = generator(
            **{name: value(argument) for name, argument in module["arguments"].items()}
        )
        if spec.name != module["name"]:
            raise ValueError(
                f"{module['generator']} makes the module {spec.name}, not {module['name']}"
            )
        jit_specs.append(spec)
    return jit_specs


def build(modules: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Compile the modules not compiled yet in one ninja run; return each module's library."""
    jit_specs = specs(modules)
    core = importlib.import_module("flashinfer.jit.core")
    core.build_jit_specs(jit_specs, verbose=True, skip_prebuilt=False)
    return {spec.name: str(spec.jit_library_path) for spec in jit_specs}


def load(modules: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the error of loading each module as a server loads it, "" for one that loads."""
    answer = {}
    for module in modules:
        sys.stderr.write(f"loading {module['name']}\n")
        sys.stderr.flush()
        try:
            (spec,) = specs([module])
            spec.build_and_load()
            answer[module["name"]] = ""
        except Exception as error:
            # Whatever FlashInfer raises is the answer.
            answer[module["name"]] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return answer


def main(verb: str, question: str, answer: str) -> None:
    modules = json.loads(Path(question).read_text(encoding="utf-8"))
    answers = {BUILD: build, LOAD: load}[verb](modules)
    Path(answer).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
