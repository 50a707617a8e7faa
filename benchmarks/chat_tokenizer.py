"""A byte-level tokenizer with ChatML's tokens and template, made in memory, for the scripted policy."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.tokenizer import TokenizerBundle

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def bundle() -> TokenizerBundle:
    """One token a byte: no merges, so nothing to train."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([PAD, START, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (PAD, START, END)]
    )
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=CHAT_TEMPLATE,
        eos_token=END,
        bos_token="",
        stop_token_ids=(vocabulary[END],),
        vocab_size=tokenizer.get_vocab_size(),
    )
