import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.diff import sections
from workers.tasksets.patches import diff_in, divided, ended, optional_diff_in, paths_of
from workers.tasksets.rows import Fields

HUNK = "@@ -1,2 +1,2 @@\n-x\n+y\n z\n"


@pytest.mark.parametrize(
    ("patch", "paths"),
    [
        (f"diff --git a/x/a.py b/x/a.py\n--- a/x/a.py\n+++ b/x/a.py\n{HUNK}", ("x/a.py",)),
        (f"--- a/a.py\n+++ b/a.py\n{HUNK}--- a/b.py\n+++ b/b.py\n{HUNK}", ("a.py", "b.py")),
        ("--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n", ("new",)),
        ("--- a/old\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline\n--- a/b\n+++ b/b\n", ("old", "b")),
        ("rename from a b.py\nrename to c.py\n", ("a b.py", "c.py")),
        ('--- "a/\\303\\251.py"\n+++ "b/\\303\\251.py"\n', ("é.py",)),
        ("--- a/a.py\t2025-01-01\n+++ b/a.py\t2025-01-01\n", ("a.py",)),
        ("--- a/a.sql\n+++ b/a.sql\n@@ -1,2 +1,2 @@\n--- a/not-a-file\n+++ b/not-a-file\n x\n", ("a.sql",)),
        ("diff --git a/logo b.bin b/logo b.bin\nGIT binary patch\nliteral 4\nLcmZQz\n", ("logo b.bin",)),
        ("diff --git a/run b/run\nold mode 100644\nnew mode 100755\n", ("run",)),
        ('--- "a/caf\u00e9 \\"bar\\".py"\n+++ /dev/null\n', ('caf\u00e9 "bar".py',)),
        ('diff --git "a/\\303\\251.bin" "b/\\303\\251.bin"\nGIT binary patch\nliteral 4\nLcmZQz\n', ("\u00e9.bin",)),
        ("", ()),
    ],
)  # fmt: skip
def test_every_touched_path_is_found_and_no_other(patch: str, paths: tuple[str, ...]) -> None:
    assert paths_of(patch) == paths


NAMES = (
    "caf\u00e9.py",
    'caf\u00e9 "bar".py',
    "a\\b.py",
    "tab\there.py",
    "bell\a\x01\x7f.py",
    "two\nlines.py",
    " spaced .py",
)


@pytest.mark.parametrize("quote_path", ["true", "false"])
def test_every_name_that_git_writes_is_read_as_git_means_it(tmp_path: Path, quote_path: str) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", f"core.quotePath={quote_path}", *arguments]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout.decode()

    git("init", "-q")
    for name in NAMES:
        (tmp_path / name).write_text("x\n")
        (tmp_path / f"bin {name}").write_bytes(b"\0")
    git("add", "--all")
    patch = git("diff", "--cached", "--binary")
    assert sorted(paths_of(patch)) == sorted((*NAMES, *(f"bin {name}" for name in NAMES)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ('"a/x', "not a name as git quotes it: '\"a/x'"),
        ('"', "not a name as git quotes it"),
        ('"a/x" y', "not a name as git quotes it"),
        ('"a/\\x41"', "not a name as git quotes it"),
        ('"a/\\777"', "not a name as git quotes it"),
        ('"a/\\"', "not a name as git quotes it"),
        ('"a/\\351.py"', "a name that is not UTF-8"),
    ],
)
@pytest.mark.parametrize("line", ["--- {}\n+++ b/x\n", "rename from b/x\nrename to {}\n"])
def test_a_name_that_git_could_not_have_written_is_refused_by_row_and_field(
    line: str, name: str, message: str
) -> None:
    fields = Fields("rows.jsonl:7", {"patch": line.format(name)})
    for read in (diff_in, optional_diff_in):
        with pytest.raises(ValueError, match=rf"^rows\.jsonl:7: patch: {message}"):
            read(fields, "patch")


def test_a_diff_may_be_optional() -> None:
    assert optional_diff_in(Fields("rows.jsonl:7", {"patch": " \n"}), "patch") == ""
    with pytest.raises(ValueError, match=r"^rows\.jsonl:7: patch: not a diff: it names no file"):
        optional_diff_in(Fields("rows.jsonl:7", {"patch": "none"}), "patch")


GIT = f"diff --git a/x/a.py b/x/a.py\nindex 1..2 100644\n--- a/x/a.py\n+++ b/x/a.py\n{HUNK}"
PLAIN = f"--- a/b.py\n+++ b/b.py\n{HUNK}"
BINARY = "diff --git a/logo.bin b/logo.bin\nGIT binary patch\nliteral 4\nLcmZQz\n\n"
MODE = "diff --git a/run b/run\nold mode 100644\nnew mode 100755\n"
TRAP = "--- a/c.sql\n+++ b/c.sql\n@@ -1,3 +1,2 @@\n--- a/not-a-file\n-diff --git a/no b/no\n+++ b/not-a-file\n x\n"
FEED = "diff --git a/d b/d\n--- a/d\n+++ b/d\n@@ -1,2 +1,2 @@\n one\x0ctwo\n--- a/still-in-the-hunk\n+-- b\n"


@given(
    st.sampled_from([(GIT, BINARY, MODE, FEED), (PLAIN, TRAP)]).flatmap(
        lambda one: st.lists(st.sampled_from(one))
    )
)
def test_sections_are_one_a_file_and_make_the_patch_again(files: list[str]) -> None:
    assert [one.raw.decode() for one in sections("".join(files).encode())] == files


def test_a_patch_is_divided_by_its_paths_and_ends_with_a_newline() -> None:
    patch = GIT + BINARY + FEED + MODE
    chosen, others = divided(patch.rstrip("\n"), lambda path: path in ("x/a.py", "logo.bin"))
    assert (chosen, others) == (GIT + BINARY, FEED + MODE)
    assert [ended(text) for text in ("", "a", "a\n")] == ["", "a\n", "a\n"]
