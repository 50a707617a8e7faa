"""Text that somebody else wrote cannot steer a terminal, or hide in it."""

import sys
import unicodedata

import pytest

from pipeline.screen import visible, visible_line


def test_what_a_policy_wrote_cannot_steer_the_terminal() -> None:
    assert visible("a\x1b]0;title\x07b\tc\n") == "a␛]0;title␇b\tc\n"
    assert visible("over\rwritten\x7f\x9b2J") == "over␍written␡\\u009b2J"


@pytest.mark.parametrize(
    "hidden", ["\u202e", "\u2066", "\u200b", "\u00ad", "\ufeff", "\u3164", "\U000e0041", "\ud800"]
)
def test_characters_that_show_as_nothing_are_shown_by_their_number(hidden: str) -> None:
    shown = visible(f"a{hidden}b")
    assert hidden not in shown
    assert shown == f"a{hidden.encode('unicode_escape', 'surrogatepass').decode()}b".replace(
        "\\xad", "\\u00ad"
    )


def test_what_can_be_seen_stays_as_it_is() -> None:
    text = "naïve café\u0301 Ωμέγα 漢字 한국어 🎉 a\u00a0b → ✓"
    assert visible(text) == text


@pytest.mark.slow
def test_no_control_or_format_character_is_left_whichever_it_is() -> None:
    shown = visible("".join(map(chr, range(sys.maxunicode + 1))))
    left = {one for one in shown if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")}
    assert left == {"\n", "\t"}
    assert shown.encode()


def test_a_name_cannot_look_like_two_rows() -> None:
    assert visible_line("task\nok  other task\t1") == "task␊ok  other task␉1"
