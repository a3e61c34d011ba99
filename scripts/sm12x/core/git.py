"""A thin typed layer over the git command: knows repositories, nothing of this project.

Every call is cut off from the machine's and the user's configuration, hooks and attributes, so that
the same input gives the same object ids and the same text everywhere.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm12x.core import process
from sm12x.core.errors import NoSpaceError
from sm12x.core.process import Completed

# Of an object id that stands for "no such file" in a diff.
_ZERO_ID = "0" * 40
_IDENTITY = "sm12x <sm12x@localhost>"
# 2000-01-01: commits that no mail dates must not depend on when they are made.
_FIXED_DATE = "946684800 +0000"

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
_OFFSET = re.compile(r"^Hunk #(\d+) succeeded at (\d+) \(offset (-?\d+) lines?\)")
_FULL = re.compile("No space left on device|Disk quota exceeded|Out of diskspace")
# What git says of a write that failed, without the reason.
_WRITING = re.compile("writ|creat|truncat|copy|unable to|could not", re.IGNORECASE)
# Bytes under which a disk counts as full.
_ROOM = 64 * 1024
_CHECKING = re.compile(r"^Checking patch (.+)\.\.\.$")


@dataclass(frozen=True, kw_only=True)
class TreeFile:
    """A file of a tree or index: ``mode`` as git writes it ("100644"), ``blob`` its object id."""

    path: str
    mode: str
    blob: str


@dataclass(frozen=True, kw_only=True)
class Offset:
    """A hunk that applies only at another line: hunk ``number`` of ``path``, by ``lines`` lines."""

    path: str
    number: int
    lines: int


@dataclass(frozen=True, kw_only=True)
class GitApplied:
    """What ``git apply`` said: whether it would apply, moved hunks, and its error lines."""

    ok: bool
    offsets: tuple[Offset, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """An author. ``date`` is git's raw form: seconds since 1970 and the zone, "0 +0000"."""

    name: str
    email: str
    date: str


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
        words = ["git", "init", "--quiet", "--template=", "--initial-branch=stack", str(git_dir)]
        _run(
            words,
            env={
                **_isolation(),
                "GIT_DIR": str(repository.git_dir),
                "GIT_WORK_TREE": str(repository.work_tree),
            },
        )
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
        """Run one git command on this repository; raises ToolFailedError as process.run does."""
        settings = [word for item in _SETTINGS.items() for word in ("-c", "=".join(item))]
        return _run(
            ["git", *settings, *words],
            cwd=self.work_tree,
            env={
                **_isolation(),
                "GIT_DIR": str(self.git_dir),
                "GIT_WORK_TREE": str(self.work_tree),
                **(env or {}),
            },
            stdin=stdin,
            check=check,
        )

    def line(self, *words: str) -> str:
        """The output of a command that prints one line."""
        return self.run(*words).stdout.strip()

    # Trees and commits

    def add_all(self) -> None:
        """Put every file of the work tree into the index, ignored ones too."""
        self.run("add", "--all", "--force", ".")

    def write_tree(self) -> str:
        return self.line("write-tree")

    def read_tree(self, revision: str) -> None:
        """Make the index hold ``revision``; the work tree is not touched."""
        self.run("read-tree", revision)

    def commit_tree(
        self, tree: str, message: str, *, parent: str | None = None, author: Signature | None = None
    ) -> str:
        """Make a commit object and return its id; no reference moves."""
        name, email = _IDENTITY.removesuffix(">").split(" <")
        who = author or Signature(name=name, email=email, date=_FIXED_DATE)
        words = ["commit-tree", tree, "-F", "-"]
        if parent is not None:
            words += ["-p", parent]
        done = self.run(
            *words,
            stdin=message,
            env={
                "GIT_AUTHOR_NAME": who.name,
                "GIT_AUTHOR_EMAIL": who.email,
                "GIT_AUTHOR_DATE": who.date,
                "GIT_COMMITTER_NAME": name,
                "GIT_COMMITTER_EMAIL": email,
                # The author's date again, so that a commit's id depends on its content alone.
                "GIT_COMMITTER_DATE": who.date,
            },
        )
        return done.stdout.strip()

    def resolve(self, revision: str) -> str | None:
        """The commit id of ``revision``, or None where there is none."""
        done = self.run("rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}", check=False)
        return done.stdout.strip() or None

    def tree_of(self, revision: str) -> str:
        return self.line("rev-parse", "--verify", f"{revision}^{{tree}}")

    def update_ref(self, name: str, commit: str) -> None:
        self.run("update-ref", name, commit)

    def commits(self, since: str, until: str) -> list[str]:
        """The commits after ``since`` up to ``until``, oldest first."""
        return self.run("rev-list", "--reverse", f"{since}..{until}").stdout.split()

    def merges(self, since: str, until: str) -> list[str]:
        return self.run("rev-list", "--merges", f"{since}..{until}").stdout.split()

    def message(self, commit: str) -> str:
        return self.run("log", "-1", "--format=%B", commit).stdout

    def author(self, commit: str) -> Signature:
        out = self.run("log", "-1", "--format=%an%x00%ae%x00%ad", "--date=raw", commit).stdout
        name, email, date = out.rstrip("\n").split("\0")
        return Signature(name=name, email=email, date=date)

    # Files

    def index_entries(self) -> dict[str, TreeFile]:
        """The files of the index by path."""
        return _entries(self.run("ls-files", "--stage", "-z").stdout, blob_word=1)

    def entries(self, revision: str) -> dict[str, TreeFile]:
        """The files of a commit or tree by path."""
        return _entries(self.run("ls-tree", "-r", "-z", revision).stdout, blob_word=2)

    def text(self, blob: str) -> str:
        """The content of a blob, for showing: bytes that are not UTF-8 are replaced."""
        return self.run("cat-file", "blob", blob).stdout

    def changed(self, old: str, new: str) -> list[str]:
        """The paths that differ between two commits or trees."""
        out = self.run("diff-tree", "-r", "-z", "--no-renames", "--name-only", old, new).stdout
        return [path for path in out.split("\0") if path]

    def checkout_index(self, prefix: Path, paths: Sequence[str]) -> None:
        """Write these files of the index, byte for byte, under the folder ``prefix``."""
        self.run(
            "checkout-index",
            f"--prefix={prefix}/",
            "-z",
            "--stdin",
            stdin="\0".join(paths),
        )

    def status(self) -> list[str]:
        """Changed and unknown files of the work tree, as `git status --porcelain` lines."""
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

    def stage(self, files: Mapping[str, tuple[str, str]]) -> None:
        """Put files into the index: path -> (mode, blob); mode "0" takes one out."""
        records = "".join(
            f"{mode} {blob or _ZERO_ID}\t{path}\0" for path, (mode, blob) in files.items()
        )
        if records:
            self.run("update-index", "-z", "--index-info", stdin=records)

    def stage_conflicts(self, files: Mapping[str, tuple[str, tuple[str, str, str]]]) -> None:
        """Mark files of the index as unmerged: path -> (mode, blobs of ancestor, ours, theirs)."""
        records = "".join(
            f"0 {_ZERO_ID}\t{path}\0"
            + "".join(
                f"{mode} {blob} {stage}\t{path}\0"
                for stage, blob in enumerate(blobs, start=1)
                if blob
            )
            for path, (mode, blobs) in files.items()
        )
        if records:
            self.run("update-index", "-z", "--index-info", stdin=records)

    def blob(self, blob: str) -> bytes:
        """The bytes of a blob."""
        return self.run("cat-file", "blob", blob).raw

    def store(self, content: bytes) -> str:
        """Store a blob and return its id."""
        return self.run("hash-object", "-w", "--stdin", stdin=content).stdout.strip()

    def diff(self, old: str, new: str, path: str) -> bytes:
        """What ``new`` does to one file of ``old``, as a diff."""
        return self.run(
            *("diff-tree", "-r", "-p", "--no-renames", "--no-ext-diff", "--no-textconv"),
            *("--src-prefix=a/", "--dst-prefix=b/", old, new, "--", f":(literal,top){path}"),
        ).raw

    def merge_file(
        self,
        ours: Path,
        base: Path,
        theirs: Path,
        *,
        labels: tuple[str, str, str],
        favour_theirs: bool = False,
    ) -> bool:
        """Merge three files into ``ours``, and return whether conflicts are left in it.

        A conflict shows the ancestor too, without what both sides have (zdiff3, diff3 before git
        2.35); ``labels`` name ours, ancestor and theirs. With ``favour_theirs`` conflicts are
        decided for that side.
        """
        named = [word for label in labels for word in ("-L", label)]
        paths = (str(ours), str(base), str(theirs))
        for style in ("--theirs",) if favour_theirs else ("--zdiff3", "--diff3"):
            done = self.run("merge-file", "-q", style, *named, *paths, check=False)
            # 129: the option is not known. Up to 127: as many conflicts.
            if done.returncode != 129:
                break
        if done.returncode > 127:
            raise process.failed(done)
        return done.returncode > 0

    def checkout(self, revision: str) -> None:
        """Make index and work tree hold ``revision``; edited files are overwritten."""
        self.run("read-tree", "--reset", "-u", revision)

    def config(self, key: str, value: str) -> None:
        """Store a setting in the repository."""
        self.run("config", "--local", key, value)

    def pack(self) -> None:
        """Put loose objects into one pack: a few files to move instead of thousands."""
        self.run("-c", "pack.window=0", "repack", "-a", "-d", "-q")


