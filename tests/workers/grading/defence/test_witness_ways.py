"""The file of failing tests: each of its tests fails, and one that does not is named. It leaves nothing behind."""

import io
import os
import sys
import unittest
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers.grading.defence.witness_plugin.failing import ASSERTIONS, FailingFile
from workers.grading.defence.witness_plugin.unittest_runs import try_unittest


def tried() -> SimpleNamespace:
    """What unittest makes of the file here."""
    run = SimpleNamespace(ways=[], unfailing=[])
    try_unittest(run, unittest.TestLoader(), lambda: unittest.TextTestRunner(io.StringIO())._makeResult())
    return run


def test_every_way_of_failing_fails_under_unittest() -> None:
    run = tried()
    known = [f"TestCase.{name}" for name, _ in ASSERTIONS if hasattr(unittest.TestCase, name)]
    assert len(known) > 25
    assert set(known) < set(run.ways)
    assert run.unfailing == []


@pytest.mark.parametrize("name", [name for name, _ in ASSERTIONS if hasattr(unittest.TestCase, name)])
def test_an_assertion_that_asserts_nothing_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(unittest.TestCase, name, lambda self, *values, **more: None)
    assert f"TestCase.{name}" in tried().unfailing


def test_a_result_that_counts_no_failure_lets_every_way_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unittest.TextTestResult, "addFailure", lambda *_: None)
    run = tried()
    assert {"TestCase.assertEqual", "assert under unittest"} <= set(run.unfailing) < set(run.ways)


def test_no_way_of_failing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = set(sys.modules), list(sys.path), sys.dont_write_bytecode
    assert tried().ways
    assert (set(sys.modules), sys.path, sys.dont_write_bytecode) == before
    assert os.listdir(tmp_path) == []


def test_the_file_is_written_among_the_temporary_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with FailingFile(cases=True).written() as path:
        assert Path(path).parent.parent == tmp_path
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    with FailingFile(cases=True).written() as path:
        assert Path(path).read_text().count("def test_") > 25


def test_no_two_files_have_the_same_names() -> None:
    files = [FailingFile(functions=True, cases=True) for _ in range(5)]
    assert len({tuple(file.ways) for file in files}) == 5
    assert not any(word in file.text.lower() for file in files for word in ("swerve", "witness", "must_fail"))


@pytest.mark.parametrize(
    ("pattern", "begins", "ends"),
    [
        ("test", "test_", ""),
        ("check_*", "check_", ""),
        ("*_spec", "", "_spec"),
        ("it", "it_", ""),
        ("[a-z]*", "test_", ""),
        ("", "test_", ""),
    ],
)
def test_names_are_those_that_the_project_collects(pattern: str, begins: str, ends: str) -> None:
    for name in FailingFile(functions=True, pattern=pattern).ways:
        assert name.startswith(begins)
        assert name.split("_")[-1].isalpha()
        assert name.isidentifier()
        assert name.endswith(ends) or "_spec_" in name
