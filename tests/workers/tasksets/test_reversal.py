import subprocess
from pathlib import Path

import pytest

from workers.tasksets.patches import Irreversible, reversed_patch

FIRST: dict[str, bytes] = {
    "edited.py": b"one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\n",
    "blocks.py": b"".join(b"line %d\n" % number for number in range(40)),
    "gone.py": b"was here\n",
    "gone_empty.py": b"",
    "ends_open": b"no newline at the end",
    "gets_open": b"a\nnewline at the end\n",
    "keeps_open": b"same\nfirst\nopen",
    "crlf.txt": b"one\r\ntwo\r\n",
    "old name.py": b"".join(b"stays %d\n" % number for number in range(9)),
    "moved.py": b"".join(b"moves %d\n" % number for number in range(9)),
    "data.bin": bytes(range(256)) * 4,
    "lost.bin": b"\0lost",
    "spaced name.py": b"x = 1\n",
    "caf\xc3\xa9.py".encode("latin-1").decode(): b"accent\n",
    "tool.sh": b"echo\n",
    "separators.txt": "a\x0cb\u2028c\x1dd\n".encode(),
    "-- dashes": b"--- a/not-a-header\n+++ b/not-a-header\n@@ -1 +1 @@\n",
}
SECOND: dict[str, bytes] = FIRST | {
    "edited.py": b"zero\none\n2\nthree\nfour\nsix\nseven\nEIGHT\nnine\nten\n",
    "blocks.py": b"".join(b"line %d%s\n" % (n, b"!" if n in (3, 20, 38) else b"") for n in range(40)),
    "ends_open": b"no newline at the end\n",
    "gets_open": b"a\nnewline at the end",
    "keeps_open": b"same\nsecond\nother",
    "crlf.txt": b"one\r\n2\r\n",
    "data.bin": bytes(range(255, -1, -1)) * 4,
    "spaced name.py": b"x = 2\n",
    "caf\xc3\xa9.py".encode("latin-1").decode(): b"circumflex\n",
    "separators.txt": "a\x0cb\u2028C\x1dd\n".encode(),
    "-- dashes": b"-- a/other\n+++ b/not-a-header\n@@ -1 +1 @@\n++ more\n",
    "added/new.py": b"new\n",
    "added/empty.py": b"",
    "added.bin": b"\0new\xff",
    "new name.py": FIRST["old name.py"],
    "elsewhere/moved.py": FIRST["moved.py"] + b"and changes\n",
}
for _name in ("gone.py", "gone_empty.py", "lost.bin", "old name.py", "moved.py"):
    del SECOND[_name]


def git(repo: Path, *arguments: str, stdin: str | None = None) -> str:
    """What git prints, as text whose every byte comes back."""
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false", *arguments],
        cwd=repo,
        input=None if stdin is None else stdin.encode("utf-8", "surrogateescape"),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.decode("utf-8", "surrogateescape")


def commit(repo: Path, files: dict[str, bytes]) -> str:
    for file in repo.rglob("*"):
        if file.is_file() and ".git" not in file.parts:
            file.unlink()
    for name, content in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_bytes(content)
    git(repo, "add", "--all")
    git(repo, "commit", "-qm", "state")
    return git(repo, "rev-parse", "HEAD^{tree}").strip()


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    repo = tmp_path_factory.mktemp("repo")
    git(repo, "init", "-q")
    first = commit(repo, FIRST)
    (repo / "tool.sh").chmod(0o644)
    second = commit(repo, SECOND)
    (repo / "tool.sh").chmod(0o755)
    (repo / "link").symlink_to("edited.py")
    git(repo, "add", "--all")
    second = git(repo, "write-tree").strip()
    return repo, first, second


DIFFS = [
    ("--binary", "--full-index", "-M"),
    ("--binary", "--no-renames"),
    ("--binary", "-M", "-U0"),
]


@pytest.mark.parametrize("options", DIFFS)
def test_git_applies_the_reverse_and_is_back_where_it_was(
    trees: tuple[Path, str, str], options: tuple[str, ...]
) -> None:
    repo, first, second = trees
    patch = git(repo, "diff", *options, first, second)
    git(repo, "read-tree", second)
    zero_context = ["--unidiff-zero"] if "-U0" in options else []
    git(repo, "apply", "--cached", *zero_context, stdin=reversed_patch(patch))
    assert git(repo, "write-tree").strip() == first
    git(repo, "apply", "--cached", *zero_context, stdin=patch)
    assert git(repo, "write-tree").strip() == second


