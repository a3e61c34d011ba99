"""Asks the image's verb `plan` about a model, and keeps its answers."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sm12x import layout
from sm12x.core import declared, process
from sm12x.core.errors import BadFileError, FindingsError, ToolFailedError, UnknownVerdictError
from sm12x.core.text import GIB
from sm12x.image.bundle import record
from sm12x.image.engine import engines
from sm12x.image.engine.engine import Engine
from sm12x.image.engine.follow import own_error
from sm12x.plan.figures import Answer

# Imports of vLLM on a slow machine, and one answer.
_SECONDS = 900
# What `plan` prints answers with: all planned, a refusal of vLLM, figures not to be believed.
_ANSWERED = (0, FindingsError.exit_code, UnknownVerdictError.exit_code)


def ask(
    folder: Path,
    arguments: Sequence[str],
    env: Mapping[str, str],
    card: str,
    *,
    say: Callable[[str], None],
    sweep: Mapping[str, Sequence[int]] | None = None,
    draft: Path | None = None,
    budgets: Sequence[int] = (),
) -> tuple[Answer, ...]:
    """Return what the image of the default release says of a model that is served like this.

    There is an answer for each combination of the values in ``sweep``, which are of --tp and
    --max-model-len. ``draft`` is the folder of a draft model; ``budgets`` are bytes of KV cache to
    plan for besides.

    Raises:
        BadFileError: no image is here, or the folder holds no model.
        ToolFailedError: the image does not answer.
    """
    engine, image = _image(folder, say)
    swept = sweep or {}
    about = [engine.image_id(image), card, *arguments, budgets, sorted(env.items())]
    about += [_contents(one) for one in (folder, draft) if one]
    keys = [
        json.dumps([*about, *zip(swept, values, strict=True)])
        for values in itertools.product(*swept.values())
    ]
    paths = [
        layout.cache() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
        for key in keys
    ]
    if all(path.is_file() for path in paths):
        return tuple(declared.read_json(Answer, path, next_step=f"remove {path}") for path in paths)
    say(f"asking vLLM in {image}, which takes up to a minute")
    words = ["--json", "--card", card]
    for name, values in swept.items():
        words += [name, ",".join(map(str, values))]
    if budgets:
        words += ["--kv-gib", ",".join(str(size / GIB) for size in budgets)]
    variables = [word for item in env.items() for word in ("--env", "=".join(item))]
    volumes = ["--volume", f"{folder.resolve()}:/model:ro"]
    if draft:
        volumes += ["--volume", f"{draft.resolve()}:/draft:ro"]
        words += ["--draft", "/draft"]
    argv: list[str | Path] = [engine.program, "run", "--rm", "--network", "none", *variables]
    argv += [*volumes, image, "plan", *words, "--", *arguments]
    done = process.run(argv, check=False, timeout=_SECONDS)
    if done.returncode not in _ANSWERED or not done.stdout.startswith("["):
        error = own_error(done.stderr)
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise ToolFailedError(
            f"`plan` of {image} failed: {error['message'] if error else lines[-1]}",
            next_step=error["next"]
            if error
            else "mend what it names; an image without the verb `plan`: run `make bundle`",
        )
    answers = [_checked(part, image) for part in json.loads(done.stdout)]
    for answer, path in zip(answers, paths, strict=True):
        if not answer.failure:
            declared.write_json(path, answer)
    return tuple(answers)


def _checked(part: object, image: str) -> Answer:
    answer, faults = declared.check(Answer, part)
    if answer is None:
        raise ToolFailedError(
            f"{image} answers in another form: {faults[0].text}",
            next_step="run `make bundle`: image and checkout are of different versions",
        )
    return answer


def _image(folder: Path, say: Callable[[str], None]) -> tuple[Engine, str]:
    """Return the bundle's image of the default release, and the engine that has it."""
    bundle = record.read(layout.dist(layout.release()))
    way = f"where the image is: docker run --rm -v {folder}:/model:ro IMAGE plan --help"
    if bundle is None or not bundle.tags:
        raise BadFileError(
            f"no image of {layout.release()} is here, and vLLM in it is what knows the sizes",
            next_step=f"run `make bundle`, or {way}",
        )
    name = bundle.engine.split()[0]
    engine = engines.find(name, say=say, may_install=False)
    if engine.script(bundle.tags[0]) or not engine.has_image(bundle.tags[0]):
        raise BadFileError(f"{name} cannot run {bundle.tags[0]} here", next_step=way)
    return engine, bundle.tags[0]


def _contents(folder: Path) -> list[tuple[str, str]]:
    """Return what the answer depends on: configuration files by hash, the others by size."""
    return [
        (
            path.name,
            hashlib.sha256(path.read_bytes()).hexdigest()
            if path.suffix == ".json"
            else str(path.stat().st_size),
        )
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
