"""What a person is told of a task besides its states."""

from msgspec.structs import replace

from pipeline.taskfile import Verification
from workers.verify.run import flag_rows

PLAIN = Verification(
    task="test:task",
    fingerprint="",
    states={"empty": 0, "useless": 0, "tests_only": 0, "gold": 1, "agent": 1},
    ok=True,
    reason="",
    verdict_kind="exit_code",
    seconds=1.0,
    verified_at=1.0,
)


def test_tests_that_prove_little_are_named_a_few_of_each_kind() -> None:
    assert flag_rows(PLAIN) == []
    names = tuple(f"tests/test_it.py::test_{letter}\x1b" for letter in "abcd")
    rows = [text.plain for text in flag_rows(replace(PLAIN, in_fix=names, from_package=names[:1]))]
    assert [row.split(": ", 1)[0].strip() for row in rows] == [
        "tests that are in files that a patch may change (4)",
        "tests that take cases, references or data from the package under test (1)",
    ]
    assert "test_c" in rows[0]
    assert rows[0].endswith("and 1 more")
    assert not any("\x1b" in row or "test_d" in row for row in rows)
