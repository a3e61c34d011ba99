"""Random commands of recipes: arguments reach the server as bash itself runs the command.

`SM12X_COMMANDS=6000` runs that many.
"""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from sm12x.core.errors import Sm12xError
from sm12x.recipes import load
from sm12x.recipes.render import Rendered, render

COUNT = int(os.environ.get("SM12X_COMMANDS", "200"))
PIN = ["--revision", "0123456789abcdef0123456789abcdef01234567"]
EXTRA = ["--seed", "1 2", "--name", "it's $HOME"]
STUB = """#!/bin/sh
{ printf '%s\\0' "$@"; printf '\\1\\0'; } >> "$OUT"
"""
WORDS = r"""
8000~~a~~'a b'~~"a b"~~a\ b~~''~~""~~"$VAR"~~$VAR~~${VAR}~~'$VAR'~~$(echo x y)~~"$(echo "x  y" '2')"
`echo z`~~$((1+2))~~$'a\tb\'c'~~'{"a":1,"b":[2]}'~~"{\"a\":1}"~~a#b~~\#x~~'#y'~~a'b'"c"~~{a,b}
x{1..2}~~a=b~~--x=1~~it\'s~~"it's"~~"a'b"~~\$VAR~~"\$VAR"~~"\`"~~/x~~*no*~~${NO:-d}~~a\;b
"${NO:-${VAR}}"~~${NO:-'}'}~~'a|b'~~"a&b"~~!x~~{}~~[1,2]~~@~~"a\\"~~a\\~~"# no"~~$~~"$"~~-1
""".strip().replace("\n", "~~").split("~~")  # fmt: skip
WORDS += ['"a\\\nb"', "a\\\nb", "'a\\\nb'", "'a\nb'", "~", "é"]
BLANKS = [" ", " ", "  ", "\t", " \\\n    ", " \\\n", " \\\n  \\\n   ", "\\\n  "]
AROUND = [
    *[("", "")] * 12,
    *[("exec ", ""), ("A=1 ", ""), ("A='x y' exec ", ""), ("cd /tmp && ", ""), ("set -e\n", "")],
    *[("export Q='a;b'; ", ""), ("# it's a comment\n", ""), ("false || ", ""), ("env Z=1 ", "")],
    *[("( ", "\n)"), ("{ ", "\n}"), ("if true; then ", "\nfi"), ("for i in 1; do ", "\ndone")],
    *[("cat <<E >f\nvllm serve 'x\nE\n", ""), ("cat <<-'E F' | cat\n\t$(vllm\n\tE F\n", "")],
    *[("echo vllm serve m && ", ""), ("[[ -d / && 1 < 2 ]] && ", ""), ("cat <<<'x'; ", "")],
    *[("X=$(echo 'a)' ) ", ""), ("true & ", ""), ("(cd /; true) && ", ""), ("> f ", "")],
]
BEHIND = [
    *[""] * 6,
    *[" # comment it's", "\n# --seed 9", "\n  # a\n  # b\n", " 2>&1 | cat", " | tee -a f"],
    *[
        " &\nwait $!",
        " >f 2>&1",
        " && echo done",
        "; echo end #x",
        " |& cat",
        " &>f",
        " ;",
        " &\nwait",
    ],
]


def command(draw: random.Random) -> str:
    before, after = draw.choice(AROUND)
    text = before + draw.choice(["vllm serve", "vllm serve", "vllm \\\n serve", "'vllm' serve"])
    for _ in range(draw.randint(0, 6)):
        option = draw.choice(["--port", "-tp", "--x", "--api-key"])
        text += draw.choice(BLANKS) + draw.choice([option, draw.choice(WORDS)])
        text += draw.choice([" 2>f", " >/dev/null"]) if draw.random() < 0.04 else ""
    return text + draw.choice(BEHIND) + after


def calls(argv: Sequence[str], folder: Path) -> list[list[str]]:
    """The arguments of each `vllm` that a command line starts."""
    out = folder / "out"
    out.write_bytes(b"")
    env = {"PATH": f"{folder}/bin:/usr/bin:/bin", "VAR": "v w", "OUT": str(out), "HOME": "/x"}
    subprocess.run(argv, cwd=folder / "cwd", env=env, capture_output=True, timeout=20, check=False)
    found: list[list[str]] = [[]]
    for word in out.read_bytes().decode().split("\0")[:-1]:
        found[-1].append(word)
        if word == "\1":
            found[-1].pop()
            found.append([])
    return found[:-1]


def rendered(text: str, folder: Path) -> Rendered:
    path = folder / "x.yaml"
    top = {"recipe_version": "1", "name": "x", "container": "y", "model_revision": PIN[1]}
    top["command"] = text.replace("{", "{{").replace("}", "}}")
    path.write_text(yaml.safe_dump(top))
    return render(load.load(path), settings={}, extra=EXTRA, environ={}, solo=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("bin", "cwd"):
        (tmp_path / name).mkdir()
    stub = tmp_path / "bin" / "vllm"
    stub.write_text(STUB)
    stub.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("part", range(4))
def test_arguments_reach_the_server_as_bash_runs_it(folder: Path, part: int) -> None:
    direct = run = 0
    for seed in range(part, COUNT, 4):
        text = command(random.Random(seed))  # noqa: S311
        plain = calls(("bash", "-c", text), folder)
        made = rendered(text, folder)
        assert calls(made.argv, folder) == [[*words, *PIN, *EXTRA] for words in plain], (seed, text)
        assert made.serve is not None, (seed, text)
        if made.argv[0] == "vllm":
            assert [["serve", *made.serve[: -len(PIN + EXTRA)]]] == plain, (seed, text)
            direct += 1
        run += bool(plain)
    assert run > COUNT / 4 * 0.9
    assert direct


@pytest.mark.parametrize("part", range(4))
def test_no_soup_of_characters_crashes_or_moves_an_argument(folder: Path, part: int) -> None:
    pieces = [
        *"'\"\\ $#;&|<>(){}\n\tab-=*~!      ",
        "\\\n",
        "&& ",
        "echo ",
        "<<",
        "2>",
        "$(",
        "A=1 ",
    ]
    taken = 0
    for seed in range(part, COUNT, 4):
        draw = random.Random(seed)  # noqa: S311
        words = [draw.choice(pieces) for _ in range(draw.randint(1, 14))]
        words.insert(draw.randint(0, len(words)), "vllm serve m ")
        text = "".join(words)
        try:
            made = rendered(text, folder)
        except Sm12xError:
            continue
        # A backslash at the end is trimmed, as eugr's runner does.
        if made.serve is None or text.rstrip().endswith("\\"):
            continue
        if subprocess.run(("bash", "-n", "-c", text), capture_output=True, check=False).returncode:
            continue
        if made.argv[0] not in ("bash", "vllm"):
            continue
        plain = calls(("bash", "-c", text), folder)
        assert calls(made.argv, folder) == [[*words, *PIN, *EXTRA] for words in plain], (seed, text)
        taken += 1
    assert taken > COUNT / 4 * 0.02
