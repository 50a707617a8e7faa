"""The diffs that are written anew lead git to exactly the text that was wanted."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    git(where, "add", "-f", "--intent-to-add", "--all")
    diff = git(where, "diff", "-M", *options)
    for path in new:
        (where / path).unlink()
    git(where, "reset", "-q")
    write(where, old)
    return diff


def apply(where: Path, diff: bytes) -> None:
    git(where, "apply", "--whitespace=nowarn", "-", feed=diff)


def rewritten(diff: bytes, path: bytes, old: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    pieces = patches.sections(diff)
    assert b"".join(piece.raw for piece in pieces) == diff
    (number,) = (number for number, piece in enumerate(pieces) if piece.new == path)
    section = patches.rewritten(pieces[number], old, edits)
    assert section is not None
    return b"".join(section if index == number else piece.raw for index, piece in enumerate(pieces))


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
    (section,) = (one for one in patches.sections(diff) if one.new == b"t/test_x.py")
    assert patches.applied(section, old) == new
    changed = rewritten(diff, b"t/test_x.py", old, edits)
    git(root, "apply", "--unidiff-zero", "--whitespace=nowarn", "-", feed=changed)
    assert (root / "t/test_x.py").read_bytes() == edited
    assert (root / "a.py").read_bytes() == kept * 2
    assert (root / "z.py").read_bytes() == b""


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_what_git_says_of_the_edited_text_is_what_is_written(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[bytes, bytes, list[tuple[int, int, bytes]], bytes]
) -> None:
    """With edits that change nothing, the diff stays as git wrote it."""
    old, new, _, _ = case
    root = tmp_path_factory.mktemp("repository")
    diff = diff_of(root, {"test_x.py": old}, {"test_x.py": new})
    if diff:
        assert rewritten(diff, b"test_x.py", old, []) == diff
