"""The diffs that are written anew lead git to exactly the text that was wanted."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.diff import applied, sections
from workers.grading.controls import patches

LINES = st.sampled_from(
    [
        b"def f():",
        b"    x = 1",
        b"    y = 2\r",
        b"",
        b"class C:",
        b"    pass",
        b"-- ",
        b"@@ x",
        b"\ttab",
        b"+",
        b"a\x0cb",
    ]
)
TEXTS = st.builds(
    lambda lines, ended: b"\n".join(lines) + (b"\n" if ended and lines else b""),
    st.lists(LINES, min_size=1, max_size=40),
    st.booleans(),
).filter(bool)
REPLACEMENTS = st.sampled_from([b"", b"9", b"\n", b"9\n8", b"not (x)", b"\n\n", b"y\r\n"])


@st.composite
def edited_texts(draw: st.DrawFn, text: bytes) -> tuple[list[tuple[int, int, bytes]], bytes]:
    """Edits that do not overlap, and the text with them."""
    bounds = sorted(draw(st.lists(st.integers(0, len(text)), unique=True, max_size=8)))
    edits = [(start, end, draw(REPLACEMENTS)) for start, end in zip(bounds[::2], bounds[1::2], strict=False)]
    edited = text
    for start, end, becomes in reversed(edits):
        edited = edited[:start] + becomes + edited[end:]
    return edits, edited


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, bytes, list[tuple[int, int, bytes]], bytes]:
    old = draw(TEXTS)
    bounds = sorted(draw(st.tuples(st.integers(0, len(old)), st.integers(0, len(old)))))
    new = draw(st.one_of(TEXTS, st.just(old[: bounds[0]] + b"    z = 3\n" + old[bounds[1] :])))
    edits, edited = draw(edited_texts(new))
    return old, new, edits, edited


def git(where: Path, *words: str, feed: bytes = b"") -> bytes:
    result = subprocess.run(["git", *words], cwd=where, input=feed, capture_output=True, check=False)
    assert result.returncode in (0, 1)
    assert not result.stderr
    return result.stdout


def write(root: Path, texts: Mapping[str, bytes]) -> None:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text)


def diff_of(where: Path, old: Mapping[str, bytes], new: Mapping[str, bytes], *options: str) -> bytes:
    """The diff that git makes of two trees; `where` is a repository that has the first."""
    git(where, "init", "-q")
    write(where, old)
    git(where, "add", "-f", "--all")
    for path in old.keys() - new.keys():
        (where / path).unlink()
    write(where, new)
    git(where, "add", "-f", "--intent-to-add", "--ignore-removal", ".")
    diff = git(where, "diff", "-M", *options)
    for path in new:
        (where / path).unlink()
    git(where, "reset", "-q")
    write(where, old)
    return diff


def apply(where: Path, diff: bytes) -> None:
    git(where, "apply", "--whitespace=nowarn", "-", feed=diff)


def rewritten(diff: bytes, path: bytes, old: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    pieces = sections(diff)
    assert b"".join(piece.raw for piece in pieces) == diff
    (number,) = (number for number, piece in enumerate(pieces) if piece.new == path)
    section = patches.rewritten(pieces[number], old, edits)
    assert section is not None
    return b"".join(section if index == number else piece.raw for index, piece in enumerate(pieces))


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), context=st.sampled_from(["-U3", "-U0", "-U1"]))
def test_git_makes_the_edited_text_of_a_diff_that_was_rewritten(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[bytes, bytes, list[tuple[int, int, bytes]], bytes],
    context: str,
) -> None:
    old, new, edits, edited = case
    root = tmp_path_factory.mktemp("repository")
    kept = b"kept\n"
    diff = diff_of(
        root,
        {"a.py": kept, "t/test_x.py": old, "z.py": kept},
        {"a.py": kept * 2, "t/test_x.py": new, "z.py": b""},
        context,
    )
    if old == new:
        return
    (section,) = (one for one in sections(diff) if one.new == b"t/test_x.py")
    assert applied(section, old) == new
    changed = rewritten(diff, b"t/test_x.py", old, edits)
    git(root, "apply", "--unidiff-zero", "--whitespace=nowarn", "-", feed=changed)
    assert (root / "t/test_x.py").read_bytes() == edited
    assert (root / "a.py").read_bytes() == kept * 2
    assert (root / "z.py").read_bytes() == b""


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(old=TEXTS, middle=st.sampled_from([b"", b"    z = 3\n"]), cut=st.integers(0, 400), data=st.data())
def test_a_renamed_file_becomes_the_edited_text_too(
    tmp_path_factory: pytest.TempPathFactory, old: bytes, middle: bytes, cut: int, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("repository")
    old = b"one line that makes them alike\n" * 20 + old
    new = old[:cut] + middle + old[cut:]
    edits, edited = data.draw(edited_texts(new))
    diff = diff_of(root, {"t/old.py": old}, {"t/new.py": new})
    assert diff.count(b"\nrename ") == 2
    apply(root, rewritten(diff, b"t/new.py", old, edits))
    assert (root / "t/new.py").read_bytes() == edited
    assert not (root / "t/old.py").exists()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    new=TEXTS,
    name=st.sampled_from(["test_x.py", "with space.py", "é.py", 'a"b.py', "b/b b/b.py"]),
    data=st.data(),
)
def test_a_new_file_becomes_the_edited_text_too(
    tmp_path_factory: pytest.TempPathFactory, new: bytes, name: str, data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("repository")
    edits, edited = data.draw(edited_texts(new).filter(lambda drawn: drawn[1]))
    diff = diff_of(root, {"gone.py": b"x\n"}, {name: new, "other.py": new})
    apply(root, rewritten(diff, name.encode(), b"", edits))
    assert (root / name).read_bytes() == edited
    assert (root / "other.py").read_bytes() == new
    assert not (root / "gone.py").exists()


def test_a_diff_is_written_as_git_writes_it(tmp_path: Path) -> None:
    """Headings, ids and ranges: nobody sees that it was written anew."""
    lines = [b"def f():\n", *(b"    x = %d\n" % number for number in range(40)), b"end\n"]
    old = b"".join(lines)
    new = old.replace(b"x = 9\n", b"y = 9\n").replace(b"x = 30\n", b"y = 30\n    z = 1\n")
    edited = new.replace(b"y = 9\n", b"y = 8\n").replace(b"x = 20\n", b"x = 21\n")
    diffs: list[bytes] = []
    for number, text in enumerate((new, edited)):
        (tmp_path / str(number)).mkdir()
        diffs.append(diff_of(tmp_path / str(number), {"test_x.py": old}, {"test_x.py": text}))
    nine, twenty = new.index(b"y = 9") + 4, new.index(b"x = 20") + 4
    edits = [(nine, nine + 1, b"8"), (twenty, twenty + 2, b"21")]
    assert rewritten(diffs[0], b"test_x.py", old, edits) == diffs[1]


def test_a_diff_that_does_not_fit_is_not_applied() -> None:
    diff = b"--- a/x.py\n+++ b/x.py\n@@ -2,1 +2,1 @@\n-b\n+c\n"
    (section,) = sections(diff)
    assert applied(section, b"a\nb\n") == b"a\nc\n"
    assert applied(section, b"b\na\n") is None
    assert patches.rewritten(section, b"b\na\n", [(0, 1, b"x")]) is None


@pytest.mark.parametrize(
    "diff",
    [
        b"diff --git a/x.py b/x.py\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZPo000310RR91\n\n",
        b"diff --git a/x.py b/x.py\nBinary files a/x.py and b/x.py differ\n",
        b"--- a/x.py\n+++ b/x.py\n@@ -1,3 +1,3 @@\n-b\n+c\n",
        b"--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-b\n*c\n",
    ],
)
def test_a_diff_that_says_too_little_is_not_applied(diff: bytes) -> None:
    (section,) = sections(diff)
    assert applied(section, b"b\n") is None
