"""Whatever a command prints, only its own control characters reach the terminal."""

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.progress import Progress

from pipeline.message import json_line
from pipeline.rich_console import VisibleConsole
from pipeline.screen import READER_LEFT, Screen, has_colours, lines, obeyed, visible
from tests.hostile import Kept

ROOT = Path(__file__).parents[2]
HOSTILE = "a\x1b]0;PWN\x07\x9b2J\r\x7f\u202eb\u00ad\U000e0041"
RED, PLAIN = obeyed("\x1b[31m"), obeyed("\x1b[0m")


@pytest.fixture
def written() -> io.BytesIO:
    return Kept()


def screen(written: io.BytesIO, encoding: str = "utf-8") -> Screen:
    return Screen(io.TextIOWrapper(written, encoding=encoding, write_through=True))


def test_a_print_that_forgets_to_make_text_visible_does_no_harm(written: io.BytesIO) -> None:
    print(HOSTILE, file=screen(written))
    assert written.getvalue().decode() == f"{visible(HOSTILE)}\n"


def test_our_own_sequences_are_obeyed_and_others_beside_them_are_not(written: io.BytesIO) -> None:
    print(f"{RED}{HOSTILE}{PLAIN}", file=screen(written))
    assert written.getvalue().decode() == f"\x1b[31m{visible(HOSTILE)}\x1b[0m\n"


def test_a_mark_of_another_process_is_text_like_any_other(written: io.BytesIO) -> None:
    code = (
        "from pipeline.screen import obeyed; import sys; sys.stdout.buffer.write(obeyed('\\x1b[2J').encode())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    screen(written).write(done.stdout.decode())
    assert b"\x1b" not in written.getvalue()


def test_a_row_stays_one_line_whatever_names_are_in_it() -> None:
    assert lines([f"task{RED} x\nwell", "end"]).count("\n") == 1


def test_a_character_that_the_encoding_lacks_is_written_by_its_number(written: io.BytesIO) -> None:
    print("café \u2192", file=screen(written, "ascii"))
    assert written.getvalue() == b"caf\\u00e9 \\u2192\n"


def test_json_stays_json_where_the_encoding_lacks_a_character(written: io.BytesIO) -> None:
    said = {"é": "漢\U0001f600"}
    print(json_line(said), file=screen(written, "ascii"))
    assert json.loads(written.getvalue()) == said


def test_a_command_goes_on_without_its_reader_only_if_it_says_so() -> None:
    def ended(words: str) -> tuple[int, str]:
        gone, pipe = os.pipe()
        os.close(gone)
        with open(pipe, "w") as stdout:
            code = f"import sys; sys.argv = ['-m']; import pipeline.screen; {words}; print(1, flush=True); sys.exit(7)"
            command = [sys.executable, "-c", code]
            done = subprocess.run(
                command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False
            )
        return done.returncode, done.stderr

    assert ended("pass") == (READER_LEFT, "")
    assert ended("pipeline.screen.outlive_readers()") == (7, "")


def test_json_for_a_screen_holds_the_same_text_and_nothing_that_a_terminal_obeys(written: io.BytesIO) -> None:
    print(json_line({HOSTILE: "漢字"}), file=screen(written))
    shown = written.getvalue().decode()
    assert json.loads(shown) == {HOSTILE: "漢字"}
    assert visible(shown) == shown
    assert "漢字" in shown


def test_bars_and_colours_of_rich_reach_the_terminal_and_what_data_sets_say_in_them_does_not(
    written: io.BytesIO,
) -> None:
    console = VisibleConsole(screen(written), force_terminal=True, color_system="standard", width=80)
    with Progress(console=console) as bars:
        bars.add_task(HOSTILE, total=2)
        console.print(HOSTILE, style="red", markup=False)
        # While bars are shown, rich reads the sequences in what others print, and would write a link of its own.
        print("\x1b]8;;http://elsewhere/\x1b\\click\x1b]8;;\x1b\\")
    shown = written.getvalue().decode()
    assert "\x1b[31m" in shown
    assert "\x1b[?25l" in shown
    assert not {"\x07", "\x9b", "\u202e", "\x7f"} & set(shown)
    assert "\x1b]" not in shown


def test_every_command_prints_through_such_a_screen() -> None:
    """Of no command that has to ask for it: argparse repeats what was typed, and an error names an id."""
    for words in (["pipeline", "ls", HOSTILE], ["trainer.report", HOSTILE], ["workers.verify", HOSTILE]):
        done = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, check=False)
        shown = (done.stdout + done.stderr).decode()
        assert done.returncode
        assert visible(shown) == shown, words


def test_colours_are_for_a_terminal_and_for_those_who_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(ours, "rb"), open(theirs, "w") as terminal:
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert has_colours(terminal)
        assert not has_colours(io.StringIO())
        monkeypatch.setenv("NO_COLOR", "1")
        assert not has_colours(terminal)
