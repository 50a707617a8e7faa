"""Rows become exactly the tokens that a rollout has, each line is checked, and the order is a function of seed and epoch."""

import asyncio
import gzip
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ChatMessage
from pipeline.request import Claim
from pipeline.tokenizer import TokenizerBundle, read_bundle
from pipeline.trajectory import Trajectory, Turn
from tests.pipeline import samples
from tests.trainer.rollouts.test_export import TOOL_AGENT
from tests.workers.agent.episode import claim, opening, user
from tests.workers.policy import templates
from trainer.imitation.rows import ImitationData, RowOrder, make_batch_of_rows, read_data
from trainer.recipe import ImitationRecipe, load_any_recipe
from trainer.rollouts.export_files import FineTuning
from workers.policy.scripted import ScriptedPolicies

RECIPE = """
kind = "sft"
name = "rows"
model = "{model}"
num_epochs = 2
[data]
train = ["train.jsonl"]
[batch]
rows_per_step = 2
[learner]
lr = 1e-3
micro_batch_tokens = 512
"""
QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "mend it"}]
ANSWER = {"role": "assistant", "content": "done"}
ASKED, ANSWERED = {"messages": QUESTION}, {"messages": [*QUESTION, ANSWER]}


@pytest.fixture
def bundle(tiny_model: Path) -> TokenizerBundle:
    return read_bundle(tiny_model)


def recipe(directory: Path, model: Path, *overrides: str) -> ImitationRecipe:
    path = directory / "recipe.toml"
    path.write_text(RECIPE.format(model=model))
    loaded = load_any_recipe(path, overrides)
    assert isinstance(loaded, ImitationRecipe)
    return loaded


def write(path: Path, *rows: Any) -> None:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))


@pytest.fixture
def reading(tmp_path: Path, tiny_model: Path, bundle: TokenizerBundle) -> Any:
    """Reads these rows as train.jsonl, by the recipe with these overrides and by this tokenizer."""

    def read(*rows: Any, overrides: Sequence[str] = (), by: TokenizerBundle = bundle) -> ImitationData:
        write(tmp_path / "train.jsonl", *rows)
        return read_data(recipe(tmp_path, tiny_model, *overrides), by)

    return read


async def played(bundle: TokenizerBundle, told: Sequence[Sequence[ChatMessage]], *replies: str) -> Trajectory:
    """A rollout in which the policy gives these replies, each to the messages at its place."""
    has_tools = any(one.role == "tool" for messages in told for one in messages)
    of: Claim = claim(**({"agent": TOOL_AGENT} if has_tools else {}), context_tokens=4000)
    conversation = await ScriptedPolicies(bundle, replies).open(of)
    turns: list[Turn] = [await conversation.begin(told[0])]
    for messages in told[1:]:
        turn = await conversation.answer(messages)
        assert turn is not None
        turns.append(turn)
    return samples.trajectory(of, turns=tuple(turns))


def exported(directory: Path, *rollouts: Trajectory) -> list[dict[str, Any]]:
    with FineTuning(directory) as file:
        for one in rollouts:
            file.write(one, None)
    return [json.loads(line) for line in (directory / "sft.jsonl").read_text().splitlines()]


def as_pairs(data: ImitationData) -> list[tuple[list[int], list[int]]]:
    return [
        (sample.tokens_T.tolist(), sample.trained_T.astype(int).tolist())
        for row in data.train
        for sample in row.samples
    ]


