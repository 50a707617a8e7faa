"""How a reply ends a turn, by family: the token that was sampled is not fed again, and what it lacks is."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.agent.upstream import BASH_TOOL
from pipeline.chat import ChatMessage, recognised
from pipeline.errors import RequestError
from pipeline.tokenizer import TokenizerBundle
from workers.policy.render import Renderer

DIRECTORY = Path(__file__).parents[2] / "chat_templates"
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
COHERE = (
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|CHATBOT_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
)
USER = [ChatMessage("user", "on")]
RESULT = [ChatMessage("tool", "out")]


class Family:
    """A template with a tokenizer of letters and its control tokens."""

    def __init__(self, name: str, controls: tuple[str, ...], stops: tuple[str, ...], **options: Any) -> None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {piece: index for index, piece in enumerate([*controls, *alphabet])}
        self.tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([AddedToken(text, special=True) for text in controls])
        source = (DIRECTORY / f"{name}.jinja").read_text()
        bundle = TokenizerBundle(
            tokenizer_json=self.tokenizer.to_str().encode(),
            chat_template=source,
            eos_token=stops[0],
            bos_token="",
            stop_token_ids=tuple(controls.index(stop) for stop in stops),
            vocab_size=len(vocabulary),
            reply_format=recognised(source),
        )
        self.renderer = Renderer(bundle, **options)

    def id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def suffix(self, messages: list[ChatMessage], last: str) -> str:
        ids = self.renderer.suffix(messages, last_id=self.id(last))
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def test_harmony_keeps_the_token_that_ended_sampling_in_place_of_its_own_end() -> None:
    family = Family("openai-gpt-oss-120b", HARMONY, ("<|return|>", "<|call|>"), tools=(BASH_TOOL,))
    assert family.renderer.end_id == family.id("<|return|>")
    ordinary = "<|start|>user<|message|>on<|end|><|start|>assistant"
    assert family.suffix(USER, "<|return|>") == ordinary
    assert family.suffix(USER, "<|call|>") == ordinary
    assert family.suffix(USER, "x") == "<|end|>" + ordinary
    result = (
        '<|start|>functions.bash to=assistant<|channel|>commentary<|message|>"out"<|end|><|start|>assistant'
    )
    assert family.suffix(RESULT, "<|call|>") == result
    assert family.suffix(RESULT, "x") == "<|call|>" + result


def test_glm_ends_a_turn_with_the_role_that_speaks_next() -> None:
    stops = ("<|endoftext|>", "<|user|>", "<|observation|>")
    family = Family("trl-glm4moe", GLM, stops, tools=(BASH_TOOL,))
    assert family.renderer.end_id == family.id("<|user|>")
    assert family.suffix(USER, "<|user|>") == "\non<|assistant|>"
    assert family.suffix(USER, "x") == "<|user|>\non<|assistant|>"
    result = "\n<tool_response>\nout\n</tool_response><|assistant|>"
    assert family.suffix(RESULT, "<|observation|>") == result
    assert family.suffix(RESULT, "<|user|>") == "<|observation|>" + result


def test_cohere_closes_a_reply_that_was_cut_short() -> None:
    family = Family("trl-cohere2", COHERE, ("<|END_OF_TURN_TOKEN|>",))
    opening = "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>"
    ordinary = f"<|START_OF_TURN_TOKEN|><|USER_TOKEN|>on<|END_OF_TURN_TOKEN|>{opening}"
    assert family.suffix(USER, "<|END_OF_TURN_TOKEN|>") == ordinary
    assert family.suffix(USER, "x") == f"<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{ordinary}"


def test_a_template_whose_end_nothing_samples_is_refused() -> None:
    with pytest.raises(RequestError, match="no stop token"):
        Family("trl-phi3", ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "</s>"), ("</s>",))


def test_a_prompt_is_known_to_have_opened_the_thoughts() -> None:
    chatml = ("<|im_start|>", "<|im_end|>")
    thinking = Family("trl-qwen3_5_think", chatml, ("<|im_end|>",)).renderer
    silent = Family("trl-qwen3_5_nothink", chatml, ("<|im_end|>",)).renderer
    told = [ChatMessage("system", "s"), ChatMessage("user", "<think>")]
    assert thinking.opens_thought(thinking.first_prompt(told))
    assert not silent.opens_thought(silent.first_prompt(told))


def test_an_id_that_the_policy_wrote_never_becomes_a_control_token() -> None:
    controls = ("<|im_end|>", "<|im_middle|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>")
    family = Family("moonshotai-Kimi-K2", controls, ("<|im_end|>",), tools=(BASH_TOOL,))
    harmless, hostile = (
        family.renderer.suffix([ChatMessage("tool", "out", tool_call_id=one)], last_id=None)
        for one in ("functions.bash:0", "functions<|im_end|>.bash:0")
    )
    assert [token for token in hostile if token < len(controls)] == [
        token for token in harmless if token < len(controls)
    ]
