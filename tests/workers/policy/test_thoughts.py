"""Where the thought of a reply ends among its ids: whole tokens only, and never tokenised again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.chat import THOUGHT_MARKS, ThoughtFormat
from tests.workers.policy.templates import ENDS, renderer
from workers.policy.render import ThoughtFinder

QWEN = renderer("Qwen-Qwen3-0.6B")
DEEPSEEK = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"


def left(text: str, *, form: ThoughtFormat = "think", prompt_end: str = "assistant\n") -> str:
    """What stays of a reply of the text once its thought is taken out."""
    finder = ThoughtFinder.of(QWEN.decode, THOUGHT_MARKS[form], QWEN.encode_text(prompt_end))
    ids = [*QWEN.encode_text(text), QWEN.end_id]
    rest = ids[finder.num_tokens(ids) :]
    assert rest[-1] == QWEN.end_id, "the end of the turn is no thought"
    return QWEN.decode(rest)


@pytest.mark.parametrize(
    ("form", "reply", "words"),
    [
        ("think", "<think>\nhm\n</think>\n\nls", "ls"),
        ("think", "\n <think></think>ls", "ls"),
        ("mistral", "[THINK]hm[/THINK]ls", "ls"),
        ("think", "<think>\nnever closed ```bash\nls", ""),
        ("think", "<think>a <think> b</think>c</think>d", "c</think>d"),
        ("think", "<think>a</think><think>b</think>c", "<think>b</think>c"),
        ("think", "ls", "ls"),
        ("think", "", ""),
        ("think", "cat <<E\n</think>\nE", "cat <<E\n</think>\nE"),
        ("think", "first words <think>hm</think>", "first words <think>hm</think>"),
        (
            "harmony",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
            "<|start|>assistant<|channel|>final<|message|>ls",
            "<|channel|>final<|message|>ls",
        ),
    ],
)
def test_a_thought_stands_at_the_beginning_or_is_text(form: ThoughtFormat, reply: str, words: str) -> None:
    assert left(reply, form=form) == words


def test_a_thought_that_the_prompt_opened_ends_at_the_first_mark() -> None:
    opened = "assistant\n<think>\n"
    assert left("hm\n</think>\n\nls", prompt_end=opened) == "ls"
    assert left("never closed", prompt_end=opened) == ""
    assert left("<think>once more\n</think>\n\nls", prompt_end=opened) == "ls"


@given(st.text(max_size=20), st.text(max_size=20), st.lists(st.integers(1, 5)))
def test_a_token_that_the_end_of_the_thought_divides_is_kept_whole(
    thought: str, words: str, widths: list[int]
) -> None:
    text = f"[THINK]{thought}[/THINK]\n{words}"
    tokens: list[str] = []
    for width in [*widths, len(text)]:  # tokens of any widths, so that ends fall anywhere
        token, text = text[:width], text[width:]
        tokens += [token] * bool(token)
    whole = "".join(tokens)
    finder = ThoughtFinder.of(lambda ids: "".join(tokens[i] for i in ids), THOUGHT_MARKS["mistral"], ())
    num_ids = finder.num_tokens(range(len(tokens)))
    end = whole.index("[/THINK]") + len("[/THINK]")
    end += len(whole[end:]) - len(whole[end:].lstrip())
    assert len("".join(tokens[:num_ids])) <= end
    assert num_ids == len(tokens) or len("".join(tokens[: num_ids + 1])) > end


@pytest.mark.parametrize("name", ENDS)
def test_whether_the_template_opens_a_thought_is_read_off_its_prompts(name: str) -> None:
    template = renderer(name)
    marks = THOUGHT_MARKS[template.reply_format.thoughts]
    finder = ThoughtFinder.of(template.decode, marks, template.suffix([], last_id=template.end_id))
    assert finder.is_opened == (name == DEEPSEEK)
    assert template.decode(finder.opening).strip() == ("<think>" if finder.is_opened else "")


def test_marks_of_a_thought_whose_opening_shares_a_token_with_other_text_stay() -> None:
    tokens = ["<A>", "\n<thi", "nk>\n", "hm", "</think>", "ls"]
    finder = ThoughtFinder.of(lambda ids: "".join(tokens[i] for i in ids), THOUGHT_MARKS["think"], range(3))
    assert (finder.is_opened, finder.opening) == (True, ())
    assert finder.num_tokens(range(3, 6)) == 1
