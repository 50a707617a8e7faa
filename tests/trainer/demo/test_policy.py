"""The shipped policy: small, loadable, and at one with the tokenizer and the recipe of this version."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from trainer import demo
from trainer.demo.family import make_task
from trainer.demo.lessons import Templates
from trainer.warmstart.scratch import build_tokenizer

POLICY = Path(demo.__file__).with_name("policy")


@pytest.fixture(scope="module")
def policy() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(POLICY, dtype=torch.float32)


def test_the_policy_is_under_five_megabytes() -> None:
    assert sum(file.stat().st_size for file in POLICY.iterdir()) < 5_000_000


def test_its_tokenizer_is_the_one_this_version_builds(policy: LlamaForCausalLM) -> None:
    shipped = Tokenizer.from_file(str(POLICY / "tokenizer.json"))
    assert shipped.to_str() == build_tokenizer().to_str()
    assert shipped.get_vocab_size() <= policy.config.vocab_size
    assert policy.config.eos_token_id == shipped.token_to_id("<|end|>")


def test_its_first_turn_looks_for_the_function(policy: LlamaForCausalLM) -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    task = make_task(0, "heldout", 0)
    chat = [{"role": each.role, "content": each.content} for each in Templates().opening(task.issue)]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    turn = policy.generate(ids, do_sample=False, max_new_tokens=40, attention_mask=torch.ones_like(ids))
    text = tokenizer.decode(turn[0, ids.shape[1] :])
    assert text == f"THOUGHT: find it.\n```bash\ngrep -rn 'def {task.function}(' .\n```<|end|>"
