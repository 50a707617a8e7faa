"""A Llama of under a million parameters with a tokenizer, made in a second: a real checkpoint for a real
engine.
"""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
CONTEXT_TOKENS = 8192
HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS = 64, 192, 2, 4, 2
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(directory: Path, seed: int = 0) -> Path:
    """Write config, random fp32 weights and tokenizer as Hugging Face lays them out. Equal seeds give equal
    bytes.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps(config(), indent=1))
    save_file(random_weights(seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT_TOKENS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def random_weights(seed: int) -> dict[str, NDArray[np.float32]]:
    """Named and shaped as in ``LlamaForCausalLM``; the input embedding is the output layer too."""
    random = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED_FORWARD),
    }
    ones = np.ones(HIDDEN, dtype=np.float32)
    weights = {
        "model.embed_tokens.weight": normal(random, (VOCAB_SIZE, HIDDEN)),
        "model.norm.weight": ones.copy(),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": normal(random, shape) for name, shape in shapes.items()}
        weights[f"{prefix}.input_layernorm.weight"] = ones.copy()
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones.copy()
    return weights


def normal(random: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    return (random.standard_normal(shape) * 0.05).astype(np.float32)


def write_tokenizer(directory: Path) -> None:
    """Byte-level BPE over Python source, with the three special tokens of ChatML as ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (PAD, START, END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([json.__file__], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the engine embeds VOCAB_SIZE ids"
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
