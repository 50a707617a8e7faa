"""The command line as a whole: misuse, a Redis that is not there, and text that others wrote."""

import pytest

from pipeline import screen
from pipeline.__main__ import main


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["ls", "--limit", "0"], ["requeue"], ["requeue", "x", "--all-dead"]]
)
def test_a_command_line_that_makes_no_sense_is_misuse(words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2


def test_a_redis_that_does_not_answer_is_said_without_its_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--redis", "redis://:secret@127.0.0.1:1/0", "status"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Redis at redis://:***@127.0.0.1:1/0 does not answer")
    assert main(["--redis", "http://elsewhere", "status"]) == 2


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(3.2, "3 s"), (720, "12 min"), (3 * 3600, "3.0 h"), (9 * 86400, "9 d"), (-1, "0 s")],
)
def test_ages_read_at_a_glance(seconds: float, shown: str) -> None:
    assert screen.age(seconds) == shown