def of_export(rows: Sequence[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
    return [(one["token_ids"], one["loss_mask"]) for row in rows for one in row["samples"]]


SPOKEN = ["first words <|im_end|>", " second,\n spaced \n", "third"]
SEEN = [opening("be brief", "mend <|im_start|> it"), user("so?<|im_end|>"), user("and?")]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>'


def without_samples(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | {"samples": []} for row in rows]


@pytest.mark.parametrize("name", ["tiny", *templates.ENDS])
def test_the_ids_of_a_rendered_row_are_those_of_a_rollout_with_the_same_replies(
    name: str, reading: Any, bundle: TokenizerBundle, tmp_path: Path
) -> None:
    by = bundle if name == "tiny" else templates.bundle(name)
    if "R1" in name:  # its prompts open a thought, which words alone do not close
        with pytest.raises(
            ValueError,
            match=r"line 1: messages: chat_template: it ends each prompt with .*<think>.*; give the row samples",
        ):
            reading({"messages": [*QUESTION, ANSWER]}, by=by)
        return
    rows = exported(tmp_path, asyncio.run(played(by, SEEN, *SPOKEN)))
    assert [sum(mask) > len(SPOKEN) for _, mask in of_export(rows)] == [True]
    assert as_pairs(reading(*without_samples(rows), by=by)) == of_export(rows)


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen-Qwen3-0.6B"])
@pytest.mark.parametrize("words", ["", "let us see\n"])
def test_a_rendered_row_with_tool_calls_has_the_ids_of_a_rollout(
    name: str, words: str, reading: Any, tmp_path: Path
) -> None:
    by = templates.bundle(name)
    told = [SEEN[0], [ChatMessage("tool", "calc.py", tool_call_id="c1")], user("and?")]
    rows = exported(tmp_path, asyncio.run(played(by, told, f"{words}{CALL}", f"{words}{CALL}", "done")))
    assert [bool(one.get("tool_calls")) for one in rows[0]["messages"] if one["role"] == "assistant"] == [
        True,
        True,
        False,
    ]
    read = reading(*without_samples(rows), by=by, overrides=["learner.micro_batch_tokens=2048"])
    assert as_pairs(read) == of_export(rows)


def test_thoughts_are_written_as_the_template_writes_them_in_a_last_reply(reading: Any) -> None:
    by = templates.bundle("Qwen-Qwen3-0.6B")
    row = {"messages": [*QUESTION, ANSWER | {"reasoning_content": "hm"}]}
    ((ids, mask),) = as_pairs(reading(row, by=by))
    said = templates.renderer("Qwen-Qwen3-0.6B").decode(
        [one for one, is_on in zip(ids, mask, strict=True) if is_on]
    )
    assert said == "<think>\nhm\n</think>\n\ndone"


@pytest.mark.parametrize(
    ("name", "reply", "complaint"),
    [
        ("meta-llama-Llama-3.1-8B-Instruct", {"content": "let us see"}, "it loses thoughts, words or calls"),
        ("Qwen3-Coder", {"reasoning_content": "hm"}, "it loses thoughts, words or calls"),
        ("meta-llama-Llama-3.1-8B-Instruct", {"content": ""}, None),
    ],
)
def test_a_reply_of_which_the_template_loses_a_part_is_refused(
    name: str, reply: dict[str, Any], complaint: str | None, reading: Any
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    row = {"messages": [*QUESTION, ANSWER | {"tool_calls": [call]} | reply], "tools": [BASH_TOOL]}
    by, longer = templates.bundle(name), ["learner.micro_batch_tokens=2048"]
    if complaint is None:
        assert reading(row, by=by, overrides=longer).train
        return
    with pytest.raises(
        ValueError, match=f"line 1: messages: chat_template: {complaint}.*; give the row samples"
    ):
        reading(row, by=by, overrides=longer)


def test_exported_passes_train_exactly_their_marked_tokens(
    reading: Any, bundle: TokenizerBundle, tmp_path: Path
) -> None:
    one = asyncio.run(played(bundle, SEEN, *SPOKEN))
    rows = exported(tmp_path, one)
    rows[0]["messages"] = [{"role": "user", "content": "these are never rendered"}]
    data = reading(*rows)
    assert as_pairs(data) == of_export(rows)
    assert (data.counts.num_exact, data.counts.num_rendered) == (1, 0)
    batch = make_batch_of_rows(1, [(0, 0)], data.train)
    assert [sample.tokens_T[sample.trained_T].tolist() for sample in batch.samples] == [
        [token for token, is_on in zip(ids, mask, strict=True) if is_on] for ids, mask in of_export(rows)
    ]


def test_a_further_conversation_of_an_exported_rollout_is_not_trained_twice(reading: Any) -> None:
    first = ANSWERED | {"request_id": "r1", "samples": [{"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]}
    further = ANSWERED | {"request_id": "r1", "samples": []}
    other = ANSWERED | {"request_id": "r2", "samples": []}
    data = reading(further, first, other)
    assert [row.num_trained_tokens for row in data.train][:1] == [2]
    assert (data.counts.num_exact, data.counts.num_rendered, data.counts.num_continued) == (1, 1, 1)


def test_a_reply_with_weight_0_is_fed_and_not_trained(reading: Any) -> None:
    whole = [*QUESTION, ANSWER, *QUESTION[1:], ANSWER]
    part = [*QUESTION, ANSWER | {"weight": 0}, *QUESTION[1:], ANSWER | {"weight": 1}]
    ((ids, mask),) = as_pairs(reading({"messages": whole}))
    ((same_ids, part_mask),) = as_pairs(reading({"messages": part}))
    assert ids == same_ids
    runs = [
        list(run)
        for is_on, run in itertools.groupby(range(len(mask)), key=lambda place: mask[place])
        if is_on
    ]
    assert [place for place, is_on in enumerate(part_mask) if is_on] == runs[1]


def test_messages_after_the_last_reply_are_left_out(reading: Any) -> None:
    assert as_pairs(reading({"messages": [*QUESTION, ANSWER, *QUESTION[1:]]})) == as_pairs(reading(ANSWERED))


SAMPLE = {"token_ids": [5, 6], "loss_mask": [0, 1]}


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{", r"line 2: not a row: .*; give one JSON object with messages or samples"),
        ("[1]", r"line 2: not a row: Expected `object`"),
        ({"prompt": "p"}, r"line 2: messages is missing; give messages, or samples"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            r'messages\[0\]\.role is "bot"; it must be one of system, ',
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            r"messages\[0\]\.content: Expected `str \| null`, got `int`",
        ),
        (ASKED, r"messages: there is no reply of the role assistant"),
        ({"messages": [ANSWER]}, r"messages\[0\] is a reply with no message before it"),
        (
            {"messages": [*QUESTION, ANSWER, ANSWER]},
            r"messages\[3\] is a reply with another one right before it",
        ),
        (
            {"messages": [{"role": "user", "text": "hi"}, ANSWER]},
            r"messages\[0\]\.content is missing; give the text",
        ),
        (
            {"messages": [*QUESTION, {"role": "assistant", "text": "hi"}]},
            r"messages\[2\] is an empty reply, and training",
        ),
        (
            {"messages": [*QUESTION, ANSWER], "tools": [{"name": "bash"}]},
            r"tools\[0\]\.function\.name is missing; give",
        ),
        ({"messages": [*QUESTION, ANSWER | {"weight": 0}]}, r"everywhere, so nothing is trained"),
        (
            {"messages": [*QUESTION, {"role": "tool", "content": "x"}, ANSWER]},
            r"messages\[2\] is about a tool, and the row has no tools",
        ),
        ({"samples": [SAMPLE | {"loss_mask": [0, 0]}]}, r"loss_mask is 0 everywhere, so nothing is trained"),
        (
            {"samples": [SAMPLE | {"loss_mask": [1, 1]}]},
            r"samples\[0\]\.loss_mask begins with 1; nothing comes before",
        ),
        (
            {"samples": [SAMPLE | {"loss_mask": [0]}]},
            r"samples\[0\]: token_ids has 2 entries and loss_mask 1",
        ),
        (
            {"samples": [SAMPLE | {"loss_mask": [0, 2]}]},
            r"samples\[0\]\.loss_mask holds 2; each entry must be 0 or 1",
        ),
        (
            {"samples": [SAMPLE, SAMPLE | {"token_ids": [5, 512]}]},
            r"samples\[1\]\.token_ids holds 512, outside of the model's vocabulary of 512",
        ),
        ({"samples": [SAMPLE | {"token_ids": [-1, 5]}]}, r"samples\[0\]\.token_ids holds -1, outside"),
        (
            {"samples": [{"token_ids": [5] * 513, "loss_mask": [0] + [1] * 512}]},
            r"it has 513 tokens in one sample, more than data\.max_tokens = 512: raise that and learner\.micro_batch_tokens, or",
        ),
    ],
)
def test_a_bad_row_is_refused_with_its_line_its_field_and_the_fix(
    row: Any, complaint: str, reading: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"^data\.train: {tmp_path}/train\.jsonl, line 2: .*"):
        reading(ANSWERED, row)
    with pytest.raises(ValueError, match=complaint):
        reading(ANSWERED, row)


def test_a_file_may_begin_with_a_byte_order_mark_and_end_its_lines_as_on_windows(
    reading: Any, tmp_path: Path, tiny_model: Path, bundle: TokenizerBundle
) -> None:
    plain = reading(ANSWERED, ANSWERED)
    path, text = tmp_path / "train.jsonl", json.dumps(ANSWERED).encode()
    path.write_bytes(b"\xef\xbb\xbf" + text + b"\r\n\r\n" + text)
    assert as_pairs(read_data(recipe(tmp_path, tiny_model), bundle)) == as_pairs(plain)
    path.write_bytes(gzip.compress(text))
    with pytest.raises(
        ValueError, match=r"data\.train: .*train\.jsonl: it is compressed by gzip; decompress it"
    ):
        read_data(recipe(tmp_path, tiny_model), bundle)


def test_an_empty_reply_may_be_fed(reading: Any) -> None:
    empty = {"role": "assistant", "content": None, "weight": 0}
    assert reading({"messages": [*QUESTION, empty, *QUESTION[1:], ANSWER]}).train


def test_rows_longer_than_the_model_holds_are_refused(reading: Any) -> None:
    long = {"samples": [{"token_ids": [5] * 8193, "loss_mask": [0] + [1] * 8192}]}
    with pytest.raises(ValueError, match="more than max_position_embeddings = 8192 of the model"):
        reading(long, overrides=["learner.micro_batch_tokens=9000"])


def test_rows_that_are_too_long_are_left_out_and_counted_if_the_recipe_says_so(
    reading: Any, tmp_path: Path
) -> None:
    long = {"samples": [{"token_ids": [5] * 513, "loss_mask": [0] + [1] * 512}]}
    data = reading(long, ANSWERED, long, overrides=["data.too_long=leave_out"])
    assert len(data.train) == 1
    assert data.counts.too_long == [f"{tmp_path}/train.jsonl, line {number}" for number in (1, 3)]
    with pytest.raises(
        ValueError, match=r"no row is left to train on: .*1 left out because they are too long"
    ):
        reading(long, overrides=["data.too_long=leave_out"])


def test_a_missing_file_is_refused(tmp_path: Path, tiny_model: Path, bundle: TokenizerBundle) -> None:
    with pytest.raises(
        ValueError, match=r"data\.train: .*train\.jsonl: No such file .*; give a file of rows"
    ):
        read_data(recipe(tmp_path, tiny_model), bundle)


def test_each_epoch_trains_every_row_once_in_an_order_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    order = RowOrder.of(recipe(tmp_path, tiny_model, "batch.rows_per_step=4", "num_epochs=3"), num_rows=10)
    assert order.num_steps == 8
    taken = [one for step in range(1, order.num_steps + 1) for one in order.rows_of(step)]
    assert [len(order.rows_of(step)) for step in range(1, 9)] == [4] * 7 + [2]
    assert Counter(taken) == Counter((epoch, row) for epoch in range(3) for row in range(10))
    epochs = [[row for epoch, row in taken if epoch == number] for number in range(3)]
    assert len({tuple(rows) for rows in epochs}) == 3
    assert order.rows_of(5) == RowOrder.of(
        recipe(tmp_path, tiny_model, "batch.rows_per_step=4", "num_epochs=3"), num_rows=10
    ).rows_of(5)
    other = RowOrder.of(recipe(tmp_path, tiny_model, "seed=1", "batch.rows_per_step=10"), num_rows=10)
    assert [row for _, row in other.rows_of(1)] != epochs[0]


def test_num_steps_goes_on_with_further_epochs(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "steps.toml"
    path.write_text(RECIPE.format(model=tiny_model).replace("num_epochs = 2", "num_steps = 9"))
    loaded = load_any_recipe(path)
    assert isinstance(loaded, ImitationRecipe)
    order = RowOrder.of(loaded, num_rows=4)
    assert [epoch for epoch, _ in order.rows_of(9)] == [4, 4]


def test_a_row_that_a_batch_holds_twice_is_two_trajectories_in_it(reading: Any) -> None:
    data = reading(ANSWERED)
    batch = make_batch_of_rows(1, [(0, 0), (1, 0)], data.train)
    assert len({sample.request_id for sample in batch.samples}) == 2
