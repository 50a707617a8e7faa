"""Which wrong patches are made of a known fix, and which are not because they would not be wrong."""

import random
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from workers.verify.strength import PartialFix, partial_fixes, touched_files

BASE = '''def clamp(x, low, high):
    """Between."""
    if x < low:
        return low
    return x


SIZE = 3
UNIT = "mm"


def scaled(x):
    return x
'''
FIXED = '''def clamp(x, low, high):
    """Between."""
    if low is not None and x < low:
        return low
    return min(x, high)


SIZE = 3
UNIT = "mm"


def scaled(x):
    if not x:
        log.debug("nothing to scale: %s", x)
        raise ValueError("nothing to scale")
    return x + 10
'''
EXPECTED = {
    ("hunk", "calc.py:3-5: hunk taken back"),
    ("hunk", "calc.py:13-16: hunk taken back"),
    ("line", "calc.py:5: line taken back: return min(x, high)"),
    ("line", "calc.py:13: 3 lines left out: if not x:"),
    ("line", 'calc.py:15: line left out: raise ValueError("nothing to scale")'),
    ("line", "calc.py:16: line taken back: return x + 10"),
    ("comparison", "calc.py:3: and becomes or"),
    ("comparison", "calc.py:3: is not becomes is"),
    ("comparison", "calc.py:3: < becomes <="),
    ("comparison", "calc.py:3: < becomes >="),
    ("condition", "calc.py:3: low is not None and left out"),  # and so is the line as it was
    ("condition", "calc.py:3: and x < low left out"),
    ("condition", "calc.py:3: condition forced to True: low is not None and x < low"),
    ("condition", "calc.py:3: condition forced to False: low is not None and x < low"),
    ("condition", "calc.py:3: condition negated: low is not None and x < low"),
    ("condition", "calc.py:13: condition forced to True: not x"),
    ("constant", "calc.py:3: None becomes True"),
    ("constant", "calc.py:16: 10 becomes 11"),
    ("constant", "calc.py:16: 10 becomes 9"),
    ("operator", "calc.py:13: not left out: x"),
    ("operator", "calc.py:16: + becomes -"),
    ("operator", "calc.py:16: + becomes *"),
    ("operator", "calc.py:16: x + left out"),
    ("return", "calc.py:5: None instead of the result: min(x, high)"),
    ("return", "calc.py:16: None instead of the result: x + 10"),
}


class Repository:
    """A git repository with files in two states: before a fix and with it."""

    def __init__(self, root: Path, before: Mapping[str, str | bytes]) -> None:
        self.root = root
        self.git("init", "-q")
        self.write(before)
        self.git("add", "-A")
        self.git("-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-qm", "base")

    def git(self, *words: str, given: bytes | None = None) -> bytes:
        done = subprocess.run(
            ["git", "-C", str(self.root), *words], input=given, capture_output=True, check=True
        )
        return done.stdout

    def write(self, files: Mapping[str, str | bytes]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode() if isinstance(text, str) else text)

    def reset(self) -> None:
        self.git("reset", "-q", "--hard")
        self.git("clean", "-qfdx")

    def diff(self) -> bytes:
        self.git("add", "-A")
        return self.git("diff", "--cached", "--binary")

    def applied(self, patch: bytes) -> dict[str, bytes]:
        """Contents of all files with the patch."""
        self.reset()
        self.git("apply", given=patch)
        names = self.git("ls-files", "-co").decode().split()
        return {name: (self.root / name).read_bytes() for name in names if (self.root / name).exists()}


def made(
    repository: Repository, after: Mapping[str, str | bytes], *, tests: Collection[str] = (), most: int = 100
) -> list[PartialFix]:
    """Partial fixes of the fix that writes these files."""
    repository.write(after)
    fix = repository.diff()
    repository.reset()
    texts = {
        path: (repository.root / path).read_bytes()
        for path in touched_files(fix)
        if (repository.root / path).exists()
    }
    return partial_fixes(fix, texts, tests=tests, most=most, chance=random.Random(7))


def texts_of(repository: Repository, found: list[PartialFix]) -> dict[str, str]:
    """calc.py with each partial fix, by its description."""
    return {one.what: repository.applied(one.patch)["calc.py"].decode() for one in found}


