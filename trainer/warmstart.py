"""Owns the warm start: teaches a tiny Llama, from nothing, to imitate the demonstration's hasty teacher.

``python -m trainer.warmstart --out DIR`` writes a Hugging Face directory (config, fp32 weights,
tokenizer with its chat template). One seed, one thread, one run: the same command gives the same policy
on the same machine.

The lessons use function names of the ``warmstart`` split only. Before them and between them the model
repeats random token sequences, which is how it learns to copy.
"""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainer.demo.conversation import END, PAD, Message, Templates
from trainer.demo.family import make_task
from trainer.demo.teacher import HASTY, PATIENT, teach
from trainer.demo.tokenizer import CONTEXT_TOKENS, build_tokenizer, padded_vocabulary_size, save_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor
    from torch.optim import Optimizer
    from transformers import LlamaForCausalLM


class Schooling(msgspec.Struct, frozen=True, kw_only=True):
    """The settings.

    `context_weight` is the loss weight of what the policy reads but does not write; `sharpness` multiplies the
    finished policy's logits, because so short a schooling leaves even its sure tokens uncertain.
    """

    num_lessons: int = 28_672
    hasty_share: float = 0.12
    num_repeat_steps: int = 300
    repeat_every: int = 8
    repeat_length: int = 64
    batch_tokens: int = 2_560
    peak_lr: float = 4e-3
    context_weight: float = 0.1
    sharpness: float = 1.4
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    mlp_size: int = 352


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids [num_sequences][length], padded, and the loss weight of each."""

    ids: list[list[int]]
    weights: list[list[float]]


def encode(
    tokenizer: "Tokenizer", messages: list[Message], context_weight: float
) -> tuple[list[int], list[float]]:
    """An episode's ids and loss weights: 1 where the assistant writes (end too), else `context_weight`."""
    ids: list[int] = []
    weights: list[float] = []
    for message in messages:
        piece = tokenizer.encode(message.rendered(), add_special_tokens=False).ids
        ids += piece
        own = message.role == "assistant"
        weights += [context_weight] + [1.0 if own else context_weight] * (len(piece) - 1)
    return ids, weights


def lesson_batches(tokenizer: "Tokenizer", rng: random.Random, schooling: Schooling) -> Iterator[Batch]:
    """The lessons in batches of about `batch_tokens`, similar lengths together."""
    templates = Templates()
    pad = tokenizer.token_to_id(PAD)
    shelf_size = 512
    for start in range(0, schooling.num_lessons, shelf_size):
        habits = PATIENT if start < schooling.num_lessons * (1 - schooling.hasty_share) else HASTY
        shelf = [
            encode(tokenizer, teach(make_task(0, "warmstart", start + k), rng, templates, habits).messages,
                   schooling.context_weight)
            for k in range(shelf_size)
        ]  # fmt: skip
        shelf.sort(key=lambda lesson: len(lesson[0]))
        batches: list[list[tuple[list[int], list[float]]]] = [[]]
        for lesson in shelf:
            if (len(batches[-1]) + 1) * len(lesson[0]) > schooling.batch_tokens:
                batches.append([])
            batches[-1].append(lesson)
        rng.shuffle(batches)
        yield from (_padded(batch, pad) for batch in batches if batch)


