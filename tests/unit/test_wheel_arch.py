"""Architecture lists: what SM12x cannot use is refused with what was meant."""

from __future__ import annotations

import pytest

from sm12x.core.errors import BadArchitectureError
from sm12x.stack.model import base
from sm12x.wheel.toolchain import arch

DEFAULT = "12.0a;12.1a"


@pytest.mark.parametrize(
    ("text", "said", "meant"),
    [
        ("", "is empty", DEFAULT),
        (" ; ", "is empty", DEFAULT),
        ("12.1", "generic target", "use 12.1a"),
        ("12.0a;12.1+PTX", "generic target", r"use 12\.1a\+PTX"),
        ("sm_120", "'sm_120' is not an architecture", "use 12.0a"),
        ("sm_121f", "is not an architecture", "use 12.1f"),
        ("compute_90", "is not an architecture", "use 9.0"),
        ("120", "is not an architecture", "use 12.0a"),
        ("blackwell", "is not an architecture", "12.0a, 12.1a or 12.0f"),
        ("12.1f", "leaves out 12.0", "use 12.0f"),
        ("12.5a", "no device", "12.0a or 12.1a"),
        ("9.0", "no target of 9.0 runs on SM12x", "add 12.0a or 12.1a"),
        ("9.0a,10.0f", "no target of 9.0a;10.0f runs", "add 12.0a"),
    ],
)
def test_what_cannot_be_used_is_refused(text: str, said: str, meant: str) -> None:
    with pytest.raises(BadArchitectureError, match=said) as caught:
        arch.validate(text, default=DEFAULT)
    assert caught.match(meant)


@pytest.mark.parametrize("text", ["12.0a", "12.1a", "12.0f", "12.0", "9.0;12.0a", "12.0a+PTX"])
def test_what_runs_is_kept(text: str) -> None:
    assert arch.to_text(arch.validate(text, default=DEFAULT)) == text


def test_a_target_named_twice_counts_once() -> None:
    assert arch.to_text(arch.validate("12.0a 12.0a,12.1a", default=DEFAULT)) == DEFAULT


@pytest.mark.parametrize("version", base.versions())
def test_each_bases_default_is_valid(version: str) -> None:
    default = base.load(version).toolchain.arch_list
    assert arch.to_text(arch.validate(default, default=default)) == default
