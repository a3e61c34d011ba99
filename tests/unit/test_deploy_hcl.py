"""HCL as `nomad fmt` leaves it; tests/nomad compares with the formatter itself."""

from __future__ import annotations

import pytest

from sm12x.deploy import hcl
from sm12x.deploy.hcl import Hcl


def test_equals_signs_of_neighbours_stand_in_line() -> None:
    assert hcl.rows([("driver", "docker"), ("kill_timeout", Hcl("x")), ("n", 2)], 2) == (
        '  driver       = "docker"\n  kill_timeout = x\n  n            = 2'
    )


def test_a_long_list_breaks_the_row_of_equals_signs() -> None:
    lines = hcl.rows([("before", 1), ("words", ["w" * 30] * 3), ("a", 2)]).splitlines()
    assert lines[:3] == ["before = 1", "words = [", f'  "{"w" * 30}",']
    assert lines[-1] == "a = 2"


def test_strings_are_literal_unless_said_otherwise() -> None:
    assert hcl.quoted('a "b" \\ ${c} %{d}\n\r') == '"a \\"b\\" \\\\ $${c} %%{d}\\n\\r"'
    assert hcl.runtime("${NOMAD_IP_http}") == '"${NOMAD_IP_http}"'
    assert hcl.listed(["${a}", hcl.runtime("${b}")]) == '["$${a}", "${b}"]'
    assert hcl.inside('"') == '\\"'


@pytest.mark.parametrize("text", ["", "a b", "a=b", "1a", 'a"', "a.b", "a\n", "ä"])
def test_what_cannot_be_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        hcl.rows([(text, "x")])


def test_a_comment_is_wrapped_and_cannot_end_by_itself() -> None:
    lines = hcl.comment("word " * 30).splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 100
    assert hcl.comment("one\n\ntwo\r\u2028three") == "# one two three"
    assert hcl.comment(" ") == "#"


def test_lines_of_text_keep_their_blanks_and_their_template_marks() -> None:
    assert hcl.heredoc("one\n\n  ${two}\n", 2) == "<<-EOT\n    one\n\n      $${two}\n  EOT"


def test_a_text_cannot_end_its_heredoc() -> None:
    assert hcl.heredoc("a\n  EOT\nEOT_ \n", 0) == "<<-EOT__\n  a\n    EOT\n  EOT_ \nEOT__"
