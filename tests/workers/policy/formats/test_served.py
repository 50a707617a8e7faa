"""Thoughts in replies of which nobody knows whether the prompt had begun them."""

import pytest

from pipeline.chat import ChatMessage
from workers.policy.formats import ThoughtSplitter, thoughts_and_content

FENCED = "```bash\ncat > a <<'E'\n</think>\nE\n```"


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("ls", "", "ls"),
        ("<think>\nhm\n</think>\n\nls", "hm", "ls"),
        (" <think>hm ```bash\nrm x\n``` </think>ls", "hm ```bash\nrm x\n```", "ls"),
        ("<think>cut short ```bash\nrm x\n```", "cut short ```bash\nrm x\n```", ""),
        ("opened by the prompt\n</think>\n\nls", "opened by the prompt", "ls"),
        (FENCED, "", FENCED),
        ("<bash_code>echo '</think>'</bash_code>", "", "<bash_code>echo '</think>'</bash_code>"),
        ("<bash_code>rm x</bash_code>\n</think>ls", "<bash_code>rm x</bash_code>", "ls"),
        ("a <think> in the middle", "", "a <think> in the middle"),
    ],
)
def test_thoughts_end_at_their_mark_and_a_mark_in_a_command_is_text(
    text: str, thoughts: str, content: str
) -> None:
    assert thoughts_and_content(text) == (thoughts, content)


def test_an_exact_agent_and_a_server_that_tells_thoughts_apart_keep_their_content() -> None:
    plain = ChatMessage("assistant", "<think>hm</think>ls")
    told = ChatMessage("assistant", "x</think>", reasoning="hm")
    assert ThoughtSplitter(exact=True)(plain) == plain
    assert ThoughtSplitter(exact=False)(told) == told
    assert ThoughtSplitter(exact=False)(plain) == ChatMessage("assistant", "ls", reasoning="hm")
