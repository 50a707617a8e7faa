"""One case of a parametrized test is contradicted where it is written, and its name is known."""

import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from workers.grading.controls.spans import Candidate, read
from workers.grading.controls.writing import candidates

HONEST = "def code(*given):\n    return {table}[given]\n"
FILES = {
    "plain literals": """
@pytest.mark.parametrize(("a", "b", "total"), [(3, 1, 4), ("x", "y", "xy",), (0.5,
    -2, -1.5), (b"\\xff", b"\\\\", b"\\xff\\\\")])
def test_it(a, b, total):
    assert a + b == total
""",
    "one parameter": """
@pytest.mark.parametrize("total", [4, pytest.param(4.0)])
def test_it(total):
    assert 2 + 2 == total
""",
    "ids that are written": """
@pytest.mark.parametrize("a, total", [(3, 6), pytest.param(4, 8, id="four is 8"), (5, 10)], ids=["to six", None, None])
def test_it(a, total):
    assert 2 * a == total
""",
    "ids by str": """
@pytest.mark.parametrize("parts, total", [([1, "2"], "1 2"), ([2, None, "\u03bc"], "2 None \u03bc"), ([0.5], "0.5")], ids=str)
def test_it(parts, total):
    assert " ".join(map(str, parts)) == total
""",
    "ids by a function": """
@pytest.mark.parametrize("row", [(3, 6), (4, 8)], ids=lambda row: f"case {row[0]}")
def test_it(row):
    given, total = row
    assert 2 * given == total
""",
    "stacked": """
@pytest.mark.parametrize("c", [0, 1])
class TestIt:
    @pytest.mark.parametrize("a, total", [(3, 6), (4, 8)])
    @pytest.mark.parametrize("kind", [int, float, [1], None])
    def test_it(self, a, total, kind, c):
        assert 2 * a == total
""",
    "cases of the module": """
CASES = [(3, 6), (4, "é\\n"), (5, [10]), (6, None)]

@pytest.mark.parametrize("a, total", CASES)
def test_it(a, total):
    assert {3: 6, 4: "é\\n", 5: [10], 6: None}[a] == total
""",
    "cases of a function": """
def cases():
    return [(3, 6), (4, 8)]

@pytest.mark.parametrize("a, total", cases())
def test_it(a, total):
    assert 2 * a == total
""",
    "values of a fixture": """
@pytest.fixture(params=[(3, 6), (4, 8)])
def row(request):
    return request.param

@pytest.fixture(params=[9])
def nine(request):
    return request.param

@pytest.mark.parametrize("a", [1])
def test_it(row, a):
    given, total = row
    assert 2 * given == total

def test_nine(nine):
    assert 3 * 3 == nine
""",
    "classes": """
@pytest.mark.parametrize("text, error", [("x", ValueError), ([], TypeError)])
def test_it(text, error):
    with pytest.raises(error):
        int(text)
""",
}


def outcomes(folder: Path, names: list[str]) -> dict[str, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
    ]
    said = subprocess.run([*command, *names], cwd=folder, capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^(PASSED|FAILED|ERROR) (.*?)(?: - .*)?$", said, flags=re.MULTILINE)
    return {name: outcome for outcome, name in found}


def found(source: str) -> list[Candidate]:
    return candidates(source.encode(), random.Random(0))


def edited(source: str, candidate: Candidate) -> bytes:
    file = read(source.encode())
    assert file is not None
    return file.apply(candidate.edits)


@pytest.mark.slow
def test_one_case_fails_under_the_name_that_is_said_and_all_others_pass_under_theirs(tmp_path: Path) -> None:
    sources = {f"test_{number}.py": f"import pytest\n{text}" for number, text in enumerate(FILES.values())}
    written: dict[str, tuple[str, Candidate | None]] = {name: (name, None) for name in sources}
    for name, source in sources.items():
        for number, candidate in enumerate(found(source)):
            written[f"{name.removesuffix('.py')}_{number}.py"] = (name, candidate)
    for name, (source, candidate) in written.items():
        text = sources[source].encode() if candidate is None else edited(sources[source], candidate)
        (tmp_path / name).write_bytes(text)
    seen = outcomes(tmp_path, list(written))
    of_file = {
        file: {
            name.partition("::")[2]: outcome for name, outcome in seen.items() if name.startswith(f"{file}::")
        }
        for file in written
    }
    for name, (source, candidate) in written.items():
        if candidate is None:
            assert of_file[name]
            assert {*of_file[name].values()} == {"PASSED"}
            continue
        expected = {candidate.renamed.get(test, test): "PASSED" for test in of_file[source]}
        assert of_file[name].keys() == expected.keys(), candidate
        fails = {test for test, outcome in of_file[name].items() if outcome == "FAILED"}
        assert fails, candidate
        if all("[" in test for test in candidate.tests):
            assert fails == {candidate.renamed.get(test, test) for test in candidate.tests}
            assert len(fails) < len(expected) or len(expected) == 1


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind != "ids by a function"])
def test_each_case_has_a_contradiction_of_its_own(kind: str) -> None:
    named = {test for one in found(f"import pytest\n{FILES[kind]}") for test in one.tests}
    assert all("[" in test for test in named)
    assert len(named) >= FILES[kind].count("assert")


def test_an_id_that_says_the_value_says_the_other_one() -> None:
    source = f"import pytest\n{FILES['ids that are written']}"
    pairs = [pair for one in found(source) for pair in one.renamed.items()]
    said = {was: becomes for was, becomes in pairs}
    assert said["test_it[four is 8]"].removeprefix("test_it[four is ").removesuffix("]").isdigit()
    assert said["test_it[to six]"] != "test_it[to six]"


def test_names_of_cases_that_are_not_known_are_not_guessed() -> None:
    source = "import pytest\n\n@pytest.mark.parametrize('a, b', [(make(), 2), (3, 4), (3, 4)])\ndef test_it(a, b):\n    assert a == b\n"
    assert {one.kind for one in found(source)} == {"nothing"}
    assert all(not one.renamed for one in found(source))
