"""Reads a recipe's command as bash reads it: its simple commands and their words.

No library: the image has none that reads bash, and recipes are rendered there too. What is not read
(`case`, functions, arrays, ...) is named.
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


@dataclass(frozen=True)
class Command:
    """A simple command; ``end`` is where its last word ends."""

    words: tuple[str, ...]
    end: int

    @property
    def serve(self) -> tuple[str, ...] | None:
        """The arguments of vLLM's server, None where the command is another one."""
        at = None if self.words[0] in _PRINTS else options.server(self.words)
        return None if at is None else self.words[at:]


def read(text: str) -> Script:
    """Read a command's text. Raises ValueError for what no shell takes."""
    script = Script(text)
    words = script.commands[0].words if script.plain else ()
    return read(words[-1]) if words[:-1] in (("bash", "-c"), ("sh", "-c")) else script


class Script:
    """A text and its simple commands. Raises ValueError for what no shell takes."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.commands: list[Command] = []
        # Why the commands are not known, "" if they are.
        self.unread = ""
        # Whether a shell has to expand a word or to redirect.
        self.live = False
        # (start, end, replacement) without comments and with continued lines joined.
        self.edits: list[tuple[int, int, str]] = []
        self.operators: set[str] = set()
        # Here-documents that begin behind the next newline: delimiter, and what is stripped.
        self.documents: list[tuple[str, str]] = []
        try:
            self._list("")
        except UnreadError as error:
            self.unread = f"its line {self._line()} has {error}, which is not read here"
        except RecursionError:
            self.unread = "it is nested too deeply"
        if self.unread:
            self.commands, self.edits = [], []

    @property
    def plain(self) -> bool:
        """Whether it is one command that needs no shell."""
        return len(self.commands) == 1 and self.operators <= {"\n"} and not self.live

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
        if not self.operators <= _IN_TURN or self.commands[-1].words[0] in _ENDS:
            raise UnreadError("it is no `vllm serve`, and not commands that run one after another")
        return self.commands[-1]

    def joined(self, place: Command | None = None, words: Sequence[str] = ()) -> str:
        """The text for a shell, with ``words``, which are quoted, behind those of ``place``."""
        added = [(place.end, place.end, " ".join(("", *words)))] if place else []
        pieces, at = [], 0
        for start, end, replacement in sorted([*self.edits, *added]):
            pieces += [self.text[at:start], replacement]
            at = end
        return "".join((*pieces, self.text[at:])).strip()

    def _line(self, at: int | None = None) -> int:
        return self.text.count("\n", 0, self.at if at is None else at) + 1

    def _list(self, closing: str) -> None:
        """Read up to the text's end, or to the `)` of a substitution, whose commands are dropped.

        Raises:
            ValueError: no shell takes the text.
            UnreadError: it has a construct that is not read here.
        """
        words: list[str] = []
        begin = end = depth = 0

        def finish() -> None:
            if words and self.text[begin] == "-":
                raise ValueError(
                    f"its line {self._line(begin)} begins with {words[0]}, which is no program: "
                    "the line above is a comment, is empty or has no backslash at its end"
                )
            if words and not closing:
                self.commands.append(Command(tuple(words), end))
            words.clear()

        while self.at < len(self.text):
            if match := _COMMENT.match(self.text, self.at):
                self._replace(match, "")
            elif match := _CONTINUED.match(self.text, self.at):
                self._replace(match, " ")
            elif match := _BLANKS.match(self.text, self.at):
                self.at = match.end()
            elif match := _REDIRECTION.match(self.text, self.at):
                self._redirection(match)
            elif match := _OPERATOR.match(self.text, self.at):
                operator = match[0]
                depth += {"(": 1, ")": -1}.get(operator, 0)
                if (operator == "(" and words) or (depth < 0 and not closing):
                    raise UnreadError(f"`{operator}`")
                finish()
                self.at = match.end()
                if depth < 0:
                    return
                if operator == "\n":
                    self._skip_documents()
                if not closing:
                    self.operators.add(operator)
            elif self.text[self.at] in "<>;":
                raise UnreadError(f"`{self.text[self.at :][:2]}`")
            else:
                begin = begin if words else self.at
                words.append(self._word())
                end = self.at
        finish()
        if closing or depth:
            raise ValueError("a `)` is missing")

    def _replace(self, match: re.Match[str], text: str) -> None:
        self.edits.append((match.start(), match.end(), text))
        self.at = match.end()

    def _redirection(self, operator: re.Match[str]) -> None:
        self.at, self.live = operator.end(), True
        while match := _CONTINUED.match(self.text, self.at) or _BLANKS.match(self.text, self.at):
            self.at = match.end()
        target = self._word()
        if re.fullmatch(r"\d*<<-?", operator[0]):
            self.documents.append((target, "\t" if operator[0].endswith("-") else ""))

    def _skip_documents(self) -> None:
        while self.documents and self.at < len(self.text):
            end = self.text.find("\n", self.at) % (len(self.text) + 1)
            line, self.at = self.text[self.at : end], end + 1
            if line.lstrip(self.documents[0][1]) == self.documents[0][0]:
                del self.documents[0]

    def _word(self) -> str:
        """Read the word that begins at ``at``; text that a shell would expand stays as written."""
        value: list[str] = []
        bare = ""
        while self.at < len(self.text) and (char := self.text[self.at]) not in " \t\n;&|<>()":
            if match := _CONTINUED.match(self.text, self.at):
                ends = re.search(r"\n[ \t]", match[0])
                self._replace(match, " " if ends else "")
                if ends:
                    break
                continue
            self.at += 1
            if char == "\\":
                value.append(self.text[self.at])
                self.at += 1
            elif char == "'":
                value.append(self._single_quoted())
            elif char == '"':
                self._double_quoted(value)
            elif char in "$`":
                self._expansion(value, quoted=False)
            else:
                value.append(char)
                bare += char
        # `{a,b}` and `{1..3}` are two words and three.
        self.live |= bool(re.search(r"[*?~]|\{.*(?:,|\.\.)", bare))
        return "".join(value)

    def _single_quoted(self) -> str:
        start = self.at
        self.at = self.text.find("'", start) + 1
        if not self.at:
            raise ValueError(f"its line {self._line(start)} opens a ' that is not closed")
        return self.text[start : self.at - 1]

    def _double_quoted(self, value: list[str]) -> None:
        start = self.at
        while self.at < len(self.text):
            char, following = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            self.at += 1
            if char == '"':
                return
            if char in "$`":
                self._expansion(value, quoted=True)
            elif char == "\\":
                self.at += 1
                if following != "\n":
                    value.append(following if following in '$`"\\' else char + following)
            else:
                value.append(char)
        raise ValueError(f'its line {self._line(start)} opens a " that is not closed')

    def _expansion(self, value: list[str], *, quoted: bool) -> None:
        """Read the `$...` or backquote just before ``at``, and append it to ``value``."""
        start, following = self.at - 1, self.text[self.at : self.at + 1]
        match = _EXPANSION.match(self.text, start)
        if not quoted:
            match = match or _ANSI_C.match(self.text, start)
        self.live = True
        if match:
            self.at = match.end()
        elif following == "{":
            self._braces(quoted=quoted)
        elif following == "(" and self.text[self.at : self.at + 2] != "((":
            self.at += 1
            self._list(")")
        elif self.text[start] == "`" or following == "(":
            raise UnreadError(f"`{self.text[start : self.at + 2]}`")
        value.append(self.text[start : self.at])

    def _braces(self, *, quoted: bool) -> None:
        """Pass `${...}` from its brace on; there may be quotes and expansions in it."""
        start = self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            if char == "}":
                return
            if char in "$`":
                self._expansion([], quoted=quoted)
            elif char == '"':
                self._double_quoted([])
            elif char == "'" and not quoted:
                self._single_quoted()
            elif char == "\\":
                self.at += 1
        raise ValueError(f"its line {self._line(start)} opens a {{ that is not closed")
