"""Where the thought of a reply ends among its ids: whole tokens only, and never tokenised again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.policy.templates import ENDS, renderer
from workers.policy.thoughts import opened_thought, thought_tokens

QWEN = renderer("Qwen-Qwen3-0.6B")
DEEPSEEK = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"


def left(text: str, *, closing: str = "", keep_closing: bool = False) -> str:
    """What stays of a reply of the text once its thought is taken out."""
    ids = [*QWEN.encode_text(text), QWEN.end_id]
    num_ids = thought_tokens(ids, QWEN.decode, closing=closing, keep_closing=keep_closing)
    assert ids[num_ids:][-1] == QWEN.end_id, "the end of the turn is no thought"
    return QWEN.decode(ids[num_ids:])


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("<think>\nhm\n</think>\n\nls", "ls"),
        ("\n <think></think>ls", "ls"),
        ("[THINK]hm[/THINK]ls", "ls"),
        ("<think>\nnever closed ```bash\nls", ""),
        ("<think>a <think> b</think>c</think>d", "c</think>d"),
        ("ls", "ls"),
        ("", ""),
        ("cat <<E\n</think>\nE", "cat <<E\n</think>\nE"),
        ("first words <think>hm</think>", "first words <think>hm</think>"),
    ],
)
def test_a_thought_stands_at_the_beginning_or_is_text(reply: str, words: str) -> None:
    assert left(reply) == words


def test_a_thought_that_the_prompt_opened_ends_at_the_first_closing_tag() -> None:
    assert left("hm\n</think>\n\nls", closing="</think>") == "ls"
    assert left("hm\n</think>\n\nls", closing="</think>", keep_closing=True) == "</think>\n\nls"
    assert left("never closed", closing="</think>") == ""


@given(st.text(max_size=20), st.text(max_size=20), st.lists(st.integers(1, 5)))
def test_a_token_that_the_end_of_the_thought_divides_is_kept_whole(
    thought: str, words: str, widths: list[int]
) -> None:
    text = f"[THINK]{thought}[/THINK]\n{words}"
    tokens: list[str] = []
    for width in [*widths, len(text)]:  # tokens of any widths, so that ends fall anywhere
        token, text = text[:width], text[width:]
        tokens += [token] * bool(token)
    ids = range(len(tokens))
    whole = "".join(tokens)
    num_ids = thought_tokens(
        ids, lambda some: "".join(tokens[i] for i in some), closing="", keep_closing=False
    )
    end = whole.index("[/THINK]") + len("[/THINK]")
    end += len(whole[end:]) - len(whole[end:].lstrip())
    assert len("".join(tokens[:num_ids])) <= end
    assert num_ids == len(tokens) or len("".join(tokens[: num_ids + 1])) > end


@pytest.mark.parametrize("name", ENDS)
def test_whether_the_template_opens_a_thought_is_read_off_its_prompts(name: str) -> None:
    template = renderer(name)
    prompt = template.suffix([], last_id=template.end_id)
    closing, num_ids = opened_thought(prompt, template.decode)
    if name == DEEPSEEK:
        assert closing == "</think>"
        assert template.decode(prompt[-num_ids:]).strip() == "<think>"
    else:
        assert (closing, num_ids) == ("", 0)


def test_an_opening_tag_that_begins_inside_a_token_is_kept() -> None:
    tokens = ["<A>", "\n<thi", "nk>\n"]
    assert opened_thought(range(3), lambda ids: "".join(tokens[i] for i in ids)) == ("</think>", 0)