@pytest.mark.parametrize("options", DIFFS)
def test_the_reverse_is_what_git_would_have_written_the_other_way_round(
    trees: tuple[Path, str, str], options: tuple[str, ...]
) -> None:
    repo, first, second = trees
    forward = git(repo, "diff", *options, first, second)
    backward = git(repo, "diff", *options, second, first)
    assert sorted(_per_file(reversed_patch(forward))) == sorted(_per_file(backward))


def test_names_that_git_need_not_quote_are_told_apart(trees: tuple[Path, str, str]) -> None:
    repo, first, second = trees
    patch = git(repo, "-c", "core.quotepath=false", "diff", "--binary", "-M", first, second)
    git(repo, "read-tree", second)
    git(repo, "apply", "--cached", stdin=reversed_patch(patch))
    assert git(repo, "write-tree").strip() == first


def test_a_reverse_reversed_is_the_patch_again(trees: tuple[Path, str, str]) -> None:
    repo, first, second = trees
    patch = git(repo, "diff", "--binary", "-M", first, second)
    assert reversed_patch(reversed_patch(patch)) == patch


def test_what_is_no_part_of_the_change_is_left_out() -> None:
    patch = "From 1\nSubject: x\n\n---\n a | 2 +-\n\ndiff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n+y\n-- \n2.1\n"
    assert reversed_patch(patch) == "diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-y\n+x\n"


def test_a_diff_without_its_last_newline_or_gits_header_will_do() -> None:
    assert reversed_patch("--- a/a\n+++ b/a\n@@ -1,2 +1 @@ f()\n-x\n y") == (
        "--- a/a\n+++ b/a\n@@ -1 +1,2 @@ f()\n+x\n y\n"
    )


def test_a_context_line_that_lost_its_space_is_a_context_line() -> None:
    patch = "--- a/a\n+++ b/a\n@@ -1,3 +1,3 @@\n x\n\n-y\n+z\n"
    assert reversed_patch(patch) == "--- a/a\n+++ b/a\n@@ -1,3 +1,3 @@\n x\n\n-z\n+y\n"


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("", "no file's diff in it"),
        ("just words\n", "no file's diff in it"),
        ("diff --git a/a b/b\ncopy from a\ncopy to b\n", "line 2: a copy"),
        ("diff --git a/a b/a\nindex 1..2\nBinary files a/a and b/a differ\n", "line 3: a binary file"),
        ("diff --git a/a b/a\nindex 1..2\nGIT binary patch\nliteral 1\nIc\n\n", "without its reverse"),
        ("--- a/a\n+++ b/a\n@@ -1,2 +1 @@\n-x\n", "ends early"),
        ("--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n-y\n+z\n", "longer than its header says"),
        ("--- a/a\n+++ b/a\n@@ -1 +1 @@\n*x\n", "line 4: not a line of a hunk"),
        ("--- a/a\n+++ b/a\nwhat\n", "line 3: not the header of a hunk"),
        ("diff --git a/a b/a\n--- a/a", r"line 2: no line \+\+\+ after it"),
        ("diff --git a/a b/a\n--- a/a\n@@ -1 +1 @@\n-x\n+y\n", r"line 2: no line \+\+\+ after it"),
        ("diff --git a/a b/a\nold fashion 1\n", "line 2: not a line of a git diff's header"),
        ("diff --git a/x b/y b/z\n", "cannot tell the two names apart"),
    ],
)
def test_what_cannot_be_undone_is_refused_by_line(patch: str, message: str) -> None:
    with pytest.raises(Irreversible, match=message):
        reversed_patch(patch)


def test_a_patch_cut_anywhere_is_taken_back_or_refused(trees: tuple[Path, str, str]) -> None:
    repo, first, second = trees
    patch = git(repo, "diff", "--binary", "-M", first, second)
    num_refused = 0
    for end in range(0, len(patch), 29):
        try:
            reversed_patch(patch[:end])
        except Irreversible:
            num_refused += 1
    assert num_refused > 0


def _per_file(patch: str) -> list[str]:
    return ["diff --git " + part for part in patch.split("diff --git ")[1:]]
