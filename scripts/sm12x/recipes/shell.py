"""Reads a recipe's command as bash reads it: its simple commands and their words.

No library: the image has none that reads bash, and recipes are rendered there too. Constructs that
are not read (`case`, functions, arrays, ...) are named in ``Script.unread``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sm12x.recipes import options

# A blank behind the backslash is an oversight, which sparkrun mends as well.
_CONTINUED = re.compile(r"(?:[ \t]*\\[ \t]*(?:\n|\Z))+[ \t]*")
_COMMENT = re.compile(r"[ \t]*#[^\n]*")
_BLANKS = re.compile(r"[ \t]+")
_REDIRECTION = re.compile(r"(?:\d*(?:<<<|<<-?|<>|[<>]&|>>|>\||[<>])|&>>?)(?!\()")
_OPERATOR = re.compile(r"&&|\|\||\|&|;(?!;)|[&|\n()]")
_EXPANSION = re.compile(r"\$(?:\w+|[@*#?$!-]|\(\([^()'\"`<]*\)\))|`(?:[^`\\]|\\.)*`", re.DOTALL)
_ANSI_C = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)
# Operators between commands of which the last one takes the words at the end of the text.
_IN_TURN = {"&&", ";", "\n"}
# Ends of compound commands: no words may follow.
_ENDS = ("fi", "done", "}")
_PRINTS = ("echo", "printf")
_QUOTED_SERVER = re.compile(r"vllm\s+serve\s|-m\s+vllm\.entrypoints")


class UnreadError(Exception):
    """Words cannot be put into the command; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A simple command. ``end`` is where its last word ends; ``live``: a shell has to expand it."""

    words: tuple[str, ...]
    end: int
    live: bool

    @property
    def serve(self) -> tuple[str, ...] | None:
        """The arguments of vLLM's server, None where the command is another one."""
        at = None if self.words[0] in _PRINTS else options.server(self.words)
        return None if at is None else self.words[at:]


@dataclass(frozen=True, kw_only=True)
class Script:
    """``edits`` are (start, end, replacement): no comments, and continued lines joined."""

    text: str
    commands: tuple[Command, ...]
    edits: tuple[tuple[int, int, str], ...] = ()
    operators: frozenset[str] = frozenset()
    unread: str = ""

    @property
    def plain(self) -> bool:
        """Whether it is one command that needs no shell."""
        alone = len(self.commands) == 1 and self.operators <= {"\n"} and not self.unread
        return alone and not self.commands[0].live

    def server(self) -> Command | None:
        """The command that starts vLLM's server, None where none does.

        Raises:
            UnreadError: there are several, or it cannot be told.
        """
        if self.unread:
            raise UnreadError(self.unread)
        servers = [one for one in self.commands if one.serve is not None]
        if len(servers) > 1:
            raise UnreadError(f"it starts `vllm serve` {len(servers)} times")
        others = [one for one in self.commands if one.words[0] not in _PRINTS]
        if not servers and any(_QUOTED_SERVER.search(word) for one in others for word in one.words):
            raise UnreadError("`vllm serve` stands in a quoted text")
        return servers[0] if servers else None

    def last(self) -> Command:
        """The command that takes words at the end of the text. Raises UnreadError without one."""
        last = self.commands[-1]
        if not self.operators <= _IN_TURN or last.words[0] in _ENDS:
            raise UnreadError("it is no `vllm serve`, and not commands that run one after another")
        return last

    def joined(self, place: Command | None = None, words: Sequence[str] = ()) -> str:
        """The text for a shell, with ``words``, which are quoted, behind those of ``place``."""
        edits = list(self.edits)
        if place and words:
            edits.append((place.end, place.end, " ".join(("", *words))))
        pieces, at = [], 0
        for start, end, replacement in sorted(edits):
            pieces += [self.text[at:start], replacement]
            at = end
        return "".join((*pieces, self.text[at:])).strip()


def read(text: str) -> Script:
    """Read a command's text. Raises ValueError for what no shell takes."""
    reader = _Reader(text)
    try:
        reader.commands_until("")
    except (UnreadError, RecursionError) as error:
        why = str(error) if isinstance(error, UnreadError) else "it is nested too deeply"
        return Script(text=text, commands=(), unread=why)
    script = Script(
        text=text,
        commands=tuple(reader.commands),
        edits=tuple(reader.edits),
        operators=frozenset(reader.operators),
    )
    if script.plain:
        words = script.commands[0].words
        if words[:-1] in (("bash", "-c"), ("sh", "-c")):
            return read(words[-1])
    return script


