"""What a benchmark ran on: host, GPUs and what they do meanwhile, server, stack, recipe."""

from __future__ import annotations

import hashlib
import platform
import re
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from sm12x import layout
from sm12x.bench.report import (
    GpuFacts,
    GpuSamples,
    HostFacts,
    RecipeFacts,
    ServerFacts,
    StackFacts,
)
from sm12x.core.errors import BadFileError, ServerError, ToolFailedError, UsageError
from sm12x.core.text import perhaps
from sm12x.doctor import examine, gpus, knowledge, memory
from sm12x.doctor.host import Host, Unseen
from sm12x.doctor.report import DoctorReport, document
from sm12x.image.engine import engines
from sm12x.recipes import evidence, load
from sm12x.recipes.model import Recipe
from sm12x.runtime.places import Places
from sm12x.verify.client import Server
from sm12x.wheel import ledger as ledgers

_VERSION = re.compile(r"(?P<release>[^+]+)\+sm12x\.(?P<stack>[0-9a-f]{8})\.(?P<mode>quick|full)")
# Seconds between two samples of the GPUs.
_EVERY = 1.0
CACHED, LOOKED_UP = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


class _Nvml:
    """Calls of NVML on one GPU; None for what the driver or the module does not have."""

    def __init__(self, nvml: Any, index: int) -> None:
        self._nvml = nvml
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def __call__(self, name: str, *more: object) -> Any:
        try:
            return getattr(self._nvml, f"nvmlDeviceGet{name}")(self._handle, *more)
        except (self._nvml.NVMLError, AttributeError, TypeError):
            return None


def _scaled(value: Any, by: float = 1.0) -> float | None:
    return None if value is None else float(value) / by


@contextmanager
def _nvml(host: Host) -> Iterator[Any]:
    module = host.nvml()
    module.nvmlInit()
    try:
        yield module
    finally:
        module.nvmlShutdown()


def host_facts(host: Host, unseen: str, chosen: frozenset[int] | None) -> HostFacts:
    """Return the facts of this host, with those GPUs that are ``chosen`` (None: all).

    Args:
        unseen: why its GPUs are not those of the server; "" where they are.
    """
    driver, listed = gpus.collect(host, knowledge.load())
    total = memory.meminfo(host)
    found: list[GpuFacts] = []
    if not unseen and isinstance(listed, Unseen):
        unseen = listed.why
    elif not unseen and not isinstance(listed, Unseen):
        mine = [gpu for gpu in listed if chosen is None or gpu.index in chosen]
        if any(gpu.told_by != "nvml" for gpu in mine):
            unseen = driver.fault or "NVML does not answer"
        elif not mine:
            unseen = "no GPU is here"
        else:
            with _nvml(host) as module:
                found = [_gpu(_Nvml(module, gpu.index), gpu) for gpu in mine]
    return HostFacts(
        machine=platform.machine(),
        kernel=platform.release(),
        memory_total=None if isinstance(total, Unseen) else total.get("MemTotal"),
        driver="" if unseen or isinstance(driver.version, Unseen) else driver.version,
        gpus=tuple(found),
        unseen=unseen,
    )


def _gpu(ask: _Nvml, gpu: Any) -> GpuFacts:
    # Clock types of NVML: 1 is of the multiprocessors, 2 of the memory.
    return GpuFacts(
        index=gpu.index,
        name=gpu.name,
        hardware=gpu.hardware,
        memory_total=gpu.memory_total,
        power_limit=_scaled(ask("EnforcedPowerLimit"), 1000),
        power_limit_default=_scaled(ask("PowerManagementDefaultLimit"), 1000),
        clock_max=_scaled(ask("MaxClockInfo", 1)),
        memory_clock_max=_scaled(ask("MaxClockInfo", 2)),
        pcie_generation_max=ask("MaxPcieLinkGeneration"),
        pcie_width=ask("CurrPcieLinkWidth"),
        pcie_width_max=ask("MaxPcieLinkWidth"),
    )


def doctor_report(recipe: Recipe | None) -> DoctorReport:
    """Return what `sm12x doctor RECIPE --json` says of this host."""
    seen = examine.facts(Host(), knowledge.load(), dist=layout.bundles(), recipe=recipe)
    return document(seen, examine.run(seen))


_Reading = tuple[float | None, ...]


