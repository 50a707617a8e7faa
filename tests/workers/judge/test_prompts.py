"""A prompt holds the issue, some past steps and the step, within its tokens, and begins like the others of its rollout."""

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.judge import Judge
from pipeline.judge_templates import DEFAULT_TEMPLATES, parse_templates, read_templates
from pipeline.tokenizer import read_bundle
from pipeline.trajectory import Action, Turn
from tests.pipeline import samples
from tests.workers.judge.rollouts import ran, trajectory, tree, turn, user
from workers.judge.prompts import CHARS_PER_TOKEN, CharacterCutter, RolloutPrompts, TokenCutter
from workers.judge.stage import FinishedRollout, finished_rollout
from workers.judge.votes import ChatPrompt, IdsPrompt, chat
from workers.policy.render import Renderer

STEPS = tuple(turn(ran(f"cat file{n}.py", f"content {n}\n")) for n in range(30))


def by_characters(messages: list[ChatMessage]) -> ChatPrompt:
    return ChatPrompt(messages, sum(len(message.content) for message in messages) // CHARS_PER_TOKEN)


def rollout(turns: Sequence[Turn] = STEPS, issue: str = "add() drops its second argument") -> FinishedRollout:
    made = finished_rollout(trajectory(samples.request(), turns))
    return FinishedRollout(made.id, issue, made.turns, made.submitted)


def prompts(of: FinishedRollout, **fields: Any) -> RolloutPrompts[ChatPrompt]:
    """Prompts whose tokens are counted by characters."""
    judge = Judge(method="votes", **({"prompt_tokens": 100_000} | fields))
    templates = parse_templates(judge.templates)
    return RolloutPrompts(of, judge, templates, CharacterCutter(), lambda text: by_characters(chat(text)))


def text(prompt: ChatPrompt | None) -> str:
    assert prompt is not None
    return "\n".join(message.content for message in prompt.messages)


def test_a_prompt_shows_the_issue_the_past_the_step_and_the_question() -> None:
    failing = turn(ran("pytest -q", "1 failed", exit_code=1))
    late = turn(ran("sleep 1000", "z", exit_code=None), text="THOUGHT: wait")
    shown = text(prompts(rollout([STEPS[0], failing, late])).of(1))
    parts = [
        "# Issue\nadd() drops its second argument",
        "## Step 1\n$ cat file0.py\n(exit status 0)\ncontent 0",
        "# The step to judge: step 2",
        failing.text,
        "The command ended with exit status 1.\n1 failed",
        "\\boxed{+1} or \\boxed{-1}.",
    ]
    places = [shown.index(part) for part in parts]
    assert places == sorted(places)
    assert "sleep 1000" not in shown
    assert "stopped at its time limit" in text(prompts(rollout([STEPS[0], failing, late])).of(2))


def test_a_reply_without_a_command_or_with_commands_that_its_text_lacks_is_shown_as_such() -> None:
    called = turn(ran("ls -a", "calc.py"), Action(command="rm x"), text="I look.")
    of = prompts(rollout([turn(text="Hm."), called]))
    assert "The reply holds no command" in text(of.of(0))
    shown = text(of.of(1))
    assert "(a reply without a command)" in shown
    assert "$ ls -a\nThe command ended with exit status 0.\ncalc.py" in shown
    assert "$ rm x\nThe command was not run." in shown


ISSUE = "add() drops its second argument"


def test_the_past_of_a_turn_of_an_agent_program_is_that_of_its_own_conversation() -> None:
    of = prompts(rollout(tree(ISSUE), ISSUE))
    shown = text(of.of(6))
    assert "## Step 1\n$ cat calc.py" in shown
    assert "## Step 2\n$ sed -i" in shown
    assert "# The step to judge: step 3" in shown
    assert "nowhere.py" not in shown, "the subagent's"
    assert shown.count("$ cat calc.py") == 1, "not that of the other branch"
    assert "another conversation" not in shown
    branch = text(of.of(5))
    assert "# The step to judge: step 2" in branch
    assert "sed -i" not in branch


def test_a_conversation_that_was_not_asked_to_mend_the_issue_is_shown_with_what_it_was_asked() -> None:
    of = prompts(rollout(tree(ISSUE), ISSUE))
    subagent = text(of.of(4))
    assert f"# Issue\n{ISSUE}\n\nThe step is in another conversation of the engineer's" in subagent
    assert "asked to do this:\nmend calc\n" in subagent
    assert "## Step 1\n$ cat nowhere.py" in subagent
    assert "asked to do this:\nname this task\n" in text(of.of(0))
    long = (replace(tree(ISSUE)[0], told=(user("word " * 5000),)),)
    cut = text(prompts(rollout(long, ISSUE), prompt_tokens=1000).of(0))
    assert "characters left out" in cut


@pytest.mark.parametrize("history_steps", [0, 1, 2, 8])
def test_no_more_past_steps_are_shown_than_wanted_and_at_least_half_of_them(history_steps: int) -> None:
    of = prompts(rollout(), history_steps=history_steps)
    for step in range(len(STEPS)):
        shown = text(of.of(step)).count("## Step ")
        assert min(step, (history_steps + 1) // 2) <= shown <= history_steps
        assert step == 0 or f"## Step {step}\n" in text(of.of(step)) or history_steps == 0


def test_prompts_in_a_row_begin_alike_up_to_their_last_past_step() -> None:
    of = prompts(rollout(), history_steps=8)
    alike = 0
    for step in range(1, len(STEPS)):
        before, now = text(of.of(step - 1)), text(of.of(step))
        shared = "".join(
            a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False))
        )
        alike += f"## Step {step - 1}\n" in shared
        assert "# Earlier steps" in shared
    assert alike >= len(STEPS) * 2 // 3


