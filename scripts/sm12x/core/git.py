"""A thin typed layer over the git command: knows repositories, nothing of this project.

Every call is cut off from the machine's and the user's configuration, hooks and attributes, so that
the same input gives the same object ids and the same text everywhere.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import NoSpaceError
from sm12x.core.process import Completed

_SETTINGS = {
    # No conversion of content, whatever .gitattributes or the machine's settings say.
    "core.autocrlf": "false",
    "core.safecrlf": "false",
    "core.attributesFile": os.devnull,
    "core.excludesFile": os.devnull,
    "core.hooksPath": os.devnull,
    "core.quotePath": "false",
    "core.fsmonitor": "false",
    "core.fileMode": "true",
    "core.symlinks": "true",
    "commit.gpgSign": "false",
    "tag.gpgSign": "false",
    "gc.auto": "0",
    # Scratch objects are read once: compressing or flushing them would only cost time.
    "core.looseCompression": "0",
    "core.fsync": "none",
    "advice.detachedHead": "false",
}
_ATTRIBUTES = "* -text -eol -filter -ident -working-tree-encoding\n"
_OFFSET = re.compile(r"^Hunk #(\d+) succeeded at (\d+) \((offset -?\d+ lines?)\)")
_FULL = re.compile("No space left on device|Disk quota exceeded|Out of diskspace")
# Bytes under which a disk counts as full: git names a write that failed, not always the reason.
_ROOM = 64 * 1024
_CHECKING = re.compile(r"^Checking patch (.+)\.\.\.$")


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """A file of a tree or index: ``mode`` as git writes it ("100644"), ``blob`` its object id."""

    path: str
    mode: str
    blob: str


@dataclass(frozen=True, kw_only=True)
class GitApplied:
    """git's answer on a patch: whether it applies, which hunks at other lines, and why not."""

    ok: bool
    offsets: tuple[str, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """An author. ``date`` is git's raw form: seconds since 1970 and the zone, "0 +0000"."""

    name: str
    email: str
    date: str


# 2000-01-01: commits that no mail dates must not depend on when they are made.
_OURS = Signature(name="sm12x", email="sm12x@localhost", date="946684800 +0000")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """A repository whose parts are named outright, so that none is looked for or guessed.

    ``work_tree`` may be any folder; only ``checkout`` writes into it.
    """

    git_dir: Path
    work_tree: Path

    @classmethod
    def init(cls, git_dir: Path, work_tree: Path) -> Repository:
        """Make an empty repository in ``git_dir`` (not in ``work_tree``)."""
        repository = cls(git_dir=git_dir.absolute(), work_tree=work_tree.absolute())
        # No template: a machine's hooks and excludes have no business here.
        repository.run("init", "--quiet", "--template=", "--initial-branch=stack")
        info = git_dir / "info"
        info.mkdir(exist_ok=True)
        # info/attributes outranks any .gitattributes in the tree.
        (info / "attributes").write_text(_ATTRIBUTES)
        return repository

    def run(
        self,
        *words: str,
        stdin: str | bytes | None = None,
        check: bool = True,
        env: Mapping[str, str | None] | None = None,
    ) -> Completed:
        """Run one git command on this repository; raises ToolFailedError as process.run does.

        A full disk raises NoSpaceError, even without ``check``.
        """
        settings = [word for item in _SETTINGS.items() for word in ("-c", "=".join(item))]
        places = (self.git_dir, self.work_tree)
        done = process.run(
            ["git", *settings, *words],
            cwd=self.work_tree,
            env={
                **_isolation(),
                "GIT_DIR": str(self.git_dir),
                "GIT_WORK_TREE": str(self.work_tree),
                **(env or {}),
            },
            stdin=stdin,
            check=False,
        )
        if done.returncode != 0:
            if _FULL.search(done.stderr) or (done.stderr and any(map(_no_room, places))):
                raise NoSpaceError(
                    f"the disk is full: git cannot write its repository {places[0]} or the files "
                    f"of {places[1]} ({done.stderr.strip().splitlines()[-1]})",
                    next_step="free space there (for temporary folders: set TMPDIR), and run this "
                    "again",
                )
            if check:
                raise process.failed(done)
        return done

    def line(self, *words: str) -> str:
        """Return the output of a command that prints one line."""
        return self.run(*words).stdout.strip()

    # Trees and commits

    def add_all(self) -> None:
        """Put every file of the work tree into the index, ignored ones too."""
        # Every file counts as big, and big ones go into one pack: 8,500 files of their own take
        # twice the processor time, and four times as long.
        pack = ("-c", "core.bigFileThreshold=1", "-c", "core.compression=0")
        self.run(*pack, "add", "--all", "--force", ".")

    def write_tree(self) -> str:
        return self.line("write-tree")

    def read_tree(self, revision: str) -> None:
        """Make the index hold ``revision``; the work tree is not touched."""
        self.run("read-tree", revision)

    def commit_tree(
        self, tree: str, message: str, *, parent: str | None = None, author: Signature | None = None
    ) -> str:
        """Make a commit object and return its id; no reference moves."""
        who = author or _OURS
        parents = ("-p", parent) if parent else ()
        done = self.run(
            *("commit-tree", tree, "-F", "-", *parents),
            stdin=message,
            env={
                "GIT_AUTHOR_NAME": who.name,
                "GIT_AUTHOR_EMAIL": who.email,
                "GIT_AUTHOR_DATE": who.date,
                "GIT_COMMITTER_NAME": _OURS.name,
                "GIT_COMMITTER_EMAIL": _OURS.email,
                # The author's date again, so that a commit's id depends on its content alone.
                "GIT_COMMITTER_DATE": who.date,
            },
        )
        return done.stdout.strip()

    def resolve(self, revision: str) -> str | None:
        """Return the commit id of ``revision``, or None where there is none."""
        done = self.run("rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}", check=False)
        return done.stdout.strip() or None

    def tree_of(self, revision: str) -> str:
        return self.line("rev-parse", "--verify", f"{revision}^{{tree}}")

    def update_ref(self, name: str, commit: str) -> None:
        self.run("update-ref", name, commit)

    def commits(self, since: str, until: str) -> list[str]:
        """Return the commits after ``since`` up to ``until``, oldest first."""
        return self.run("rev-list", "--reverse", f"{since}..{until}").stdout.split()

    def merges(self, since: str, until: str) -> list[str]:
        return self.run("rev-list", "--merges", f"{since}..{until}").stdout.split()

    def message(self, commit: str) -> str:
        return self.run("log", "-1", "--format=%B", commit).stdout

    # Files

    def index_entries(self) -> dict[str, TreeFile]:
        """Return the files of the index by path."""
        entries: dict[str, TreeFile] = {}
        for record in self.run("ls-files", "--stage", "-z").stdout.split("\0"):
            if record:
                head, path = record.split("\t", 1)
                mode, blob, _ = head.split()
                entries[path] = TreeFile(path=path, mode=mode, blob=blob)
        return entries

    def changed(self, old: str, new: str) -> list[str]:
        """Return the paths that differ between two commits or trees."""
        out = self.run("diff-tree", "-r", "-z", "--no-renames", "--name-only", old, new).stdout
        return [path for path in out.split("\0") if path]

    def checkout_index(self, prefix: Path, paths: Sequence[str]) -> None:
        """Write these files of the index, byte for byte, under the folder ``prefix``."""
        self.run("checkout-index", f"--prefix={prefix}/", "-z", "--stdin", stdin="\0".join(paths))

    def status(self) -> list[str]:
        """Return changed and unknown files of the work tree, as `git status --porcelain` lines."""
        return self.run("status", "--porcelain", "--untracked-files=all").stdout.splitlines()

    # Patches

    def apply_cached(
        self,
        patch: bytes,
        *,
        check_only: bool = False,
        reverse: bool = False,
        include: Sequence[str] = (),
    ) -> GitApplied:
        """Apply a patch to the index, or with ``check_only`` only see whether it would.

        ``include`` names the files to apply it to; without it, all that it is for.
        git has no fuzz but does move hunks; what it moved is in ``offsets``.
        """
        words = ["apply", "--cached", "--verbose", "--whitespace=nowarn"]
        words += ["--check"] if check_only else []
        words += ["--reverse"] if reverse else []
        words += [f"--include={path}" for path in include]
        done = self.run(*words, "-", stdin=patch, check=False)
        return parse_apply(done.stderr, done.returncode)

    def config(self, key: str, value: str) -> None:
        """Store a setting in the repository."""
        self.run("config", "--local", key, value)

    def pack(self) -> None:
        """Put loose objects into one pack: a few files to move instead of thousands."""
        # -F: what add_all has packed is not compressed.
        self.run("-c", "pack.window=0", "repack", "-a", "-d", "-q", "-F")


def _no_room(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _ROOM
    except OSError:
        return False


def parse_apply(stderr: str, returncode: int) -> GitApplied:
    """Read what ``git apply --verbose`` wrote to stderr."""
    path = ""
    offsets: list[str] = []
    errors: list[str] = []
    for line in stderr.splitlines():
        if match := _CHECKING.match(line):
            path = match[1]
        elif match := _OFFSET.match(line):
            offsets.append(f"{path}: hunk {match[1]} fits at line {match[2]} ({match[3]})")
        elif line.startswith(("error: ", "fatal: ")) and "while searching for" not in line:
            errors.append(line.split(": ", 1)[1])
    # --check and the real run each print an offset.
    unique = tuple(dict.fromkeys(offsets))
    return GitApplied(ok=returncode == 0, offsets=unique, errors=tuple(errors))


def _isolation() -> dict[str, str | None]:
    """Return an environment in which git reads no configuration of the machine or the user."""
    return {
        # A caller's own variables (a hook's GIT_DIR, GIT_INDEX_FILE ...) would point git elsewhere.
        **{name: None for name in os.environ if name.startswith("GIT_")},
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        # Messages are parsed.
        "LC_ALL": "C",
        "LANGUAGE": None,
        "TZ": "UTC",
    }