def test_parts_are_taken_back_and_code_is_changed(tmp_path: Path) -> None:
    repository = Repository(tmp_path, {"calc.py": BASE})
    found = made(repository, {"calc.py": FIXED})
    assert {(one.kind, one.what) for one in found} == EXPECTED
    texts = texts_of(repository, found)
    assert len(set(texts.values())) == len(texts), "each is another text"
    assert not {BASE, FIXED} & set(texts.values())
    assert texts["calc.py:3: and becomes or"] == FIXED.replace("None and", "None or")
    assert texts["calc.py:3: is not becomes is"] == FIXED.replace("is not None", "is None")
    assert texts["calc.py:13: 3 lines left out: if not x:"].endswith("def scaled(x):\n    return x + 10\n")
    assert (
        texts["calc.py:13-16: hunk taken back"]
        == FIXED[: FIXED.index("def scaled")] + "def scaled(x):\n    return x\n"
    )
    raised = 'calc.py:15: line left out: raise ValueError("nothing to scale")'
    assert texts[raised] == FIXED.replace('        raise ValueError("nothing to scale")\n', "")


def test_every_kind_comes_before_a_second_one_of_the_same_and_they_are_always_the_same(
    tmp_path: Path,
) -> None:
    repository = Repository(tmp_path, {"calc.py": BASE})
    kinds = {kind for kind, _ in EXPECTED}
    found = made(repository, {"calc.py": FIXED}, most=2 * len(kinds))
    assert {one.kind for one in found[: len(kinds)]} == {one.kind for one in found[len(kinds) :]} == kinds
    assert made(repository, {"calc.py": FIXED}, most=2 * len(kinds)) == found


def test_every_place_is_changed_before_one_is_changed_a_second_time(tmp_path: Path) -> None:
    repository = Repository(tmp_path, {"calc.py": "X = a\n"})
    found = made(repository, {"calc.py": f"X = [{', '.join(map(str, range(9)))}]\n"}, most=9)
    assert {one.what.split()[1] for one in found} == set("012345678")


def test_a_new_condition_that_always_holds_is_as_no_fix(tmp_path: Path) -> None:
    repository = Repository(tmp_path, {"calc.py": "def f(x):\n    return x\n"})
    found = made(repository, {"calc.py": "def f(x):\n    if x:\n        return x\n"})
    assert {one.what for one in found} == {
        "calc.py:2: condition forced to False: x",
        "calc.py:2: condition negated: x",
    }


def test_a_file_is_taken_back_where_others_stay(tmp_path: Path) -> None:
    before = {"calc.py": BASE, "old.py": "X = 1\n", "gone.py": "Y = 1\n", "logo.bin": b"\0\1"}
    repository = Repository(tmp_path, before)
    (repository.root / "gone.py").unlink()
    after = {
        "calc.py": FIXED,
        "new.py": "Z = 1\n",
        "logo.bin": b"\0\2",
    }
    found = made(repository, after)
    whole = {one.what: repository.applied(one.patch) for one in found if one.kind == "file"}
    assert set(whole) == {f"{name}: taken back" for name in ("calc.py", "gone.py", "logo.bin", "new.py")}
    assert "gone.py" in whole["gone.py: taken back"]
    assert "new.py" not in whole["new.py: taken back"]
    assert whole["logo.bin: taken back"]["logo.bin"] == b"\0\1"
    assert whole["calc.py: taken back"]["calc.py"] == BASE.encode()


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("SIZE = 3\n", "SIZE = 3  # of a page\n"),
        ('"""Between."""', '"""Between both."""'),
        ("def clamp(x, low, high):", "def clamp(x: int, low: int, high: int) -> int:"),
        ("    if x < low:\n", "\n    if x < low:\n"),
    ],
    ids=["comment", "docstring", "annotations", "blank-line"],
)
def test_what_does_not_change_the_code_is_no_part_of_a_fix(tmp_path: Path, was: str, becomes: str) -> None:
    repository = Repository(tmp_path, {"calc.py": BASE})
    fixed = BASE.replace("def scaled(x):\n    return x", "def scaled(x):\n    return x * 2")
    without = [one.what for one in made(repository, {"calc.py": fixed})]
    found = made(repository, {"calc.py": fixed.replace(was, becomes)})
    assert len(found) == len(without), [one.what for one in found]