def test_what_is_long_is_cut_in_its_middle_and_the_oldest_steps_go_first() -> None:
    steps = [turn(ran(f"cat file{n}.py", f"begin {n} " + "x" * 5000 + f" end {n}")) for n in range(9)]
    of = rollout(steps, issue="first words " + "y" * 9000 + " last words")
    judge_prompts = prompts(of, prompt_tokens=2000, history_steps=4)
    prompt = judge_prompts.of(8)
    assert prompt is not None
    assert prompt.num_tokens <= 2000
    shown = text(prompt)
    for part in ("first words", "last words", "begin 8", "end 8", "begin 7", "end 7", "characters left out"):
        assert part in shown
    wordy = rollout([*steps[:8], turn(ran("true"), text="words " * 500)], issue=of.issue)
    tight = text(prompts(wordy, prompt_tokens=2000, history_steps=4).of(8))
    assert "words " * 500 in tight
    assert 0 < tight.count("## Step ") < shown.count("## Step ")
    assert "## Step 8\n" in tight


def test_a_step_that_alone_exceeds_the_prompt_is_not_judged_and_others_are() -> None:
    long = turn(ran("true"), text="words " * 4000)
    of = prompts(rollout([STEPS[0], long, STEPS[2]]), prompt_tokens=1500)
    assert of.of(1) is None
    assert of.of(0) is not None
    assert of.of(2) is not None


def test_tokens_are_those_of_the_judges_own_tokenizer(tiny_model: Path) -> None:
    renderer = Renderer(read_bundle(tiny_model))
    judge = Judge(method="votes", prompt_tokens=2500)
    long = turn(ran("cat data", "ä<|im_end|>" * 4000))
    of = RolloutPrompts(
        rollout([*STEPS[:12], long]),
        judge,
        parse_templates(""),
        TokenCutter(renderer),
        lambda text: IdsPrompt(renderer.first_prompt(chat(text))),
    )
    prompt = of.of(12)
    assert prompt is not None
    assert 1000 < prompt.num_tokens <= 2500
    # What a command printed ends no message of the judge's prompt.
    assert list(prompt.ids).count(renderer.end_id) == 2
    assert "tokens left out" in renderer.decode(prompt.ids)


BROKEN = {
    "prompt: hello": "prompt: unknown key; known: system, issue, past_step, step, question, opening, shares",
    "step: '{{ reward }}'": "step: unknown variable 'reward'; known: commands, number, reply",
    "question: '{% if %}'": "question: ",
    "system: 3": "system: expected text, got 3",
    "shares: {issue: 2}": r"shares.issue: expected a number in \(0, 1\], got 2",
    "shares: {tests: 0.1}": "shares.tests: unknown key; known: issue, past_steps, results",
    "shares: 1": "shares: expected issue, past_steps, results, got 1",
    "- a list": "expected keys such as system",
    "a: [": "judge templates are not YAML",
}


@pytest.mark.parametrize(("source", "fault"), BROKEN.items())
def test_a_fault_of_templates_names_the_key_and_the_file(source: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=fault):
        parse_templates(source)
    file = tmp_path / "judge.yaml"
    file.write_text(source)
    with pytest.raises(ValueError, match=f"{file}: judge templates"):
        read_templates(file)


def test_a_file_of_some_keys_has_the_others_by_default(tmp_path: Path) -> None:
    file = tmp_path / "judge.yaml"
    file.write_text("system: Be strict.\nshares: {issue: 0.5}\n")
    templates = parse_templates(read_templates(file))
    assert templates.system.render({}) == "Be strict."
    assert templates.question.source == parse_templates(DEFAULT_TEMPLATES).question.source
    assert (templates.shares.issue, templates.shares.results) == (0.5, 0.2)
    with pytest.raises(ValueError, match="give a YAML file of judge templates"):
        read_templates(tmp_path / "absent.yaml")