def _run(
    words: Sequence[str],
    *,
    env: Mapping[str, str | None],
    cwd: Path | None = None,
    stdin: str | bytes | None = None,
    check: bool = True,
) -> Completed:
    """process.run, but a full disk raises NoSpaceError even without ``check``."""
    done = process.run(words, cwd=cwd, env=env, stdin=stdin, check=False)
    if done.returncode != 0:
        lines = done.stderr.splitlines()
        full = next((line for line in lines if _FULL.search(line)), None)
        places = [Path(env[name] or "") for name in ("GIT_DIR", "GIT_WORK_TREE")]
        if full is None and any(_no_room(place) for place in places):
            full = next((line for line in lines if _WRITING.search(line)), None)
        if full is not None:
            raise NoSpaceError(
                f"the disk is full: git cannot write its repository {places[0]} or the files of "
                f"{places[1]} ({full.strip()})",
                next_step="free space there (for temporary folders: set TMPDIR), and run this "
                "again",
            )
        if check:
            raise process.failed(done)
    return done


def _no_room(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _ROOM
    except OSError:
        return False


def parse_apply(stderr: str, returncode: int) -> GitApplied:
    """Read what ``git apply --verbose`` wrote to stderr."""
    path = ""
    offsets: list[Offset] = []
    errors: list[str] = []
    for line in stderr.splitlines():
        if match := _CHECKING.match(line):
            path = match[1]
        elif match := _OFFSET.match(line):
            offset = Offset(path=path, number=int(match[1]), lines=int(match[3]))
            # --check and the real run each say it.
            if offset not in offsets:
                offsets.append(offset)
        elif line.startswith(("error: ", "fatal: ")) and "while searching for" not in line:
            errors.append(line.split(": ", 1)[1])
    return GitApplied(ok=returncode == 0, offsets=tuple(offsets), errors=tuple(errors))


def _isolation() -> dict[str, str | None]:
    """An environment in which git reads no configuration of the machine or the user."""
    # A caller's own variables (a hook's GIT_DIR, GIT_INDEX_FILE ...) would point git elsewhere.
    inherited: Iterator[str] = (name for name in os.environ if name.startswith("GIT_"))
    return {
        **dict.fromkeys(inherited),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        # Messages are parsed.
        "LC_ALL": "C",
        "LANGUAGE": None,
        "TZ": "UTC",
    }


def user_identity(folder: Path) -> str | None:
    """The user's identity, "Name <mail>", from git's configuration; None where none is set."""
    done = process.run(["git", "config", "--get", "user.name"], cwd=folder, check=False)
    mail = process.run(["git", "config", "--get", "user.email"], cwd=folder, check=False)
    name = os.environ.get("GIT_AUTHOR_NAME") or done.stdout.strip()
    address = os.environ.get("GIT_AUTHOR_EMAIL") or mail.stdout.strip()
    return f"{name} <{address}>" if name and address else None


def _entries(listing: str, *, blob_word: int) -> dict[str, TreeFile]:
    found: dict[str, TreeFile] = {}
    for record in listing.split("\0"):
        if record:
            head, path = record.split("\t", 1)
            words = head.split()
            found[path] = TreeFile(path=path, mode=words[0], blob=words[blob_word])
    return found
