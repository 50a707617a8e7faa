"""What a data set says cannot steer a terminal, nor look like rows of its own: ids, image names, reasons, logs."""

import io
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.text import Text

from pipeline.taskfile import Gold, Verification, gold_path, write_gold, write_tasks
from tests.workers.claims import make_task
from workers import display as display_module
from workers.display import Display, PlainDisplay, TerminalDisplay
from workers.images.__main__ import main as images
from workers.leaks.__main__ import main as leaks
from workers.unqueued import LogDirectory
from workers.verify.__main__ import main as verify
from workers.verify.run import VerificationTable

HOSTILE = "\x1b]0;title\x07\u202egnp.x\u200b\nok  another row\r"
SHOWN = "␛]0;title␇\\u202egnp.x\\u200b␊ok  another row␍"
DANGEROUS = ("\x1b]", "\x07", "\u202e", "\u200b", "\nok", "\r")


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def dangerous_in(printed: str) -> list[str]:
    return [text for text in DANGEROUS if text in printed]


def hostile_tasks(directory: Path, **fields: str) -> Path:
    """A task file with one task whose id is hostile, and whose image does not exist."""
    path = directory / "tasks.jsonl"
    task = replace(make_task("swerve-test:absent", id=HOSTILE), **fields)
    write_tasks(path, [task])
    write_gold(gold_path(path), [Gold(id=HOSTILE, patch="x")])
    return path


@pytest.fixture(params=["pipe", "terminal"])
def display(request: pytest.FixtureRequest) -> Display:
    if request.param == "pipe":
        return PlainDisplay(FakeTerminal(), heading=HOSTILE)
    return TerminalDisplay(FakeTerminal(), items="tasks", num_items=1, heading=HOSTILE)


def shown_by(display: Display) -> str:
    stream = display._stream if isinstance(display, PlainDisplay) else display._bars.console.file
    assert isinstance(stream, FakeTerminal)
    return re.sub(r"\r(?=\x1b\[)", "", stream.getvalue())  # with which rich draws its bars anew


def test_a_display_shows_items_notes_and_lines_without_obeying_them(display: Display) -> None:
    with display:
        display.begin(HOSTILE, HOSTILE)
        display.advance(HOSTILE, HOSTILE, done=1, total=2)
        display.remark(HOSTILE, HOSTILE)
        display.finish(HOSTILE, [Text(HOSTILE), Text("plain", style="red")], ok=True)
    assert dangerous_in(shown_by(display)) == []
    assert SHOWN in shown_by(display)
    assert "plain" in shown_by(display)


def test_without_a_terminal_what_is_under_way_is_said_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PlainDisplay(stream := FakeTerminal())
    table = VerificationTable(plain, width=9)
    table.begin("test:a", "useless", 2, 6)
    assert stream.getvalue() == "", "nothing has taken long yet"
    monkeypatch.setattr(display_module, "QUIET_S", 0.0)
    table.begin("test:a", "gold", 4, 6)
    assert stream.getvalue() == "...       test:a  gold (5 of 6)\n"


def test_a_row_of_a_verification_stays_one_row(display: Display) -> None:
    found = Verification(
        task=HOSTILE,
        fingerprint="",
        states={"empty": 0, "useless": 0, "tests_only": 0, "gold": 0, "agent": 0},
        ok=False,
        reason=f"gold: {HOSTILE}",
        verdict_kind="exit_code",
        seconds=1.0,
        verified_at=1.0,
        warning=HOSTILE,
    )
    with display:
        table = VerificationTable(display, width=44)
        table.begin(HOSTILE, "gold", 0, 1)
        table.finish(found, f"a log\n{HOSTILE.replace(chr(10), '')}")
    shown = shown_by(display)
    assert dangerous_in(shown) == []
    assert f"gold: {SHOWN}" in shown
    assert f"; {SHOWN}" in shown
    assert f"    | {SHOWN.replace('␊', '').removesuffix('␍')}" in shown


@pytest.mark.docker
def test_verify_shows_an_id_without_obeying_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks, logs = hostile_tasks(tmp_path), tmp_path / "logs"
    assert verify([str(tasks), "--logs", str(logs)]) == 1
    printed = capsys.readouterr()
    assert dangerous_in(printed.out + printed.err) == []
    assert SHOWN in printed.out


@pytest.mark.docker
def test_leaks_shows_an_id_and_a_failure_without_obeying_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leaks([str(hostile_tasks(tmp_path))]) == 1
    printed = capsys.readouterr()
    assert dangerous_in(printed.out + printed.err) == []
    assert SHOWN in printed.out


@pytest.mark.parametrize("command", [verify, leaks])
def test_a_task_file_that_names_an_id_twice_is_an_error_in_one_harmless_line(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = hostile_tasks(tmp_path)
    tasks.write_bytes(tasks.read_bytes() * 2)
    assert callable(command)
    assert command([str(tasks)]) == 2
    error = capsys.readouterr().err
    assert dangerous_in(error) == []
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["pull"], ["ls"], ["evict", "--budget-bytes", "1GB", "--keep"]])
def test_images_names_a_malformed_image_without_obeying_it(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = hostile_tasks(tmp_path, image=f"a/{HOSTILE}")
    assert images([*arguments, str(tasks)]) == 2
    error = capsys.readouterr().err
    assert dangerous_in(error) == []
    assert error.count("\n") == 1


@pytest.mark.docker
def test_images_shows_why_a_build_failed_without_obeying_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    task = tmp_path / "tasks" / "one"
    task.mkdir(parents=True)
    (task / "task.json").write_text('{"image_name": "swerve-test/hostile-build:1"}')
    (task / "Dockerfile").write_bytes(b"FROM scratch\nNO\xe2\x80\xae\x1b]0;title\x07 x\n")
    assert images(["build", str(tmp_path / "tasks")]) == 1
    printed = capsys.readouterr()
    assert dangerous_in(printed.out + printed.err) == []
    assert "swerve-test/hostile-build:1" in printed.out


def test_a_directory_for_logs_stays_inside_logs_and_has_a_plain_name(tmp_path: Path) -> None:
    logs = LogDirectory(tmp_path / "logs")
    logs.check()
    for task_id in (HOSTILE, "..", ".", "../x", "a/b"):
        logs.write(task_id, "gold.log", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert len(names) == 5
    assert all(name.isascii() and name.isprintable() for name in names)
