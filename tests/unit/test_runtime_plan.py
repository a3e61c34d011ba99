"""The image's verb `plan`, up to the point where vLLM is asked."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

from sm12x import layout
from sm12x.core.errors import BadFileError, FindingsError, UsageError
from sm12x.plan.figures import Question, Source
from sm12x.runtime import plan, planner
from sm12x.runtime.places import Places
from sm12x.wheel import ledger as ledgers

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def places(tmp_path: Path) -> Places:
    return Places(root=layout.recipes().parent, site=tmp_path, cuda_home=tmp_path, cache=tmp_path)


def model(folder: Path, **more: object) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **more}))
    return folder


def test_a_config_alone_is_enough(tmp_path: Path) -> None:
    assert plan.read(model(tmp_path)) == Source(tensors=None, quantized=False)


@pytest.mark.parametrize(
    "more",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        {"compression_config": {"format": "pack-quantized"}},
    ],
)
def test_a_quantization_is_seen_where_configs_declare_it(
    tmp_path: Path, more: dict[str, object]
) -> None:
    assert plan.read(model(tmp_path, **more)).quantized


def test_a_quantization_is_seen_in_modelopts_own_file(tmp_path: Path) -> None:
    model(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert plan.read(tmp_path).quantized


def test_the_size_is_that_of_the_headers(tmp_path: Path) -> None:
    model(tmp_path)
    header = json.dumps({"a": {"data_offsets": [0, 4096]}, "__metadata__": {}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert plan.read(tmp_path).tensors == 4096


def test_the_size_is_that_of_the_index_where_files_are_missing(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 4096}, "weight_map": {"a": "model-1.safetensors"}}
    (model(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert plan.read(tmp_path).tensors == 4096


def test_folders_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFileError):
        plan.read(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadFileError, match="LoRA"):
        plan.read(tmp_path)


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"architectures": []}', '{"model_type": 1}', "[" * 99999, "\xff"]
)
def test_damaged_configs_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(BadFileError, match=r"config\.json"):
        plan.read(tmp_path)


def test_a_header_of_two_terabytes_is_refused(tmp_path: Path) -> None:
    (model(tmp_path) / "model.safetensors").write_bytes(struct.pack("<Q", 2 << 40) + b"{}")
    with pytest.raises(BadFileError, match=r"model\.safetensors"):
        plan.read(tmp_path)


def test_a_sweep_is_every_combination() -> None:
    assert [*plan.sweep(None, None)] == [()]
    assert len([*plan.sweep((1, 2, 4), (8192, 32768))]) == 6
    assert [*plan.sweep((2,), None)] == [("--tensor-parallel-size", "2")]


def test_a_refusal_of_vllm_is_the_answers_failure() -> None:
    question = Question(folder="/model", env={}, arguments=("--tp", "3"))
    answer = plan.conclude(
        "ValueError: 8 heads",
        question,
        Source(tensors=1, quantized=False),
        release="0.33.0",
        stack="0123abcd",
        card="gb10",
    )
    assert (answer.figures, answer.failure) == (None, "ValueError: 8 heads")


@pytest.mark.parametrize("words", [["--tp", "x"], ["--kv-gib", "-1"], ["--nonsense"]])
def test_wrong_options_are_wrong_usage(words: list[str]) -> None:
    with pytest.raises(UsageError):
        plan.run(words)


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--", "org/Model", "--max-model-len", "8192"], ("org/Model", "--max-model-len", "8192")),
        (["--", "--json"], ("--json",)),
        ([], ()),
    ],
)
def test_what_follows_the_dashes_is_vllms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], arguments: tuple[str, ...]
) -> None:
    questions: list[Question] = []
    ledger = SimpleNamespace(base_version="0.33.0", stack_id="0123abcd")
    monkeypatch.setattr(ledgers, "read", lambda path: ledger)
    monkeypatch.setattr(planner, "prepare", lambda card: None)

    def ask(question: Question) -> str:
        questions.append(question)
        return "refused"

    monkeypatch.setattr(planner, "ask", ask)
    with pytest.raises(FindingsError):
        plan.run(["--checkpoint", str(model(tmp_path)), "--tp", "2", *words])
    (question,) = questions
    assert question.arguments == (*arguments, "--tensor-parallel-size", "2")


def test_the_stand_in_goes_before_a_driver(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/lib/driver")
    env = plan.process_environment(places)
    stand_in = str(places.stand_in.parent)
    assert env["LD_LIBRARY_PATH"].split(":") == [stand_in, "/usr/lib/driver"]
    monkeypatch.setenv("LD_LIBRARY_PATH", env["LD_LIBRARY_PATH"])
    assert plan.process_environment(places) == env
    assert env["HF_HUB_OFFLINE"] == "1"


def test_an_errors_reason_is_one_line() -> None:
    error = ValueError("1 validation error\n  dtype\n    [type=bad, input_value=7] no")
    assert planner.reason(error) == "ValueError: 1 validation error dtype no"


def test_a_kernel_that_needs_a_gpu_is_named() -> None:
    error = NotImplementedError("_C::quant: attempted to run this operator with Meta tensors, but")
    assert planner.reason(error) == "needs a GPU to say it: _C::quant"


def test_a_key_that_a_configuration_lacks_is_named() -> None:
    error = AttributeError("'DeepseekV41Config' object has no attribute 'hc_eps'")
    assert planner.reason(error).startswith("config.json has no hc_eps")


def test_where_a_release_trips_over_a_value_is_named() -> None:
    def heads() -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        heads()
    assert "in heads of test_runtime_plan.py" in planner.reason(caught.value)


def test_a_folder_that_holds_no_model_leaves_the_others_their_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SimpleNamespace(base_version="0.33.0", stack_id="0123abcd")
    monkeypatch.setattr(ledgers, "read", lambda path: ledger)
    monkeypatch.setattr(planner, "prepare", lambda card: None)
    asked: list[str] = []

    def ask(question: Question) -> str:
        asked.append(question.folder)
        return "refused"

    monkeypatch.setattr(planner, "ask", ask)
    (tmp_path / "empty").mkdir()
    (tmp_path / "good").mkdir()
    model(tmp_path / "good")
    places = ["--checkpoint", str(tmp_path / "empty"), "--checkpoint", str(tmp_path / "good")]
    with pytest.raises(FindingsError, match="empty"):
        plan.run(places)
    assert asked == [str(tmp_path / "good")]
