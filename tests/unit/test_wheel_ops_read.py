"""Op schemas in the constants of a library."""

from __future__ import annotations

import pytest

from sm12x.wheel.assemble import torch_ops


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("silu_and_mul(Tensor! result, Tensor input) -> ()", ["silu_and_mul"]),
        ("_C::rotate(Tensor x) -> Tensor", ["rotate"]),
        (
            "scaled_mm.out(Tensor a, float[] b=[], *, Tensor(a!) out) -> Tensor(a!)",
            ["scaled_mm.out"],
        ),
        # Schemas are written over several lines.
        ("    fwd(Tensor q,\n        int n) -> (Tensor, Tensor)", ["fwd"]),
        ("see f(x) -> y for more", []),
        ("[](int x) -> int", []),
        ("Tensor input) -> ()", []),
        ("meta_size", []),
    ],
)
def test_a_schema_is_a_whole_text(text: str, names: list[str]) -> None:
    for data in (text, f"\0{text}\0", f"other\0{text}\0more() \0"):
        assert list(torch_ops.schemas(data.encode())) == names


def test_a_text_longer_than_any_schema_is_passed_over() -> None:
    data = b"x(" + b"a" * 100_000 + b") -> Tensor"
    assert list(torch_ops.schemas(data)) == []