class _Reader:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.commands: list[Command] = []
        self.edits: list[tuple[int, int, str]] = []
        self.operators: set[str] = set()
        # Here-documents whose text begins behind the next newline: delimiter, and what is stripped.
        self.documents: list[tuple[str, str]] = []

    def line(self, at: int) -> int:
        return self.text.count("\n", 0, at) + 1

    def commands_until(self, closing: str) -> None:
        """Read up to the text's end, or to the `)` of a substitution, whose commands are dropped.

        Raises:
            ValueError: no shell takes the text.
            UnreadError: it has a construct that is not read here.
        """
        words: list[str] = []
        begin = end = depth = 0
        live = False

        def finish() -> None:
            nonlocal words, live
            if words and self.text[begin] == "-":
                raise ValueError(
                    f"its line {self.line(begin)} begins with {words[0]}, which is no program: the "
                    "line above is a comment, is empty or has no backslash at its end"
                )
            if words and not closing:
                self.commands.append(Command(words=tuple(words), end=end, live=live))
            words, live = [], False

        while self.at < len(self.text):
            if found := _COMMENT.match(self.text, self.at):
                self.replace(found, "")
            elif found := _CONTINUED.match(self.text, self.at):
                self.replace(found, " ")
            elif found := _BLANKS.match(self.text, self.at):
                self.at = found.end()
            elif found := _REDIRECTION.match(self.text, self.at):
                self.redirection(found)
                live = True
            elif found := _OPERATOR.match(self.text, self.at):
                operator = found[0]
                if operator == "(" and words:
                    raise UnreadError(f"its line {self.line(self.at)} has a function or an array")
                finish()
                self.at = found.end()
                if operator == ")" and closing and not depth:
                    return
                depth += {"(": 1, ")": -1}.get(operator, 0)
                if depth < 0:
                    raise UnreadError(f"its line {self.line(found.start())} has a `)` alone")
                if operator == "\n":
                    self.skip_documents()
                if not closing:
                    self.operators.add(operator)
            elif self.text[self.at] in "<>;":
                raise UnreadError(f"its line {self.line(self.at)} has `{self.text[self.at :][:2]}`")
            else:
                begin = begin if words else self.at
                word, expands = self.word()
                words.append(word)
                live, end = live or expands, self.at
        finish()
        if closing or depth:
            raise ValueError("a `)` is missing")

    def replace(self, found: re.Match[str], text: str) -> None:
        self.edits.append((found.start(), found.end(), text))
        self.at = found.end()

    def redirection(self, operator: re.Match[str]) -> None:
        self.at = operator.end()
        while found := _CONTINUED.match(self.text, self.at) or _BLANKS.match(self.text, self.at):
            self.at = found.end()
        target, _ = self.word()
        if re.fullmatch(r"\d*<<-?", operator[0]):
            self.documents.append((target, "\t" if operator[0].endswith("-") else ""))

    def skip_documents(self) -> None:
        for delimiter, stripped in self.documents:
            while self.at < len(self.text):
                end = self.text.find("\n", self.at) % (len(self.text) + 1)
                line = self.text[self.at : end]
                self.at = end + 1
                if line.lstrip(stripped) == delimiter:
                    break
        self.documents = []

    def word(self) -> tuple[str, bool]:
        """The word that begins here, and whether a shell would expand it; it stays as written."""
        value: list[str] = []
        bare: list[str] = []
        live = False
        while self.at < len(self.text) and (char := self.text[self.at]) not in " \t\n;&|<>()":
            self.at += 1
            if char == "\\":
                if found := _CONTINUED.match(self.text, self.at - 1):
                    blank = re.search(r"\n[ \t]", found[0])
                    self.replace(found, " " if blank else "")
                    if blank:
                        break
                    continue
                value.append(self.text[self.at])
                self.at += 1
            elif char == "'":
                value.append(self.single_quoted())
            elif char == '"':
                live |= self.double_quoted(value)
            elif char in "$`":
                live |= self.expansion(value, quoted=False)
            else:
                value.append(char)
                bare.append(char)
        # `{a,b}` and `{1..3}` are two words and three.
        braces = "{" in bare and ("," in bare or ".." in "".join(bare))
        return "".join(value), live or braces or not {"*", "?", "~"}.isdisjoint(bare)

    def single_quoted(self) -> str:
        start = self.at
        self.at = self.text.find("'", start) + 1
        if not self.at:
            raise ValueError(f"its line {self.line(start)} opens a ' that is not closed")
        return self.text[start : self.at - 1]

    def double_quoted(self, value: list[str]) -> bool:
        live, start = False, self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            if char == '"':
                return live
            if char in "$`":
                live |= self.expansion(value, quoted=True)
            elif char == "\\" and self.at < len(self.text):
                following = self.text[self.at]
                self.at += 1
                if following != "\n":
                    value.append(following if following in '$`"\\' else char + following)
            else:
                value.append(char)
        raise ValueError(f'its line {self.line(start)} opens a " that is not closed')

    def expansion(self, value: list[str], *, quoted: bool) -> bool:
        """Pass `$...` or a backquote, which stands before ``at``, and put it into ``value``."""
        start = self.at - 1
        following = self.text[self.at : self.at + 1]
        found = _EXPANSION.match(self.text, start)
        if not quoted:
            found = found or _ANSI_C.match(self.text, start)
        if found:
            self.at = found.end()
        elif following == "{":
            self.braces(quoted=quoted)
        elif following == "(" and self.text[self.at : self.at + 2] != "((":
            self.at += 1
            self.commands_until(")")
        elif self.text[start] == "`" or following == "(":
            raise UnreadError(f"its line {self.line(start)} has {self.text[start:][:12]!r}")
        elif following != '"' or quoted:
            value.append("$")
            return False
        value.append(self.text[start : self.at])
        return True

    def braces(self, *, quoted: bool) -> None:
        """Pass `${...}` from its brace on; there may be quotes and expansions in it."""
        start = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            if char == "}":
                return
            if char in "$`":
                self.expansion([], quoted=quoted)
            elif char == '"':
                self.double_quoted([])
            elif char == "'" and not quoted:
                self.single_quoted()
            elif char == "\\":
                self.at += 1
        raise ValueError(f"its line {self.line(start)} opens a {{ that is not closed")
