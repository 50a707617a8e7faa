"""The tokenizer travels by content; a model directory that lacks something says what."""

import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.tokenizer import (
    TokenizerBundle,
    get_tokenizer,
    put_tokenizer,
    read_bundle,
    vocabulary_difference,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write(tmp_path, "config", vocab_size=100, eos_token_id=2)
    write(tmp_path, "tokenizer_config", eos_token="<|end|>", chat_template="{{ messages }}")
    write(
        tmp_path,
        "tokenizer",
        added_tokens=[{"id": 7, "content": "<|end|>"}, {"id": 8, "content": "<|other|>"}],
    )
    return tmp_path


def write(directory: Path, name: str, **fields: Any) -> None:
    (directory / f"{name}.json").write_text(json.dumps(fields))


def test_all_ids_that_end_a_turn_are_found(model: Path) -> None:
    assert read_bundle(model).stop_token_ids == (2, 7)
    write(model, "config", vocab_size=100, eos_token_id=[7, 9, 3])
    assert read_bundle(model).stop_token_ids == (3, 7, 9)


@pytest.mark.parametrize("table", ["text_config", "llm_config", "language_config"])
def test_a_language_model_within_a_model_says_its_sizes_in_a_table_of_its_own(
    model: Path, table: str
) -> None:
    inner = {"vocab_size": 100, "eos_token_id": 9, "model_type": "text"}
    write(model, "config", model_type="sees", **{table: inner})
    bundle = read_bundle(model)
    assert (bundle.vocab_size, bundle.stop_token_ids) == (100, (7, 9))
    write(model, "config", vocab_size=5, eos_token_id=[2, 3], **{table: inner | {"eos_token_id": None}})
    bundle = read_bundle(model)
    assert (bundle.vocab_size, bundle.stop_token_ids) == (100, (2, 3, 7))
    write(model, "config", **{table: {"eos_token_id": 9}})
    with pytest.raises(ValueError, match=r"config\.json: .*vocab_size.*; take the file that came with"):
        read_bundle(model)


def test_stop_tokens_of_the_generation_configuration_count(model: Path) -> None:
    write(model, "generation_config", eos_token_id=[2, 8])
    assert read_bundle(model).stop_token_ids == (2, 7, 8)
    write(model, "generation_config", temperature=0.6)
    assert read_bundle(model).stop_token_ids == (2, 7)


def test_a_template_file_and_variables_may_be_chosen(model: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text("{{ other }}<function=<parameter=")
    chosen = read_bundle(
        model, template_file=tmp_path / "other.jinja", template_kwargs={"enable_thinking": False}
    )
    assert chosen.chat_template == "{{ other }}<function=<parameter="
    assert chosen.template_kwargs == {"enable_thinking": False}
    assert chosen.reply_format.tool_calls == "qwen3_coder"
    with pytest.raises(ValueError, match=r"nowhere\.jinja.*give a chat template"):
        read_bundle(model, template_file=tmp_path / "nowhere.jinja")


def test_of_several_named_templates_the_default_is_taken(model: Path) -> None:
    named = [{"name": "tool_use", "template": "{{ tools }}"}, {"name": "default", "template": "{{ plain }}"}]
    write(model, "tokenizer_config", eos_token="<|end|>", chat_template=named)
    assert read_bundle(model).chat_template == "{{ plain }}"
    write(model, "tokenizer_config", eos_token="<|end|>", chat_template=named[:1])
    with pytest.raises(ValueError, match="none of them named default"):
        read_bundle(model)


def test_a_token_may_be_wrapped_as_older_files_do(model: Path) -> None:
    write(model, "tokenizer_config", eos_token={"content": "<|end|>", "lstrip": False}, chat_template="x")
    assert read_bundle(model).eos_token == "<|end|>"


def test_a_template_file_goes_before_the_configuration(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ newer }}")
    assert read_bundle(model).chat_template == "{{ newer }}"


@pytest.mark.parametrize(
    ("name", "fields", "complaint"),
    [
        ("config", {"eos_token_id": 2}, r"config\.json: .*vocab_size"),
        ("tokenizer_config", {"eos_token": "<|end|>"}, "no chat_template"),
        ("tokenizer_config", {"chat_template": "x"}, "eos_token is missing"),
        ("tokenizer", {"added_tokens": 7}, r"tokenizer\.json: .*added_tokens"),
    ],
)
def test_what_is_missing_is_named(model: Path, name: str, fields: dict[str, Any], complaint: str) -> None:
    write(model, name, **fields)
    with pytest.raises(ValueError, match=complaint):
        read_bundle(model)


def test_an_end_without_an_id_is_refused(model: Path) -> None:
    write(model, "config", vocab_size=100)
    write(model, "tokenizer", added_tokens=[])
    with pytest.raises(ValueError, match="no id for"):
        read_bundle(model)


def test_a_missing_file_is_named(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        read_bundle(model)


async def test_the_name_is_the_content(redis: Redis, model: Path) -> None:
    bundle = read_bundle(model)
    name = await put_tokenizer(redis, bundle)
    assert await put_tokenizer(redis, bundle) == name
    assert await get_tokenizer(redis, name) == bundle
    assert await get_tokenizer(redis, "unknown") is None


def vocabulary(model: Path, vocab: object, **added: int) -> TokenizerBundle:
    tokens = [{"id": number, "content": content} for content, number in added.items()]
    write(model, "tokenizer", model={"vocab": vocab}, added_tokens=[*tokens, {"id": 7, "content": "<|end|>"}])
    return read_bundle(model)


def test_vocabularies_are_the_same_if_every_token_of_the_first_has_its_id_in_the_second(model: Path) -> None:
    policy = vocabulary(model, {"a": 0, "b": 1})
    assert vocabulary_difference(policy, vocabulary(model, {"b": 1, "a": 0})) == ""
    assert vocabulary_difference(policy, vocabulary(model, [["a", -1.0], ["b", -2.0]])) == ""
    assert vocabulary_difference(policy, vocabulary(model, {"a": 0, "b": 1, "c": 2}, think=8)) == "", (
        "more is fine"
    )
    assert vocabulary_difference(policy, vocabulary(model, {"a": 1, "b": 0})) == (
        "id 0 is 'a' for the policy and 'b' there"
    )
    thinking = vocabulary(model, {"a": 0, "b": 1}, think=8)
    assert vocabulary_difference(thinking, policy) == "id 8 is 'think' for the policy and 'no token' there"
