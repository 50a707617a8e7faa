"""A tiny Llama from random weights, trained to imitate the demonstration's teacher, and its tokenizer.

It runs on one thread from one seed, so the same command gives the same policy on the same machine.

The tokenizer has whole words, one- and two-digit numbers and set phrases as single tokens, bytes for the rest. The vocabulary is listed
here, not learned. The model is byte-level: it takes a piece whole if the vocabulary has it, and its bytes otherwise, so any text can be
encoded, and decoding returns it exactly.

The lessons use function names of the ``warmstart`` split only. Before them and between them the model repeats random token sequences, from
which it learns to copy.
"""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from trainer.demo import family, lessons
from trainer.demo.family import OPERATORS, make_task
from trainer.demo.lessons import CHAT_TEMPLATE, END, PAD, ROLE_TOKENS, EpisodeMessage, Templates, teach

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.optim import Optimizer
    from transformers import LlamaForCausalLM

CONTEXT_TOKENS = 2048
VOCABULARY_MULTIPLE = 64
SPECIALS = (PAD, END, *ROLE_TOKENS)
_PIECES = r"[A-Za-z]+|\d{1,2}|\n| +|[^A-Za-z\d\s]|\s"
_CODE_WORDS = (
    "for", "in", "if", "range", "min", "max", "math", "os", "sys", "True", "False", "None", "Traceback",
    "NameError", "IndentationError", "SyntaxError", "TypeError", "IndexError", "ValueError",
    "AttributeError", "ModuleNotFoundError", "line", "name", "is", "not", "defined", "expected", "an",
    "indented", "block", "after", "function", "definition", "statement", "on", "larger", "smaller",
    "first", "last",
)  # fmt: skip
PHRASES = (
    "You mend small Python repositories.\n"
    "Every turn: one THOUGHT line, then one bash block.\nTo finish, run: ",
    "FORMAT ERROR. Every turn: one THOUGHT line, then one bash block.", "ISSUE: ", " is wrong: ",
    " should be ", ", not ", ". ", "it should ", "it should subtract the other way round",
    "it should take the ", " one", "it uses ", " where ", " is right", "it should start counting at 0",
    "it leaves out the last step", "it should look at the ", " item", "the limit itself should pass",
    "it makes no use of ", "THOUGHT: ", "\n```bash\n", "\n```", lessons.SUBMIT,
    "<returncode>0</returncode>\n<output>\n", "<returncode>1</returncode>\n<output>\n",
    "<returncode>2</returncode>\n<output>\n", "</output>", "find it.", "read it.",
    "change line ", "test it.", "not right, start over.", "done.",
    "grep -rn 'def ", "(' .", "cat -n ", "git checkout -q . && ", "sed -i '", "s|.*|", "|' ",
    'python3 -c "from ', " import ", "; print(", ')" 2>&1 | tail -n 1', "    return ", "        return ",
    "    for ", "    if ", " in range(", "        ", "    ", "     ", " in ", " = ", " += ", " + ", " - ",
    " * ", " == ", " < ", " <= ", " > ", " >= ", ", ", "):", ".py", "./", "def ", "# small sums", "# kept simple",
    "import ",
)  # fmt: skip


def build_tokenizer() -> Tokenizer:
    """The tokenizer; its ids are the same on every machine."""
    pieces = list(SPECIALS) + sorted(pre_tokenizers.ByteLevel.alphabet())
    listed = [
        *family.VERBS,
        *family.NOUNS,
        *family.LOCALS,
        *family.DIRECTORIES,
    ]
    listed += [*OPERATORS.values(), *_CODE_WORDS, *map(str, range(10, 100))]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces + listed))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(special, special=True, normalized=False) for special in SPECIALS]
    )
    tokenizer.add_tokens(
        [AddedToken(phrase, normalized=False) for phrase in PHRASES if phrase not in vocabulary]
    )
    return tokenizer