class Sampler:
    """Reads power, temperature, clock and memory of GPUs each second while it is entered."""

    def __init__(self, host: Host, indices: tuple[int, ...]) -> None:
        self._host = host
        self._readings: dict[int, list[_Reading]] = {index: [] for index in indices}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        if self._readings:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._readings:
            self._thread.join()

    def _read(self) -> None:
        # A driver that ends to answer ends the samples, not the benchmark.
        with suppress(Exception), _nvml(self._host) as module:
            asked = {index: _Nvml(module, index) for index in self._readings}
            while not self._stop.wait(_EVERY):
                for index, ask in asked.items():
                    use = ask("MemoryInfo")
                    reading = (
                        _scaled(ask("PowerUsage"), 1000),
                        _scaled(ask("Temperature", 0)),
                        _scaled(ask("ClockInfo", 1)),
                        _scaled(use and use.used),
                        _scaled(ask("CurrPcieLinkGeneration")),
                    )
                    self._readings[index].append(reading)

    def summary(self) -> tuple[GpuSamples, ...]:
        """Return lowest, median and highest of each figure."""
        return tuple(
            GpuSamples(
                gpu=index,
                samples=len(readings),
                watts=_spread(readings, 0),
                celsius=_spread(readings, 1),
                clock=_spread(readings, 2),
                memory=_spread(readings, 3),
                pcie=_spread(readings, 4),
            )
            for index, readings in self._readings.items()
        )


def _spread(readings: list[_Reading], at: int) -> tuple[float, float, float] | None:
    values = [value for one in readings if (value := one[at]) is not None]
    return (min(values), statistics.median(values), max(values)) if values else None


def server_facts(server: Server, model: str, revision: str) -> ServerFacts:
    """Ask a server for version, model and cache; a pool's address has no version.

    Raises:
        ServerError: it lists no models.
        UsageError: it does not have ``model``.
    """
    listed = server.choose(model)
    version = ""
    with suppress(ServerError):
        version = server.version()
    labels: Mapping[str, str] = {}
    with suppress(ServerError, ValueError):
        for family in text_string_to_metric_families(server.call("GET", "/metrics").text):
            if family.name.startswith("vllm:cache_config_info"):
                labels = next((sample.labels for sample in family.samples), {})
    caching = labels.get("enable_prefix_caching", "")
    return ServerFacts(
        version=version,
        model=server.shown(server.model),
        root=server.shown(listed.root or ""),
        revision=revision,
        max_model_len=listed.max_model_len,
        prefix_caching={"True": True, "False": False}.get(caching),
        kv_cache_dtype=labels.get("cache_dtype", ""),
    )


def stack_facts(version: str, image: str, say: Callable[[str], None]) -> tuple[StackFacts, str]:
    """Return what was built, by the server's version, and the text of its ledger, "" without.

    The ledger is that of the image in which this runs, of ``image``, or of a bundle in dist/; it
    counts where it has the stack id and the mode of the server's version.

    Raises:
        BadFileError: ``image`` is not here.
        UsageError: the server does not run from ``image``.
    """
    match = _VERSION.fullmatch(version)
    stack, mode = (match["stack"], match["mode"]) if match else ("", "")
    digest, text = "", ""
    candidates = [Places.of_image().ledger, *sorted(layout.bundles().glob("*/**/ledger.json"))]
    if image:
        engine = engines.find(None, say=say, may_install=False)
        if not engine.has_image(image):
            raise BadFileError(
                f"{engine.name} has no image {image}",
                next_step=f"`{engine.name} images` lists them",
            )
        # An image that was made here has no digest of a registry.
        digest = engine.digest(image) or f"sha256:{engine.image_id(image)}"
        # An image of others has no ledger.
        with suppress(ToolFailedError):
            text = engine.run(image, "cat", str(Places.of_image({}).ledger))
        if text and not _is_of(text, Path(image), version):
            raise UsageError(
                f"the server is vLLM {version or 'of no version'}, and {image} is of another stack "
                "or mode",
                next_step="give --image the image that the server runs from, or leave it out",
            )
    for path in candidates if stack and not text else ():
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_text(encoding="utf-8")
        if _is_of(text, path, version):
            break
        text = ""
    facts = StackFacts(
        release=match["release"] if match else version.partition("+")[0],
        stack_id=stack,
        mode=mode,
        ledger_sha256=hashlib.sha256(text.encode()).hexdigest() if text else "",
        image=image,
        image_digest=digest,
    )
    return facts, text


def _is_of(text: str, path: Path, version: str) -> bool:
    try:
        return ledgers.parse(text, path).wheel_version == version
    except BadFileError:
        return False


def recipe_facts(name: str, overrides: Mapping[str, str]) -> RecipeFacts:
    """Return a recipe and what was set on top. Raises UsageError and BadFileError."""
    path = load.find(name)
    recipe = load.load(path)
    for key in overrides:
        if key not in recipe.defaults and key not in recipe.env:
            raise UsageError(
                f"{recipe.key} has no setting {key}{perhaps(key, recipe.defaults)}",
                next_step=f"`sm12x recipe show {recipe.key}` has its settings",
            )
    return RecipeFacts(
        key=recipe.key,
        model=recipe.model,
        text=path.read_text(encoding="utf-8"),
        runs_sha256=evidence.runs_sha256(recipe),
        overrides=overrides,
    )
