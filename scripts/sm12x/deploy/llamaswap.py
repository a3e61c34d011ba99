"""Recipes as a configuration of llama-swap, which starts and stops servers as they are asked for.

It stops one server before it starts the next and does not put it to sleep: its wrapper for vLLM
posts the sleep level as a JSON body, which vLLM ignores. So no recipe's sleep is used here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sm12x.core.errors import UsageError
from sm12x.core.yamltext import dump
from sm12x.deploy.container import containers, header
from sm12x.deploy.docker import command
from sm12x.recipes.model import Recipe

# Seconds. 15 minutes are a long load; the first start on a cold cache compiles as well.
_LOAD_SECONDS = 3600
# Stands for llama-swap's ${PORT} until the text is whole, as `$` would call for a shell.
_PORT = "llama-swap-port"


def render(
    recipe: Recipe,
    *,
    image: str,
    settings: Mapping[str, str],
    extra: Sequence[str],
    peers: Sequence[Recipe] = (),
) -> str:
    """A configuration with the recipe as a model, or the two of a pair (``peers``) as a group.

    Raises:
        UsageError: the recipe is for several machines, its port cannot be set, it has no setting
            of a name that was given, or settings were given for a pair.
    """
    if peers and (settings or extra):
        raise UsageError(
            f"{recipe.key} names two recipes, each with settings of its own",
            next_step="render without settings and edit the text",
        )
    models = {}
    for one in peers or (recipe,):
        name, model = _model(one, image=image, settings=settings, extra=extra)
        models[name] = model
    content: dict[str, object] = {"healthCheckTimeout": _LOAD_SECONDS, "models": models}
    if peers:
        # They need the same GPUs: one at a time.
        content["groups"] = {recipe.key: {"swap": True, "exclusive": True, "members": list(models)}}
    text = dump(content)
    return "\n".join(header(recipe, "llama-swap", settings, extra)) + "\n" + text


def _model(
    recipe: Recipe, *, image: str, settings: Mapping[str, str], extra: Sequence[str]
) -> tuple[str, dict[str, object]]:
    if recipe.cluster_only or (recipe.sm12x and recipe.sm12x.machines > 1):
        raise UsageError(
            f"{recipe.key} is for several machines, llama-swap starts programs on one",
            next_step="render it to docker, compose or nomad",
        )
    if "port" not in recipe.defaults:
        raise UsageError(
            f"{recipe.key} has no setting port, and llama-swap chooses the port",
            next_step="give port in the recipe's defaults and use {port} in its command",
        )
    given = {**settings, "port": _PORT}
    if "host" in recipe.defaults:
        # Only llama-swap is to reach it.
        given["host"] = "127.0.0.1"
    (part,) = containers(recipe, image=image, settings=given, extra=extra)
    # No shell reads the words: llama-swap puts in ${PORT} and ${env.NAME}, and refuses any other
    # ${NAME}, such as one that is for the shell inside the container.
    text = re.sub(r"\$\{(\w+)\}(?!\w)", r"$\1", command(part))
    text = text.replace('-v "$HOME/', '-v "${env.HOME}/').replace(_PORT, "${PORT}")
    name = settings.get("served_model_name", str(recipe.defaults.get("served_model_name", "")))
    return name or recipe.model or recipe.key, {
        "cmd": text + "\n",
        "cmdStop": f"docker stop --time 120 {part.name}",
        "proxy": "http://127.0.0.1:${PORT}",
        # What the clients ask for is what the server calls itself.
        "checkEndpoint": "/health",
    }
