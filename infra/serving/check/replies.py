"""Checks of single replies: ids, log-probs, stop tokens."""

from collections.abc import Sequence
from typing import Protocol

from infra.serving.check.target import Nonconformity, Reply, Target

NUM_TOKENS = 24
MAX_GAP = {True: 2e-3, False: 0.6}
"""Largest difference of a log-prob in nats, by whether the engine computes in fp32."""
MEAN_GAP = {True: 2e-4, False: 0.08}


class Reference(Protocol):
    """A second implementation of the model."""

    def logprobs(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> list[float]:
        """Of each sampled token, in nats, under the distribution at this temperature."""
        ...


async def token_ids(target: Target) -> str:
    """Ids in, ids out: the prompt reaches the model as it was sent, and every sampled id has its log-prob."""
    num_replies = 0
    for url in _all_urls(target):
        for num_prompt, num_new in ((1, 1), (17, NUM_TOKENS), (200, 3)):
            prompt = target.prompt(min(num_prompt, target.model.context_tokens // 2))
            reply = await target.sample(url, prompt, num_new, temperature=1.0, input_logprobs=True)
            _check_ids(url, prompt, reply, num_new, target.model.vocab_size)
            num_replies += 1
    return f"{num_replies} replies"


def _check_ids(url: str, prompt: Sequence[int], reply: Reply, num_new: int, vocab_size: int) -> None:
    meta = reply.meta_info
    if meta.prompt_tokens != len(prompt):
        raise Nonconformity(f"{url}: {len(prompt)} ids were sent and {meta.prompt_tokens} fed to the model")
    fed = [token for _, token, _ in meta.input_token_logprobs]
    if fed != list(prompt):
        raise Nonconformity(f"{url}: the model was fed other ids than were sent")
    if len(reply.output_ids) != num_new:
        raise Nonconformity(f"{url}: {num_new} tokens were asked for, and {len(reply.output_ids)} came")
    if [token for _, token, _ in meta.output_token_logprobs] != reply.output_ids:
        raise Nonconformity(f"{url}: the log-probs are not those of output_ids")
    if not all(0 <= token < vocab_size for token in reply.output_ids):
        raise Nonconformity(f"{url}: an id outside the vocabulary of {vocab_size}")
    if not all(logprob <= 1e-3 for logprob in reply.logprobs):
        raise Nonconformity(f"{url}: a log-prob above 0, or one that is no number")


async def prefill_logprobs(target: Target) -> str:
    """A token has the same log-prob when it is sampled and when it is part of a prompt."""
    widest = 0.0
    for url in target.engine_urls:
        prompt = target.prompt(32)
        sampled = await target.sample(url, prompt, NUM_TOKENS, temperature=1.0)
        whole = await target.sample(
            url, [*prompt, *sampled.output_ids], 1, temperature=1.0, input_logprobs=True
        )
        again = [logprob or 0.0 for logprob in whole.input_logprobs[len(prompt) :]]
        widest = max(widest, _gap(url, sampled.logprobs, again, "of the same tokens as a prompt", target))
    return f"largest difference {widest:.1e} nats"


async def reference_logprobs(target: Target, reference: Reference) -> str:
    """Log-probs are those of the model, at the temperature of sampling."""
    widest = 0.0
    for url in target.engine_urls:
        for temperature in (1.0, 0.7):
            prompt = target.prompt(32)
            reply = await target.sample(url, prompt, NUM_TOKENS, temperature=temperature)
            expected = reference.logprobs(prompt, reply.output_ids, temperature)
            whose = f"of the reference at temperature {temperature}"
            widest = max(widest, _gap(url, reply.logprobs, expected, whose, target))
    return f"largest difference {widest:.1e} nats"


def _gap(url: str, seen: Sequence[float], expected: Sequence[float], whose: str, target: Target) -> float:
    """The largest difference. Raises Nonconformity if it, or the mean, is too large."""
    exact = target.model.is_exact
    gaps = [abs(one - other) for one, other in zip(seen, expected, strict=True)]
    widest, mean = max(gaps), sum(gaps) / len(gaps)
    if not widest <= MAX_GAP[exact] or not mean <= MEAN_GAP[exact]:
        raise Nonconformity(
            f"{url}: log-probs differ from those {whose} by {widest:.2g} nats at most and {mean:.2g} on average; allowed "
            f"are {MAX_GAP[exact]:g} and {MEAN_GAP[exact]:g} in {target.model.dtype}"
        )
    return widest


async def stop_tokens(target: Target) -> str:
    """A reply ends with the stop token that it sampled, which has its log-prob."""
    for url in _all_urls(target):
        prompt = target.prompt(20)
        free = await target.sample(url, prompt, NUM_TOKENS)
        stop = free.output_ids[NUM_TOKENS // 2]
        expected = free.output_ids[: free.output_ids.index(stop) + 1]
        reply = await target.sample(url, prompt, NUM_TOKENS, stop_token_ids=[stop], ignore_eos=False)
        finish = reply.meta_info.finish_reason
        if reply.output_ids == expected[:-1]:
            raise Nonconformity(f"{url}: the stop token {stop} was sampled and is not in the reply")
        ended_by_eos = reply.output_ids[-1] in target.model.special_ids
        if reply.output_ids != expected and not ended_by_eos and target.model.is_exact:
            raise Nonconformity(f"{url}: the reply goes on after the stop token {stop}, or is another reply")
        if finish.type != "stop":
            raise Nonconformity(
                f"{url}: a reply that ended with a stop token has finish_reason {finish.type!r}"
            )
        if len(reply.logprobs) != len(reply.output_ids):
            raise Nonconformity(f"{url}: {len(reply.output_ids)} tokens and {len(reply.logprobs)} log-probs")
    return "in the reply, with its log-prob"


def _all_urls(target: Target) -> list[str]:
    """The engines, and the router, which must change nothing."""
    return [*target.engine_urls, *([target.router_url] if target.router_url else [])]
