"""What spoils a server once it runs: each finding, and no finding where it does not hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit import doctorhost as fake
from tests.unit.doctorhost import GIB, Machine, findings, gb10, meminfo, rtx_pro, spark, workstation

from sm12x import layout
from sm12x.core import declared
from sm12x.doctor import knowledge
from sm12x.doctor.model import Diagnosis
from sm12x.recipes import load
from sm12x.recipes.model import Recipe
from sm12x.stack.model import base as bases
from sm12x.stack.model import series
from sm12x.wheel import ledger as ledgers
from sm12x.wheel.ledger import PatchEntry

SITE = "opt/venv/lib/python3.13/site-packages/nvidia/nccl/lib/libnccl.so.2"
RECIPE = "deepseek-v4-flash-rtx-pro-6000-tp4"


def nccl(root: Path, data: bytes, where: str = SITE) -> Path:
    path = root / where
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def bundle(folder: Path, machine: str = "x86_64", **versions: str | None) -> Path:
    """An audit whose ledger has these dependencies besides the usual; None takes one out."""
    audit = fake.bundle(folder, machine=machine)
    path = folder / "ledger.json"
    ledger = json.loads(path.read_text())
    for name, version in versions.items():
        name = name.replace("_", "-")
        if version is None:
            del ledger["dependencies"][name]
        else:
            ledger["dependencies"][name] = version
    path.write_text(json.dumps(ledger))
    return audit


# ---- NCCL for aarch64

AARCH64 = b"\x7fELF" + b"\0" * 14 + b"\xb7\0" + b"\0" * 100
OLD, NEW = (AARCH64 + b"NCCL version %s+cuda13.0\0" % number for number in (b"2.28.9", b"2.29.3"))


def test_a_pair_with_the_nccl_that_deadlocks(tmp_path: Path) -> None:
    # GIVEN the image's library, whatever version its package's metadata names
    path = nccl(tmp_path, OLD)
    (found,) = findings(spark(tmp_path))["net.nccl"]
    # THEN it is bad, because a port to another machine is active
    assert found.severity == "bad"
    assert f"NCCL 2.28.9 in {path}" in found.seen
    assert "2.29.3" in found.fix[0]
    assert "NVIDIA/nccl#2353" in found.sources


def test_one_machine_alone_may_have_it(tmp_path: Path) -> None:
    nccl(tmp_path, OLD)
    machine = spark(tmp_path)
    machine.files = {name: text for name, text in machine.files.items() if "infiniband" not in name}
    (found,) = findings(machine)["net.nccl"]
    assert found.severity == "warn"


def test_each_library_is_looked_at_once(tmp_path: Path) -> None:
    good = nccl(tmp_path, NEW)
    nccl(tmp_path, OLD, "usr/lib/aarch64-linux-gnu/libnccl.so.2")
    (tmp_path / "usr/lib64").mkdir()
    (tmp_path / "usr/lib64/libnccl.so.2").symlink_to(good)
    found = findings(spark(tmp_path, env={"VLLM_NCCL_SO_PATH": f"/{SITE}"}))["net.nccl"]
    assert sorted(each.severity for each in found) == ["bad", "ok"]


@pytest.mark.parametrize("data", [b"", b"\x7fELF", AARCH64], ids=["empty", "4", "no version"])
def test_a_damaged_library_is_not_taken_for_sound(tmp_path: Path, data: bytes) -> None:
    nccl(tmp_path, data)
    found = findings(spark(tmp_path)).get("net.nccl", [])
    assert [each.severity for each in found] in (["unknown"], [])
    # Only what names another machine is passed over: nothing of it could be loaded.
    assert bool(found) == (len(data) != 4)


def test_other_machines_need_no_look(tmp_path: Path) -> None:
    nccl(tmp_path, OLD)
    assert "net.nccl" not in findings(workstation(tmp_path))
    # ... nor is a library for x86_64 one of this machine's.
    other = tmp_path / "arm"
    nccl(other, b"\x7fELF" + b"\0" * 14 + b"\x3e\0" + b"\0" * 100)
    assert "net.nccl" not in findings(spark(other))


@pytest.mark.parametrize(
    ("version", "severity"),
    [("2.28.9", "bad"), ("2.29.2", "bad"), ("2.29.3", "ok"), ("2.30.7", "ok"), ("2.100.0", "ok")],
)
def test_on_the_host_the_ledger_says_which_nccl(
    tmp_path: Path, version: str, severity: str
) -> None:
    audit = bundle(tmp_path / "dist", machine="aarch64", nvidia_nccl_cu13=version)
    (found,) = findings(spark(tmp_path / "root"), audit)["net.nccl"]
    assert found.severity == severity


def test_nothing_is_said_where_nothing_is_known_of_nccl(tmp_path: Path) -> None:
    assert "net.nccl" not in findings(spark(tmp_path))


# ---- expandable segments


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(("gpus", "severity"), [(1, "info"), (2, "warn")])
def test_expandable_segments_in_the_shell(
    tmp_path: Path, variable: str, gpus: int, severity: str
) -> None:
    library = fake.nvml("590.48.01", [rtx_pro(index) for index in range(gpus)])
    env = {variable: "max_split_size_mb:64, expandable_segments:True"}
    (found,) = findings(workstation(tmp_path, library=library, env=env))["env.expandable-segments"]
    assert found.severity == severity
    assert f"unset {variable}" in found.fix


@pytest.mark.parametrize(
    "value", ["", "expandable_segments:False", "max_split_size_mb:64", "expandable_segments"]
)
def test_no_expandable_segments(tmp_path: Path, value: str) -> None:
    machine = workstation(tmp_path, env={"PYTORCH_CUDA_ALLOC_CONF": value})
    assert "env.expandable-segments" not in findings(machine)


def needs(recipe: Recipe, machine: Machine, audit: Path | None = None) -> Mapping[str, Diagnosis]:
    return {name: group[0] for name, group in findings(machine, audit, recipe=recipe).items()}


def test_a_recipe_that_turns_them_on(tmp_path: Path) -> None:
    recipe = load.load(layout.recipes() / f"{RECIPE}.yaml")
    assert recipe.sm12x is not None
    name = "env.expandable-segments"
    machine = workstation(tmp_path)
    assert name not in needs(recipe, machine)
    risky = replace(recipe, env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    command = risky.command.replace("--disable-custom-all-reduce", "")
    risky = replace(risky, command=command)
    assert needs(risky, machine)[name].severity == "warn"
    safe = replace(risky, command=f"{command.rstrip()} --disable-custom-all-reduce\n")
    assert name not in needs(safe, machine)
    alone = replace(risky, sm12x=replace(recipe.sm12x, gpus=1))
    assert name not in needs(alone, machine)


# ---- patches that make a check needless


def patched(audit: Path, subject: str) -> Path:
    """``audit`` with a ledger that has one more patch."""
    path = audit.with_name("ledger.json")
    ledger = ledgers.read(path)
    patch = PatchEntry(
        name="0001-x.patch", subject=subject, upstream="none", drop_when="never",
        witness="test_x.py", sha256="0" * 64, state="applied", native="",
    )  # fmt: skip
    declared.write_json(path, replace(ledger, patches=(*ledger.patches, patch)))
    return audit


SEGMENTS = "env.expandable-segments"
CURED = "Copy what a captured all-reduce reads where no IPC handle can be had"
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_a_check_does_not_fire_on_an_image_that_has_its_patch(tmp_path: Path) -> None:
    audit = bundle(tmp_path / "dist")
    machine = workstation(tmp_path / "root", env=EXPANDABLE)
    assert SEGMENTS in findings(machine, audit)
    assert SEGMENTS in findings(machine, patched(audit, "Some other patch"))
    assert SEGMENTS not in findings(machine, patched(audit, CURED))


def test_the_image_around_us_has_its_patch_too(tmp_path: Path) -> None:
    ledger = bundle(tmp_path / "dist").with_name("ledger.json")
    files = {"/opt/sm12x/ledger.json": ledger.read_text()}
    machine = workstation(tmp_path / "root", env=EXPANDABLE, files=files)
    assert SEGMENTS in findings(machine)
    patched(tmp_path / "dist/audit.json", CURED)
    machine.files["/opt/sm12x/ledger.json"] = ledger.read_text()
    assert SEGMENTS not in findings(machine)


def test_a_recipe_may_turn_segments_on_where_the_image_has_the_patch(tmp_path: Path) -> None:
    recipe = load.load(layout.recipes() / f"{RECIPE}.yaml")
    command = recipe.command.replace("--disable-custom-all-reduce", "")
    risky = replace(recipe, env=EXPANDABLE, command=command)
    audit = bundle(tmp_path / "dist")
    machine = workstation(tmp_path / "root")
    assert SEGMENTS in needs(risky, machine, audit)
    assert SEGMENTS not in needs(risky, machine, patched(audit, CURED))


def test_each_check_is_cured_by_a_patch_that_a_base_has() -> None:
    known = {subject for check in knowledge.load().checks.values() for subject in check.cured_by}
    stacks = [series.load(bases.load(version)) for version in bases.versions()]
    assert known <= {patch.subject for stack in stacks for patch in stack.patches}


# ---- the first start's compilers


@pytest.mark.parametrize(
    ("free", "cores", "jobs", "fitting"),
    [(480, "0-15", "20", 16), (32, "0-3,8-11", "8", None), (2, "0-1", "2", 1),
     (32, "0-15", "8", None), (32, "0-15", "12", 8), (32, "0-15", "many", 8)],
)  # fmt: skip
def test_compilers_that_do_not_fit(
    tmp_path: Path, free: int, cores: str, jobs: str, fitting: int | None
) -> None:
    files = {
        "/proc/meminfo": meminfo(MemTotal=503, MemFree=free, MemAvailable=free),
        "/sys/devices/system/cpu/online": cores,
    }
    machine = workstation(tmp_path / "root", files=files, env={"MAX_JOBS": jobs})
    (found,) = findings(machine, bundle(tmp_path / "dist"))["cache.cold"]
    assert found.severity == ("info" if fitting is None else "warn")
    assert [f"MAX_JOBS={fitting} " in command for command in found.fix] == (
        [] if fitting is None else [True]
    )


@pytest.mark.parametrize(
    ("free", "cores", "jobs"),
    [(480, "0-15", 16), (32, "0-15", 8), (32, "0-3,8-11", 8), (2, "0-1", 1)],
)
def test_where_nothing_is_given_the_image_sets_how_many(
    tmp_path: Path, free: int, cores: str, jobs: int
) -> None:
    files = {
        "/proc/meminfo": meminfo(MemTotal=503, MemFree=free, MemAvailable=free),
        "/sys/devices/system/cpu/online": cores,
    }
    (found,) = findings(workstation(tmp_path / "root", files=files), bundle(tmp_path / "dist"))[
        "cache.cold"
    ]
    assert (found.severity, found.fix) == ("info", ())
    assert f" {jobs} at a time" in found.seen


def test_a_spark_compiles_fewer_at_a_time(tmp_path: Path) -> None:
    files = {"/sys/devices/system/cpu/online": "0-19"}
    audit = bundle(tmp_path / "dist", machine="aarch64")
    (found,) = findings(spark(tmp_path / "root", files=files), audit)["cache.cold"]
    # 110 GiB are available, each compiler takes up to 8.
    assert " 13 at a time" in found.seen
    given = spark(tmp_path / "given", files=files, env={"MAX_JOBS": "20"})
    (found,) = findings(given, audit)["cache.cold"]
    assert "MAX_JOBS=13 " in found.fix[0]


def test_a_model_in_the_same_memory_leaves_room_for_fewer(tmp_path: Path) -> None:
    files = {"/sys/devices/system/cpu/online": "0-19"}
    audit = bundle(tmp_path / "dist", machine="aarch64")
    recipe = load.load(layout.recipes() / "gpt-oss-120b-gb10.yaml")
    assert recipe.sm12x is not None
    fitting = int((110 - recipe.sm12x.memory.resident) / 8)
    machine = spark(tmp_path / "root", files=files)
    (found,) = findings(machine, audit, recipe=recipe)["cache.cold"]
    assert f" {max(1, fitting)} at a time" in found.seen
    assert fitting < 13


def test_no_compiling_with_a_warm_cache_or_kernels_in_the_image(tmp_path: Path) -> None:
    name = "cache.cold"
    files = {"/proc/meminfo": meminfo(MemTotal=503, MemFree=8, MemAvailable=8)}
    audit = bundle(tmp_path / "dist")
    for release, severity in (("0.6.8.post1", "ok"), ("0.6.1", "info")):
        cache = tmp_path / release
        ops = cache / f"flashinfer/.cache/flashinfer/{release}/120a/cached_ops"
        ops.mkdir(parents=True)
        (ops / "a.so").write_text("")
        machine = workstation(tmp_path / f"root-{release}", files=files)
        assert findings(machine, audit, [cache])[name][0].severity == severity
    ready = bundle(tmp_path / "ready", flashinfer_jit_cache="0.6.8.post1")
    assert name not in findings(workstation(tmp_path / "a", files=files), ready)
    assert name not in findings(workstation(tmp_path / "b", files=files))
    full = bundle(tmp_path / "full")
    full.with_name(ledgers.FLASHINFER_REQUEST).write_text("{}")
    assert findings(workstation(tmp_path / "d", files=files), full)[name][0].severity == "ok"
    for text in ("?", "0-", "-3", "a-b"):
        odd = {**files, "/sys/devices/system/cpu/online": text}
        machine = workstation(tmp_path / f"c{text}", files=odd)
        assert findings(machine, audit)[name][0].severity == "unknown"


# ---- busy, and next to no power


@pytest.mark.parametrize(
    ("load", "is_stuck"),
    [((96, 18), True), ((100, 25), True), ((96, 60), False), ((30, 18), False), (None, False)],
)
def test_a_spark_whose_kernel_waits(
    tmp_path: Path, load: tuple[int, int] | None, is_stuck: bool
) -> None:
    machine = spark(tmp_path, library=fake.nvml("580.142", [gb10(load=load)]))
    found = findings(machine).get("gpu.stuck", [])
    assert [each.severity for each in found] == (["warn"] if is_stuck else [])
    if is_stuck and load:
        assert f"{load[1]} W" in found[0].seen
        assert found[0].fix[0].startswith("ncclras")


def test_workstation_gpus_that_wait_are_named_each(tmp_path: Path) -> None:
    gpus = [rtx_pro(0, load=(100, 120)), rtx_pro(1, load=(100, 120)), rtx_pro(2, load=(100, 420))]
    found = findings(workstation(tmp_path, library=fake.nvml("590.48.01", gpus)))["gpu.stuck"]
    assert [each.seen.partition(" NVIDIA")[0] for each in found] == ["GPU 0", "GPU 1"]
    assert "local-inference-lab/rtx6kpro#15 (100 % at 120 W)" in found[0].sources


# ---- how unified memory is kept


def test_a_spark_that_keeps_too_much_free(tmp_path: Path) -> None:
    files = {"/proc/sys/vm/min_free_kbytes": str(4 * GIB // 1024)}
    (found,) = findings(spark(tmp_path, files=files))["memory.reclaim"]
    assert found.severity == "warn"
    assert "4.0 GiB" in found.seen


def test_a_spark_that_swaps(tmp_path: Path) -> None:
    memory = meminfo(MemTotal=121, MemFree=100, MemAvailable=110, SwapTotal=16, SwapFree=16)
    files = {"/proc/meminfo": memory, "/proc/sys/vm/swappiness": "60"}
    (found,) = findings(spark(tmp_path, files=files))["memory.reclaim"]
    assert found.severity == "info"
    assert found.fix[0].startswith("sudo sysctl vm.swappiness=0")


def test_memory_that_is_kept_as_it_should_be(tmp_path: Path) -> None:
    assert findings(spark(tmp_path / "a"))["memory.reclaim"][0].severity == "ok"
    # Without swap nothing is swapped, and on a workstation the GPU has memory of its own.
    files = {"/proc/sys/vm/swappiness": "60"}
    assert findings(spark(tmp_path / "b", files=files))["memory.reclaim"][0].severity == "ok"
    assert "memory.reclaim" not in findings(workstation(tmp_path / "c", files=files))
    unread = {"/proc/sys/vm/swappiness": "?"}
    assert findings(spark(tmp_path / "d", files=unread))["memory.reclaim"][0].severity == "unknown"


# ---- the share of unified memory


@pytest.mark.parametrize(("share", "severity"), [("0.88", "warn"), ("0.85", None), ("x", None)])
def test_a_recipe_that_takes_most_of_unified_memory(
    tmp_path: Path, share: str, severity: str | None
) -> None:
    recipe = load.load(layout.recipes() / "deepseek-v4-flash-gb10-x2.yaml")
    recipe = replace(recipe, defaults={**recipe.defaults, "gpu_memory_utilization": share})
    found = needs(recipe, spark(tmp_path)).get("recipe.utilization")
    assert (found.severity if found else None) == severity
    if found:
        assert "gpu_memory_utilization=0.85" in found.fix[0]


def test_a_workstation_may_be_filled(tmp_path: Path) -> None:
    recipe = load.load(layout.recipes() / f"{RECIPE}.yaml")
    recipe = replace(recipe, defaults={**recipe.defaults, "gpu_memory_utilization": "0.95"})
    assert "recipe.utilization" not in needs(recipe, workstation(tmp_path))


# ---- settings that others have met trouble with


def reports(recipe: Recipe, machine: Machine, *words: str) -> dict[str, Diagnosis]:
    """The findings about a recipe whose command has more words, by the id of the report."""
    recipe = replace(recipe, command=" ".join((recipe.command.rstrip(), *words)))
    found = findings(machine, recipe=recipe).get("recipe.settings", ())
    ids = {report.seen: report.id for report in knowledge.load().reports}
    return {ids[one.seen.partition(": ")[2]]: one for one in found}


DSPARK = """--speculative-config '{{"method":"dspark"}}'"""


@pytest.mark.parametrize(
    ("words", "shared", "report", "severity"),
    [
        ((DSPARK,), False, "draft-cache", "warn"),
        ((DSPARK, "--no-enable-prefix-caching"), False, "draft-cache", None),
        (("--kv-cache-dtype", "fp8_e4m3"), False, "fp8-cache", "info"),
        (("--kv-cache-dtype", "fp8", "--kv-cache-memory-bytes", "1"), False, "fp8-cache", None),
        (("--kv-cache-dtype", "nvfp4"), False, "nvfp4-cache", "info"),
        (("--cpu-offload-gb", "8"), False, "offload", "warn"),
        (("--cpu-offload-gb", "0"), False, "offload", None),
        (
            ("--kv-transfer-config", """'{{"kv_connector":"OffloadingConnector"}}'"""),
            False,
            "offload",
            "warn",
        ),
        (("--safetensors-load-strategy", "eager"), True, "eager-loader", "warn"),
        (("--safetensors-load-strategy", "eager"), False, "eager-loader", None),
        (("--safetensors-load-strategy", "lazy"), True, "eager-loader", None),
        (("--tensor-parallel-size", "1"), False, "autotune", None),
    ],
)
def test_settings_that_others_have_met_trouble_with(
    tmp_path: Path, words: tuple[str, ...], shared: bool, report: str, severity: str | None
) -> None:
    name = "gpt-oss-120b-gb10" if shared else "gpt-oss-120b-rtx-pro-6000"
    recipe = load.load(layout.recipes() / f"{name}.yaml")
    machine = spark(tmp_path) if shared else workstation(tmp_path)
    found = reports(recipe, machine, *words).get(report)
    assert (found.severity if found else None) == severity
    if found:
        assert found.sources != ("data/doctor.toml",)
        assert found.seen.startswith(f"{name}, --")


def test_reports_of_models_and_of_several_gpus(tmp_path: Path) -> None:
    several = load.load(layout.recipes() / f"{RECIPE}.yaml")
    assert reports(several, workstation(tmp_path / "a"))["autotune"].severity == "info"
    quiet = reports(several, workstation(tmp_path / "b"), "--no-enable-flashinfer-autotune")
    assert "autotune" not in quiet
    model = load.load(layout.recipes() / "qwen3.8-27b-fp8.yaml")
    assert "gated-delta-cache" in reports(model, spark(tmp_path / "c"))
    assert "gated-delta-cache" not in reports(model, workstation(tmp_path / "d"))
    other = load.load(layout.recipes() / "gpt-oss-120b-gb10.yaml")
    assert "gated-delta-cache" not in reports(other, spark(tmp_path / "e"))


# ---- versions with known trouble


@pytest.mark.parametrize(
    ("version", "gpu", "source"),
    [
        ("610.43.02", "gb10", "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#114"),
        ("595.91.07", "gb10", "NVIDIA/open-gpu-kernel-modules#1358"),
        ("595.71.05", "rtx", "NVIDIA/open-gpu-kernel-modules#1223"),
        ("610.57.04", "rtx", "NVIDIA/open-gpu-kernel-modules#1277"),
        ("580.142", "gb10", ""),
        ("590.48.01", "rtx", ""),
    ],
)
def test_drivers_of_newer_reports(tmp_path: Path, version: str, gpu: str, source: str) -> None:
    library = fake.nvml(version, [gb10() if gpu == "gb10" else rtx_pro(0)])
    machine = (spark if gpu == "gb10" else workstation)(tmp_path, library=library)
    found = findings(machine)["driver.trouble"]
    told = [one for each in found for one in each.sources if each.severity == "warn"]
    assert any(one.startswith(source) for one in told) if source else not told
