import pytest

from workers.agent.commands import cut_middle, observe
from workers.sandbox.protocol import CommandResult


def ended(output: bytes, exit_code: int | None = 0, dropped_bytes: int = 0) -> CommandResult:
    return CommandResult(exit_code, output, dropped_bytes, 0.1)


def test_output_that_is_no_text_is_shown_with_replacement_characters() -> None:
    assert observe(ended(b"a\xffb"), limit_chars=100).output == "a\ufffdb"


@pytest.mark.parametrize("length", [0, 99, 100])
def test_output_within_the_limit_is_shown_whole(length: int) -> None:
    assert cut_middle("x" * length, limit_chars=100) == ("x" * length, 0)


@pytest.mark.parametrize("limit", [0, 1, 40, 41, 1000])
@pytest.mark.parametrize("length", [1001, 5000, 100_000])
def test_longer_output_keeps_both_ends_and_counts_what_is_missing(limit: int, length: int) -> None:
    text = "".join(chr(33 + i % 90) for i in range(length))
    shown, dropped = cut_middle(text, limit_chars=limit)
    head, note, tail = shown.split("\n")
    assert note == f"[... {dropped} characters elided ...]"
    assert text.startswith(head)
    assert text.endswith(tail)
    assert len(head) == len(tail)
    assert len(head) + dropped + len(tail) == length
    assert len(shown) <= limit or not head


def test_what_the_sandbox_dropped_is_counted_too() -> None:
    shown, dropped = cut_middle("ab" * 10, limit_chars=100, already_dropped=7)
    assert shown == "ababababab\n[... 7 characters elided ...]\nababababab"
    assert dropped == 7
