"""The report of `verify` as text, Markdown and JSON, and the options of the command."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from tests.unit.verifying import MemoryServer, gpu_of, seeing

from sm12x.commands import verify
from sm12x.commands.verify import command
from sm12x.core import declared
from sm12x.core.errors import (
    BadFileError,
    NoSpaceError,
    Sm12xError,
    UnknownVerdictError,
    UsageError,
)
from sm12x.core.text import MIB
from sm12x.doctor.host import Unseen
from sm12x.verify import memory, render
from sm12x.verify.cycles import Run, Settings
from sm12x.verify.report import Limits, VerifyReport, limits


def made(*servers: MemoryServer, cycles: int = 4) -> VerifyReport:
    settings = Settings(cycles=cycles, requests=2, limits=Limits(min_speed=0))
    run = Run(servers, settings, seeing(gpu_of(*servers)))
    run.run()
    return run.report()


def broken() -> VerifyReport:
    """A run that ends in its second cycle with words of a server that are Markdown."""

    def fail(call: str) -> None:
        if call == "A sleep 1" and server.sleeps == 1:
            raise Sm12xError("a|b `c` <script> *d*", next_step="mend it")

    server = MemoryServer(trouble=fail)
    return made(server)


def test_the_text_has_every_cycle_check_and_how_servers_are_left() -> None:
    report = made(MemoryServer(), MemoryServer(name="B", level=1))
    text = render.text(report)
    assert all(word in text for word in ("http://127.0.0.1:800A", "http://127.0.0.1:800B", "2.00"))
    assert text.count("A > B") == text.count("B > A") == 4
    assert all(f"{one.server} {one.check}: {one.text}" in text for one in report.checks)
    assert all(sentence in text for sentence in report.left)
    assert text.endswith("verdict: passed\n")


def test_a_run_that_stopped_says_where_and_why() -> None:
    text = render.text(broken())
    assert "cycle 2 of 4" in text
    assert "a|b `c` <script> *d*" in text
    assert "mend it" in text
    page = render.markdown(broken())
    assert r"\`c\` \<script> \*d\*" in page


def test_a_long_run_shows_its_beginning_and_its_end() -> None:
    report = made(MemoryServer(), cycles=60)
    rows = render.text(report).splitlines()
    assert any(row.startswith("...    30 more") for row in rows)
    assert any(row.startswith("60 ") for row in rows)
    assert not any(row.startswith("20 ") for row in rows)
    assert "| 20 | A |" in render.markdown(report)


@pytest.mark.parametrize("report", [made(MemoryServer(leak=MIB)), broken()])
def test_the_json_is_as_its_schema_says(report: VerifyReport) -> None:
    found = json.loads(declared.to_json(report))
    schema = declared.schema(VerifyReport, "serialization")
    jsonschema.validate(found, schema)
    assert found["turns"][0]["swap_seconds"] is None
    found["verdict"] = "well"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(found, schema)


def test_every_limit_is_an_option() -> None:
    names = {option for one in command.params for option in one.opts}
    assert {f"--{name.replace('_', '-')}" for name, _, _ in limits()} <= names
    assert all(meaning and default > 0 for _, default, meaning in limits())


@pytest.mark.parametrize(
    ("words", "kind", "name"),
    [
        ([], 2, ""),
        (["http://a:1", "http://b:1", "http://c:1"], 2, ""),
        (["http://a:1", "http://a:1/v1"], UsageError, "http://a:1"),
        (["http://a:1", "--save", "x.txt"], UsageError, ".json, .md or .png"),
        (["http://a:1", "--save", "report"], UsageError, "--save report"),
        (["http://a:1", "--save", "/no/such/x.md"], BadFileError, "/no/such"),
        (["http://a:1", "--gpus", "first"], UsageError, "--gpus 'first'"),
        (["http://a:1", "--model", "a", "--model", "b"], UsageError, "--model"),
        (["http://a:1", "--key-variable", "NOT_SET"], UsageError, "NOT_SET"),
        (["http://a:1", "--cycles", "0"], 2, "--cycles"),
        (["http://a:1", "--max-wake", "-1"], 2, "--max-wake"),
        (["http://a:1", "--max-wake", "nan"], 2, "--max-wake"),
        (["http://a:1", "--max-wake", "inf"], 2, "--max-wake"),
        (["http://a:1", "--min-speed", "60"], 2, "--min-speed"),
        (["http://a:1", "--level", "3"], 2, "--level"),
    ],
)
def test_wrong_usage_is_told_before_anything_is_asked(
    words: list[str], kind: int | type[Sm12xError], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    result = CliRunner().invoke(command, words)
    if isinstance(kind, int):
        assert result.exit_code == kind
        assert name in result.output
    else:
        assert isinstance(result.exception, kind)
        assert name in str(result.exception)


def test_each_server_has_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE", "1")
    monkeypatch.setenv("TWO", "2")
    monkeypatch.setenv("VLLM_API_KEY", "0")
    monkeypatch.delenv("VLLM_SLEEP_API_KEY", raising=False)

    def keys(*variables: str) -> list[str]:
        found = verify.servers_of(["http://a:1", "http://b:1"], variables, {}, None, 5.0)
        return [server._access.key for server in found]

    assert keys() == ["0", "0"]
    assert keys("ONE") == ["1", "1"]
    assert keys("ONE", "TWO") == ["1", "2"]
    monkeypatch.setenv("VLLM_SLEEP_API_KEY", "3")
    assert keys() == ["3", "3"]
    assert keys("ONE") == ["1", "1"]


def test_memory_is_looked_at_where_the_servers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "here", lambda host: host == "127.0.0.1")
    monkeypatch.setattr(memory, "_look", gpu_of(MemoryServer()))
    assert memory.watch(["http://127.0.0.1:1"], "auto").unseen == ""
    assert "gpu.example is not this machine" in memory.watch(["http://gpu.example"], "auto").unseen
    assert memory.watch(["http://gpu.example"], "all").unseen == ""
    assert memory.watch(["http://gpu.example"], "0").unseen == ""
    assert memory.watch(["http://127.0.0.1:1"], "none").unseen == "--gpus none"
    with pytest.raises(UnknownVerdictError, match="GPU 7"):
        memory.watch(["http://127.0.0.1:1"], "0,7")
    monkeypatch.setattr(memory, "_look", lambda: Unseen("NVML: no driver"))
    assert memory.watch(["http://127.0.0.1:1"], "auto").unseen == "NVML: no driver"
    with pytest.raises(UnknownVerdictError, match="NVML: no driver"):
        memory.watch(["http://127.0.0.1:1"], "all")


def test_a_full_disk_does_not_end_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = verify._Files([tmp_path / "x.json"])
    report = made(MemoryServer())
    assert saved.write(report, last=True) == {}
    assert json.loads((tmp_path / "x.json").read_text())["verdict"] == "passed"

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sm12x.core.files.write_output", full)
    faults = saved.write(report, last=True)
    assert list(faults) == [tmp_path / "x.json"]
    (error,) = map(verify._not_written, faults.items())
    assert isinstance(error, NoSpaceError)
    assert f"{tmp_path}/x.json" in str(error)


def test_a_file_that_cannot_be_written_does_not_keep_the_others(tmp_path: Path) -> None:
    paths = [tmp_path / f"{'n' * 300}.json", tmp_path / "x.json", tmp_path / "x.md"]
    faults = verify._Files(paths).write(made(MemoryServer()), last=True)
    assert list(faults) == paths[:1]
    assert all(path.is_file() for path in paths[1:])
    (error,) = map(verify._not_written, faults.items())
    assert isinstance(error, BadFileError)
    assert f"{'n' * 300}.json" in str(error)