def padded_vocabulary_size(tokenizer: Tokenizer) -> int:
    """The number of rows of the embedding: the vocabulary's size, rounded up."""
    return -(-tokenizer.get_vocab_size() // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as the Hugging Face loaders expect them."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


class WarmStart(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the warm start.

    `context_weight` is the loss weight of the tokens that the policy reads but does not write. `sharpness` multiplies the
    finished policy's logits, because after so short a training even its most probable tokens are too improbable.
    """

    num_lessons: int = 40_960
    num_repeat_steps: int = 300
    repeat_every: int = 8
    repeat_length: int = 64
    batch_tokens: int = 2_560
    peak_lr: float = 4e-3
    context_weight: float = 0.1
    sharpness: float = 1.8
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    mlp_size: int = 352


class LessonBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids [num_sequences][length], padded, and the loss weight of each."""

    ids: list[list[int]]
    weights: list[list[float]]


def encode(
    tokenizer: "Tokenizer", messages: list[EpisodeMessage], context_weight: float
) -> tuple[list[int], list[float]]:
    """An episode's ids and loss weights: 1 for the assistant's text, including its end token, otherwise `context_weight`."""
    ids: list[int] = []
    weights: list[float] = []
    for message in messages:
        piece = tokenizer.encode(message.rendered(), add_special_tokens=False).ids
        ids += piece
        own = message.role == "assistant"
        weights += [context_weight] + [1.0 if own else context_weight] * (len(piece) - 1)
    return ids, weights


def lesson_batches(tokenizer: "Tokenizer", rng: random.Random, settings: WarmStart) -> Iterator[LessonBatch]:
    """The lessons in batches of about `batch_tokens`, similar lengths together."""
    templates = Templates()
    pad = tokenizer.token_to_id(PAD)
    sorted_at_once = 512
    for start in range(0, settings.num_lessons, sorted_at_once):
        encoded = [
            encode(tokenizer, teach(make_task(0, "warmstart", start + k), rng, templates).messages,
                   settings.context_weight)
            for k in range(sorted_at_once)
        ]  # fmt: skip
        encoded.sort(key=lambda lesson: len(lesson[0]))
        batches: list[list[tuple[list[int], list[float]]]] = [[]]
        for lesson in encoded:
            if (len(batches[-1]) + 1) * len(lesson[0]) > settings.batch_tokens:
                batches.append([])
            batches[-1].append(lesson)
        rng.shuffle(batches)
        yield from (_padded(batch, pad) for batch in batches if batch)


def repeat_batch(rng: random.Random, settings: WarmStart, vocabulary: range) -> LessonBatch:
    """Random sequences that repeat themselves. Only tokens that can be copied have weight in the loss."""
    length = settings.repeat_length
    sequences: list[tuple[list[int], list[float]]] = []
    for _ in range(settings.batch_tokens // length):
        segment = rng.choices(vocabulary, k=rng.randint(4, length // 2))
        times = -(-length // len(segment))
        weights = [0.0] * len(segment) + [1.0] * (len(segment) * (times - 1))
        sequences.append(((segment * times)[:length], weights[:length]))
    return _padded(sequences, 0)


def _padded(sequences: list[tuple[list[int], list[float]]], pad: int) -> LessonBatch:
    width = max(len(ids) for ids, _ in sequences)
    return LessonBatch(
        ids=[ids + [pad] * (width - len(ids)) for ids, _ in sequences],
        weights=[weights + [0.0] * (width - len(weights)) for _, weights in sequences],
    )


def build_policy(tokenizer: "Tokenizer", settings: WarmStart) -> "LlamaForCausalLM":
    """An untrained policy with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=padded_vocabulary_size(tokenizer),
            hidden_size=settings.hidden_size,
            intermediate_size=settings.mlp_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_heads,
            num_key_value_heads=settings.num_heads,
            max_position_embeddings=CONTEXT_TOKENS,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id(END),
            pad_token_id=tokenizer.token_to_id(PAD),
        )
    )


def weighted_loss(policy: "LlamaForCausalLM", batch: LessonBatch) -> "Tensor":
    """Mean next-token cross-entropy, weighted."""
    import torch

    ids, weights = torch.tensor(batch.ids), torch.tensor(batch.weights)[:, 1:]
    hidden = policy.model(input_ids=ids).last_hidden_state[:, :-1]
    counted = weights > 0
    logits = policy.lm_head(hidden[counted])
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


def train_policy(policy: "LlamaForCausalLM", tokenizer: "Tokenizer", settings: WarmStart, seed: int) -> None:
    """Train `policy` in place, and print a line every 50 steps."""
    rng = random.Random(seed)
    vocabulary = range(len(tokenizer.get_vocab()))
    lessons = list(lesson_batches(tokenizer, rng, settings))
    num_steps = settings.num_repeat_steps + len(lessons) * settings.repeat_every // (
        settings.repeat_every - 1
    )
    optimizers = _optimizers(policy, settings)
    began = time.monotonic()
    remaining = iter(lessons)
    for step in range(num_steps):
        repeats = step < settings.num_repeat_steps or step % settings.repeat_every == 0
        batch = None if repeats else next(remaining, None)
        loss = _step(
            policy,
            optimizers,
            batch or repeat_batch(rng, settings, vocabulary),
            _lr(step, num_steps, settings),
        )
        if step % 50 == 1:
            print(
                f"step {step}/{num_steps}: loss {loss:.4f} after {time.monotonic() - began:.0f} s", flush=True
            )


def _optimizers(policy: "LlamaForCausalLM", settings: WarmStart) -> list["Optimizer"]:
    """Muon for the matrices, which learns to copy in a third of the steps that AdamW needs; AdamW for the rest."""
    import torch

    matrices = [p for name, p in policy.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in policy.named_parameters() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=settings.peak_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=settings.peak_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _lr(step: int, num_steps: int, settings: WarmStart) -> float:
    """Linear warm-up over 50 steps, then linear decay to zero over the last half."""
    return settings.peak_lr * min(1.0, (step + 1) / 50, 2 * (num_steps - step) / num_steps)


def _step(policy: "LlamaForCausalLM", optimizers: list["Optimizer"], batch: LessonBatch, lr: float) -> float:
    import torch

    policy.zero_grad()
    loss = weighted_loss(policy, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    return float(loss.detach())


def sharpen(policy: "LlamaForCausalLM", sharpness: float) -> None:
    """Multiplies every logit, through the last norm's weight. Greedy decoding does not change."""
    import torch

    with torch.no_grad():
        policy.model.norm.weight.mul_(sharpness)


def save_policy(policy: "LlamaForCausalLM", tokenizer: "Tokenizer", directory: Path) -> None:
    """Write the Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    policy.generation_config.do_sample = True
    policy.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)


def make_policy(directory: Path, *, seed: int, settings: WarmStart | None = None) -> None:
    """Train a policy and write its Hugging Face directory: config, fp32 weights, tokenizer with its chat template."""
    import torch

    settings = settings or WarmStart()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    policy = build_policy(tokenizer, settings)
    print(f"{policy.num_parameters()} parameters", flush=True)
    train_policy(policy, tokenizer, settings, seed)
    sharpen(policy, settings.sharpness)
    save_policy(policy, tokenizer, directory)
