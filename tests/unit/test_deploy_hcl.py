"""HCL as `nomad fmt` leaves it; tests/nomad compares with the formatter itself."""

from __future__ import annotations

import pytest

from sm12x.deploy import hcl
from sm12x.deploy.hcl import Writer


def test_equals_signs_of_neighbours_stand_in_line() -> None:
    out = Writer()
    with out.block("task", "vllm"):
        out.text("driver", "docker")
        out.attr("kill_timeout", '"2m"')
        out.comment("reason")
        out.attr("x", "1")
        out.heredoc("data", "one\n\n${two}")
    assert str(out) == (
        'task "vllm" {\n'
        '  driver       = "docker"\n'
        '  kill_timeout = "2m"\n'
        "  # reason\n"
        "  x    = 1\n"
        "  data = <<-EOT\n"
        "    one\n"
        "\n"
        "    $${two}\n"
        "  EOT\n"
        "}\n"
    )


def test_a_long_list_breaks_the_row_of_equals_signs() -> None:
    out = Writer()
    out.attr("before", "1")
    out.attr("words", hcl.listed([hcl.quoted("w" * 30)] * 3))
    out.attr("a", "2")
    assert str(out).splitlines()[1:3] == ["words = [", f'  "{"w" * 30}",']
    assert str(out).splitlines()[-1] == "a = 2"


def test_strings_are_literal_unless_said_otherwise() -> None:
    assert hcl.quoted('a "b" \\ ${c} %{d}\n') == '"a \\"b\\" \\\\ $${c} %%{d}\\n"'
    assert hcl.runtime("${NOMAD_IP_http}") == '"${NOMAD_IP_http}"'


def test_blank_lines_are_neither_doubled_nor_left_at_the_ends_of_blocks() -> None:
    out = Writer()
    with out.block("a"):
        out.blank()
        out.attr("b", "1")
        out.blank()
        out.blank()
    assert str(out) == "a {\n  b = 1\n}\n"


def test_a_long_comment_is_wrapped_and_one_with_leading_blanks_is_not() -> None:
    out = Writer()
    out.comment("word " * 30, "  " + "x " * 60)
    lines = str(out).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines[:2])) <= 100 < len(lines[2])


def test_a_text_cannot_end_its_heredoc() -> None:
    with pytest.raises(ValueError, match="EOT"):
        Writer().heredoc("data", "a\n  EOT\n")
