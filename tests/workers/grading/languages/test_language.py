"""What the grader asks of every language: which ones a script uses, names in the log, other literals."""

import random
import subprocess
import sys

import pytest

from workers.grading.languages.language import (
    joined,
    language_of,
    languages_of,
    other_number,
    other_text,
    outcomes_in,
    reporting,
)


@pytest.mark.parametrize(
    ("script", "languages"),
    [
        ("cd /testbed && go test ./...", ["go"]),
        ("pytest -q tests", []),
        ("make test", ["go", "java", "javascript", "rust", "c"]),
        ("npm test", ["javascript"]),
        ("java -cp out org.junit.runner.JUnitCore demo.T", ["java"]),
    ],
)
def test_a_script_uses_the_languages_of_its_runners(script: str, languages: list[str]) -> None:
    assert languages_of(script) == languages


def test_a_runner_that_names_no_tests_gets_its_option_once_for_each_command() -> None:
    script = (
        b"set -e\nA=1 go test ./a 2>&1 | tee x\ncat >b.sh <<'E'\ngo test ./b\nE\ngo vet; go test -run X ./c\n"
    )
    assert reporting(script) == (
        b"set -e\nA=1 go test -v ./a 2>&1 | tee x\ncat >b.sh <<'E'\ngo test ./b\nE\ngo vet; go test -v -run X ./c\n"
    )


@pytest.mark.parametrize(
    ("script", "becomes"),
    [
        ("npx jest --ci a", "npx jest --verbose --ci a"),
        (
            "cargo +nightly test -p a -- --test-threads 1",
            "cargo +nightly test --no-fail-fast -p a -- --test-threads 1",
        ),
        ("cargo nextest run -p a", "cargo nextest run --no-fail-fast -p a"),
        ("timeout -k 9 60s go test ./...", "timeout -k 9 60s go test -v ./..."),
        ("timeout 60s go test ./...", "timeout 60s go test -v ./..."),
        ("env A=1 B=2 go -C sub test", "env A=1 B=2 go -C sub test -v"),
        ("yarn -s jest a", "yarn -s jest --verbose a"),
        ("mvn -B clean install", "mvn -B clean install -Dsurefire.reportFormat=plain"),
        ("cargo nextest list", "cargo nextest list"),
        ("cargo nextest run --no-run", "cargo nextest run --no-run"),
        ("cargo nextest run --max-fail=2", "cargo nextest run --max-fail=2"),
        ("cargo test --all --no-fail-fast", "cargo test --all --no-fail-fast"),
        ("./mvnw -q -pl a test -Dx=1", "./mvnw -q -pl a test -Dsurefire.reportFormat=plain -Dx=1"),
        ("node_modules/.bin/vitest run", "node_modules/.bin/vitest --reporter=verbose run"),
    ],
)
def test_the_option_follows_the_name_of_the_runner(script: str, becomes: str) -> None:
    assert reporting(script.encode()).decode() == becomes


@pytest.mark.parametrize(
    ("names", "report"),
    [
        ("PASS ./sum.test.js\n  sum\n    ✓ adds (2 ms)\n\n", "Test Suites: 1 passed, {} total\nTests:       1 passed, 1 total\n"),
        (" ✓ sum.test.js > adds 2ms\n\n", " Test Files  {} passed ({})\n      Tests  1 passed (1)\n"),
    ],
)  # fmt: skip
def test_names_that_a_log_has_only_while_there_is_one_file_are_left_out(names: str, report: str) -> None:
    one, two = names + report.format(1, 1), names + report.format(2, 2)
    assert outcomes_in("npm test", one) == {}
    assert list(outcomes_in("npm test", two).values()) == ["PASSED"]
    assert outcomes_in("npx jest a\nnpx vitest run\n", one) == outcomes_in("npm test", two)


def test_a_script_of_other_runners_stays_as_it_is() -> None:
    script = b"pytest -q tests\nmake test\n# go test\n"
    assert reporting(script) == script


def test_a_test_that_failed_once_has_failed() -> None:
    assert joined([("a", "PASSED"), ("a", "FAILED"), ("a", "PASSED"), ("b", "SKIPPED"), ("b", "PASSED")]) == {
        "a": "FAILED",
        "b": "PASSED",
    }


@pytest.mark.parametrize(
    "text",
    ["0", "7", "10", "99", "100", "255", "2147483647", "1_000", "3.25", "1e9", "0x1F", "5u8", "2.50f32"],
)
def test_another_number_keeps_its_form(text: str) -> None:
    for seed in range(20):
        other = other_number(text, random.Random(seed))
        assert other is not None
        assert other != text
        assert len(other) in (len(text), len(text.replace("_", "")))
        letters = [one for one in text if not one.isdigit() and one not in "_abcdefABCDEF"]
        assert [one for one in other if not one.isdigit() and one not in "abcdefABCDEF"] == letters


@pytest.mark.parametrize("largest", ["127", "255", "32767", "65535", "2147483647", "18446744073709551615"])
def test_the_largest_value_of_a_type_becomes_smaller(largest: str) -> None:
    assert {other_number(largest, random.Random(seed)) for seed in range(20)} == {str(int(largest) - 1)}


@pytest.mark.parametrize("text", ["", "\\n", "%d", "{x}", "${name}", "\\u{1F600}", "--", "\\x41"])
def test_a_text_without_letters_of_its_own_has_no_other(text: str) -> None:
    assert other_text(text, random.Random(1)) is None


def test_another_text_differs_in_one_letter_or_digit_outside_of_escapes_and_formats() -> None:
    text = "a\\tB %d {name} 7"
    found = {other_text(text, random.Random(seed)) for seed in range(300)}
    changed = {
        place
        for other in found
        if other is not None
        for place, (was, becomes) in enumerate(zip(text, other, strict=True))
        if was != becomes
    }
    assert {text[place] for place in changed} == {"a", "B", "7"}


@pytest.mark.parametrize(
    ("path", "spoken"), [("a/b_test.go", "go"), ("x.test.ts", "javascript"), ("t.py", None), ("x.rst", None)]
)
def test_a_file_has_the_language_of_its_ending(path: str, spoken: str | None) -> None:
    assert language_of(path) == spoken


def test_grading_a_task_in_python_loads_no_parser_of_another_language() -> None:
    code = "import workers.grading.grade, sys; print([one for one in sys.modules if one.startswith('tree_sitter')])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"