def test_the_message_of_an_error_is_no_part_of_a_fix(tmp_path: Path) -> None:
    repository = Repository(tmp_path, {"calc.py": "X = 1\n"})
    raised = 'def check(x):\n    raise ValueError(\n        f"not a number: {x}"\n    )\n'
    found = made(repository, {"calc.py": f"X = 5\n\n\n{raised}"})
    assert not [one.what for one in found if "not a number" in one.what]
    assert any("raise ValueError" in one.what for one in found)


def test_documentation_and_tests_are_no_part_of_a_fix(tmp_path: Path) -> None:
    others = [
        "CHANGES.md",
        "CHANGELOG",
        "docs/conf.py",
        "tests/data.py",
        "src/test_calc.py",
        "check/hidden.py",
    ]
    repository = Repository(tmp_path, {"calc.py": "X = 1\n", **dict.fromkeys(others, "A = 1\n")})
    after = {"calc.py": "X = 5\n", **dict.fromkeys(others, "A = 2\n")}
    found = made(repository, after, tests=["check/hidden.py"])
    assert {one.what for one in found} == {"calc.py:1: 5 becomes 6", "calc.py:1: 5 becomes 4"}


def test_one_change_of_one_line_leaves_nothing_to_take_back(tmp_path: Path) -> None:
    repository = Repository(tmp_path, {"calc.py": "X = a\n"})
    assert made(repository, {"calc.py": "X = b\n"}) == []


def test_other_languages_are_taken_back_by_file_hunk_and_line(tmp_path: Path) -> None:
    lines = [f"int f{number}() {{ return {number}; }}" for number in range(20)]
    repository = Repository(tmp_path, {"calc.c": "\n".join(lines) + "\n"})
    lines[3] = "int f3() { return 30; }"
    lines[16:16] = ["// a comment", "int g() { return 2; }", "", "int h() { return 4; }"]
    found = made(repository, {"calc.c": "\n".join(lines) + "\n"})
    assert {(one.kind, one.what) for one in found} == {
        ("hunk", "calc.c:4: hunk taken back"),
        ("hunk", "calc.c:17-20: hunk taken back"),
        ("line", "calc.c:18: line left out: int g() { return 2; }"),
        ("line", "calc.c:20: line left out: int h() { return 4; }"),
    }
    for one in found:
        repository.applied(one.patch)


def test_files_of_a_base_that_is_not_known_are_taken_back_whole(tmp_path: Path) -> None:
    repository = Repository(tmp_path, {"calc.py": BASE, "old.py": "X = 1\n"})
    repository.write({"calc.py": FIXED, "old.py": "X = 2\n"})
    fix = repository.diff()
    found = partial_fixes(fix, {}, tests=(), most=9, chance=random.Random(1))
    assert {one.what for one in found} == {"calc.py: taken back", "old.py: taken back"}


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_lines_and_files_may_end_in_every_way(tmp_path: Path, end: str) -> None:
    newline = end or "\n"
    before, after = (
        newline.join(["A = 1", f"B = {value}", *["C = 3"] * 9, f"D = {value}"]) + end
        for value in ("x", "y < 2")
    )
    repository = Repository(tmp_path, {"calc.py": before})
    found = made(repository, {"calc.py": after})
    texts = texts_of(repository, found)
    assert len(texts) == 10, "of each of two lines: as it was, two comparisons, a number up and down"
    assert all(text.rstrip("\r\n") + end == text for text in texts.values())
    assert all(("\r" in text) == ("\r" in end) for text in texts.values())


@pytest.mark.parametrize(
    "fix", [b"", b"rubbish", b"diff --git a/x b/x\n", b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n"]
)
def test_a_fix_that_is_no_patch_leads_to_none(fix: bytes) -> None:
    assert partial_fixes(fix, {}, tests=(), most=9, chance=random.Random(1)) == []
