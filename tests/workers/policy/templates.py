"""Published chat templates, as they come with models (files of llama.cpp, MIT), behind one tokenizer that knows their control tokens."""

import functools
import random
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.chat import recognised
from pipeline.tokenizer import TokenizerBundle
from workers.policy.render import Renderer

DIRECTORY = Path(__file__).parents[2] / "chat_templates"
ENDS = {
    "ByteDance-Seed-OSS": "<seed:eos>",
    "LFM2-8B-A1B": "<|im_end|>",
    "Qwen-Qwen2.5-7B-Instruct": "<|im_end|>",
    "Qwen-Qwen3-0.6B": "<|im_end|>",
    "Qwen3-Coder": "<|im_end|>",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "<\uff5cend▁of▁sentence\uff5c>",
    "ibm-granite-granite-3.3-2B-Instruct": "<|end_of_text|>",
    "meta-llama-Llama-3.1-8B-Instruct": "<|eot_id|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>",
    "moonshotai-Kimi-K2": "<|im_end|>",
}
"""Each template's name, and the token that ends a reply under it."""

_CONTROL = re.compile(r"<[|\uff5c][^<>\s]+[|\uff5c]>|<seed:[a-z]+>")
_BOS = "<s>"
_TAGS = ("<think>", "</think>")  # one token each, but no control tokens


@functools.cache
def renderer(name: str) -> Renderer:
    return Renderer(bundle(name))


@functools.cache
def bundle(name: str) -> TokenizerBundle:
    tokenizer = _tokenizer()
    template = (DIRECTORY / f"{name}.jinja").read_text()
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=template,
        reply_format=recognised(template),
        eos_token=ENDS[name],
        bos_token=_BOS,
        stop_token_ids=(tokenizer.token_to_id(ENDS[name]),),
        vocab_size=tokenizer.get_vocab_size(),
    )


@functools.cache
def _tokenizer() -> Tokenizer:
    """Byte-level BPE over random words, so that words and tags are pieces of several letters."""
    texts = "".join((DIRECTORY / f"{name}.jinja").read_text() for name in ENDS)
    controls = sorted({_BOS, *ENDS.values(), *_CONTROL.findall(texts)})
    letters = random.Random(7)
    words = ["".join(letters.choices("abcdeimnrst", k=letters.randint(1, 9))) for _ in range(3000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in controls],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(words), "user assistant system omitted context " * 50], trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _TAGS])
    return tokenizer
