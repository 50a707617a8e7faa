"""What task sets and workers call themselves cannot control the terminal through the words of a trainer and of its reports."""

import sys
from pathlib import Path

import pytest

from pipeline.journal.rows import FILES, EndRow
from pipeline.where import __main__ as where
from tests.hostile import HOSTILE, filled, screens, shown
from trainer import judge
from trainer.records.console import LineConsole, TableConsole
from trainer.records.journal_writer import Journal
from trainer.report import __main__ as report


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run whose journal has a row of each kind, of which every text is hostile."""
    directory = tmp_path / f"run{HOSTILE.replace('/', '').replace(chr(0), '')}"
    with Journal(directory / "journal") as journal:
        for row in FILES:
            journal.append(filled(row, **({"reason": "finished"} if row is EndRow else {})))
    return directory


@pytest.mark.parametrize("command", [report.main, where.main, lambda words: judge.main(["report", *words])])
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_no_report_lets_hostile_text_through(
    run_dir: Path, command: object, more: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(command)
    with screens(monkeypatch) as terminal:
        command([str(run_dir), *more])
    assert len(shown(terminal.getvalue())) > 100


@pytest.mark.parametrize("kind", [LineConsole, TableConsole])
def test_no_console_of_a_run_does(
    kind: type[LineConsole] | type[TableConsole], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with screens(monkeypatch) as terminal, kind(sys.stdout) as console:
        for row in FILES:
            console.show(filled(row))
        console.say(HOSTILE)
        console.beat(HOSTILE)
    assert "␛]0;PWN" in shown(terminal.getvalue())
