"""What task sets, policies and images say cannot control the terminal through the words of a worker's commands."""

import logging
import sys

import pytest
from rich.text import Text

from pipeline.request import RolloutRequest
from pipeline.trajectory import Exhausted, Failed, Submitted, Trajectory, Turn
from tests.hostile import HOSTILE, filled, screens, shown
from workers.display import PlainDisplay, TerminalDisplay
from workers.leaks import __main__ as leaks
from workers.play import EpisodeScreen as Episode


def test_play_does_not_let_it_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    turn = filled(Turn, kept_tokens=0)
    with screens(monkeypatch) as terminal:
        screen = Episode(sys.stdout)
        screen.told(turn.told)
        screen.replied(turn)
        screen.acted(turn)
        for outcome in (Submitted(patch=HOSTILE.encode()), filled(Exhausted), filled(Failed)):
            screen.ended(filled(Trajectory, turns=(turn,), outcome=outcome))
    assert "␛]0;PWN" in terminal.getvalue().decode()
    assert not {"\x07", "\x9b", "\u202e", "\x00"} & set(terminal.getvalue().decode())


@pytest.mark.parametrize("kind", [PlainDisplay, TerminalDisplay])
def test_no_list_of_work_does(
    kind: type[PlainDisplay] | type[TerminalDisplay], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with screens(monkeypatch) as terminal:
        more = {} if kind is PlainDisplay else {"items": "images", "num_items": 1}
        with kind(sys.stdout, heading=HOSTILE, **more) as display:
            display.begin(HOSTILE, HOSTILE)
            display.remark(HOSTILE, HOSTILE)
            display.finish(HOSTILE, [Text(HOSTILE)], ok=False)
    assert "␛]0;PWN" in shown(terminal.getvalue())


def test_neither_do_findings_of_leaks_and_the_log_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    with screens(monkeypatch) as terminal:
        print(leaks._row(filled(leaks.Finding, ok=False)))  # pyright: ignore[reportPrivateUsage]
        log = logging.StreamHandler(sys.stderr)
        log.emit(logging.makeLogRecord({"msg": f"claimed {filled(RolloutRequest).task.id!r} {HOSTILE[:-8]}"}))
    assert "␛]0;PWN" in shown(terminal.getvalue())