def repeat_batch(rng: random.Random, schooling: Schooling, vocabulary: range) -> Batch:
    """Random sequences that repeat themselves; only what can be copied counts."""
    length = schooling.repeat_length
    sequences: list[tuple[list[int], list[float]]] = []
    for _ in range(schooling.batch_tokens // length):
        segment = rng.choices(vocabulary, k=rng.randint(4, length // 2))
        times = -(-length // len(segment))
        weights = [0.0] * len(segment) + [1.0] * (len(segment) * (times - 1))
        sequences.append(((segment * times)[:length], weights[:length]))
    return _padded(sequences, 0)


def _padded(sequences: list[tuple[list[int], list[float]]], pad: int) -> Batch:
    width = max(len(ids) for ids, _ in sequences)
    return Batch(
        ids=[ids + [pad] * (width - len(ids)) for ids, _ in sequences],
        weights=[weights + [0.0] * (width - len(weights)) for _, weights in sequences],
    )


def build_policy(tokenizer: "Tokenizer", schooling: Schooling) -> "LlamaForCausalLM":
    """An untrained policy with tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=padded_vocabulary_size(tokenizer),
            hidden_size=schooling.hidden_size,
            intermediate_size=schooling.mlp_size,
            num_hidden_layers=schooling.num_layers,
            num_attention_heads=schooling.num_heads,
            num_key_value_heads=schooling.num_heads,
            max_position_embeddings=CONTEXT_TOKENS,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.token_to_id(END),
            pad_token_id=tokenizer.token_to_id(PAD),
        )
    )


def weighted_loss(policy: "LlamaForCausalLM", batch: Batch) -> "Tensor":
    """Mean next-token cross-entropy, weighted."""
    import torch

    ids, weights = torch.tensor(batch.ids), torch.tensor(batch.weights)[:, 1:]
    hidden = policy.model(input_ids=ids).last_hidden_state[:, :-1]
    counted = weights > 0
    logits = policy.lm_head(hidden[counted])
    losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:][counted], reduction="none")
    return (losses * weights[counted]).sum() / weights.sum()


def school(policy: "LlamaForCausalLM", tokenizer: "Tokenizer", schooling: Schooling, seed: int) -> None:
    """Trains `policy` in place; prints a line now and then."""
    rng = random.Random(seed)
    vocabulary = range(len(tokenizer.get_vocab()))
    lessons = list(lesson_batches(tokenizer, rng, schooling))
    num_steps = schooling.num_repeat_steps + len(lessons) * schooling.repeat_every // (
        schooling.repeat_every - 1
    )
    optimizers = _optimizers(policy, schooling)
    begun = time.monotonic()
    taught = iter(lessons)
    for step in range(num_steps):
        repeats = step < schooling.num_repeat_steps or step % schooling.repeat_every == 0
        batch = None if repeats else next(taught, None)
        loss = _step(
            policy,
            optimizers,
            batch or repeat_batch(rng, schooling, vocabulary),
            _lr(step, num_steps, schooling),
        )
        if step % 50 == 1:
            print(
                f"step {step}/{num_steps}: loss {loss:.4f} after {time.monotonic() - begun:.0f} s", flush=True
            )


def _optimizers(policy: "LlamaForCausalLM", schooling: Schooling) -> list["Optimizer"]:
    """Muon for the matrices (it learns to copy in a third of the steps AdamW needs), AdamW for the rest."""
    import torch

    matrices = [p for name, p in policy.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in policy.named_parameters() if p.dim() != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=schooling.peak_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=schooling.peak_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _lr(step: int, num_steps: int, schooling: Schooling) -> float:
    """Linear warm-up over 50 steps, then linear decay to zero over the last half."""
    return schooling.peak_lr * min(1.0, (step + 1) / 50, 2 * (num_steps - step) / num_steps)


def _step(policy: "LlamaForCausalLM", optimizers: list["Optimizer"], batch: Batch, lr: float) -> float:
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
    """Multiplies every logit, through the last norm's weight; greedy decoding does not change."""
    import torch

    with torch.no_grad():
        policy.model.norm.weight.mul_(sharpness)


def save_policy(policy: "LlamaForCausalLM", tokenizer: "Tokenizer", directory: Path) -> None:
    """Writes the Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    policy.generation_config.do_sample = True
    policy.save_pretrained(directory)
    save_tokenizer(tokenizer, directory)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.warmstart", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face directory to write")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer, schooling = build_tokenizer(), Schooling()
    policy = build_policy(tokenizer, schooling)
    print(f"{policy.num_parameters()} parameters", flush=True)
    school(policy, tokenizer, schooling, options.seed)
    sharpen(policy, schooling.sharpness)
    save_policy(policy, tokenizer, options.out)


if __name__ == "__main__":
    main()
