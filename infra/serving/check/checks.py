"""The checks. Single replies: ids, log-probs, stop tokens. Replies that something interrupts: new weights, a pause, an abort, a client
that hangs up. Many requests: which engine gets which, and whether each gets its own reply.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from infra.serving.check.target import Long, Nonconformity, Reply, Target, long_reply, under_way

NUM_TOKENS = 24
MAX_GAP = {True: 2e-3, False: 0.6}
"""Largest allowed difference of a log-prob in nats, by whether the engine computes in fp32."""
MEAN_GAP = {True: 2e-4, False: 0.08}


class Reference(Protocol):
    """A second implementation of the model."""

    def logprobs(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> list[float]:
        """The log-prob of each sampled token, in nats, under the distribution at this temperature."""
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
        raise Nonconformity(f"{url}: a log-prob above 0, or one that is not a number")


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
    """Returns the largest difference of two lists of log-probs, in nats. Raises Nonconformity if it, or the mean, is too large."""
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
            raise Nonconformity(f"{url}: the reply continues after the stop token {stop}, or is another reply")
        if finish.type != "stop":
            raise Nonconformity(
                f"{url}: a reply that ended with a stop token has finish_reason {finish.type!r}"
            )
        if len(reply.logprobs) != len(reply.output_ids):
            raise Nonconformity(f"{url}: {len(reply.output_ids)} tokens and {len(reply.logprobs)} log-probs")
    return "in the reply, with its log-prob"


def _all_urls(target: Target) -> list[str]:
    """The URLs of the engines and of the router, which must change nothing."""
    return [*target.engine_urls, *([target.router_url] if target.router_url else [])]


WAIT_S = 120.0
"""The longest time that an interrupted reply may take to arrive."""

LONG_S = (8.0, 24.0)
"""Durations of a reply whose client hangs up. The second is used if the engine did not notice the first hang-up."""

NUM_LOOKS, LOOK_S = 5, 0.1
"""An engine may count a request that has just ended for one more step."""


async def weight_versions(target: Target) -> str:
    """Each token is reported with the weights that drew it, also across an update in the middle of a reply."""
    for url in target.engine_urls:
        before = await target.served(url)
        long = await long_reply(target, url)
        name = f"conformance-{uuid.uuid4().hex[:8]}"
        try:
            async with under_way(target, url, long) as task:
                await _update_while_paused(target, url, before.model_path, name)
                reply = await _arrived(task, url, "across an update of the weights")
            _check_spans(url, reply, long, before.weight_version, name)
            now = (await target.served(url)).weight_version
            if now != name:
                raise Nonconformity(f"{url}: /model_info reports weights {now!r} after an update to {name!r}")
        finally:
            await target.load_weights(url, before.model_path, before.weight_version)
    return "old ones up to the update, new ones after it"


async def _update_while_paused(target: Target, url: str, directory: str, name: str) -> None:
    await target.pause(url, "retract")
    try:
        await target.load_weights(url, directory, name)
    finally:
        await target.resume(url)


def _check_spans(url: str, reply: Reply, long: Long, old: str, new: str) -> None:
    spans = reply.meta_info.weight_versions
    if not spans:
        raise Nonconformity(
            f"{url}: a reply has no weight_versions, so nobody knows which weights drew which token"
        )
    spans = [span for span in spans if span.end > span.start]
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != len(reply.output_ids):
        raise Nonconformity(f"{url}: weight_versions {spans} do not cover {len(reply.output_ids)} tokens")
    if len(reply.output_ids) != long.num_tokens:
        raise Nonconformity(f"{url}: {len(reply.output_ids)} of {long.num_tokens} tokens after an update")
    if [span.version for span in spans] != [old, new]:
        names = " and ".join(repr(span.version) for span in spans)
        raise Nonconformity(
            f"{url}: tokens before and after an update are reported of {names}, not {old!r} and {new!r}"
        )


async def pause_modes(target: Target) -> str:
    """A paused engine samples nothing and is healthy; after the pause, replies continue, or end where they were aborted."""
    for url in target.engine_urls:
        long = await long_reply(target, url)
        for mode in ("retract", "in_place"):
            async with under_way(target, url, long) as task:
                await _paused(target, url, mode, long, task)
                reply = await _arrived(task, url, f"after a pause ({mode})")
            if len(reply.output_ids) != long.num_tokens:
                raise Nonconformity(
                    f"{url}: {len(reply.output_ids)} of {long.num_tokens} tokens after a pause ({mode})"
                )
            if target.model.is_exact and reply.output_ids != long.undisturbed.output_ids:
                raise Nonconformity(f"{url}: a pause ({mode}) changed what is sampled greedily")
        async with under_way(target, url, long) as task:
            await target.pause(url, "abort")
            await target.resume(url)
            _check_aborted(url, await _arrived(task, url, "after a pause (abort)"), long, "a pause (abort)")
        await target.sample(url, long.prompt, 1)
    return "retract, in_place, abort"


async def _paused(target: Target, url: str, mode: str, long: Long, task: asyncio.Task[Reply]) -> None:
    await target.pause(url, mode)
    try:
        if task.done():
            raise Nonconformity(f"{url}: a reply ended before the pause ({mode}); use a larger context")
        if not await target.is_healthy(url):
            raise Nonconformity(f"{url}: /health fails while paused, so a router would drop the engine")
        late = asyncio.create_task(target.sample(url, long.prompt, 1), name="request to a paused engine")
        await asyncio.wait({late, task}, timeout=1.5 * long.took_s, return_when=asyncio.FIRST_COMPLETED)
        sampled = task.done() or late.done()
        if sampled:
            raise Nonconformity(f"{url}: a paused engine ({mode}) goes on sampling")
    finally:
        await target.resume(url)
    await _arrived(late, url, f"that was sent during a pause ({mode})")


async def abort(target: Target) -> str:
    """An aborted request ends at once with the tokens sampled so far; other requests continue."""
    for url in target.engine_urls:
        long, rid = await long_reply(target, url), uuid.uuid4().hex
        async with under_way(target, url, long) as other, under_way(target, url, long, rid=rid) as task:
            await target.abort(url, rid)
            _check_aborted(url, await _arrived(task, url, "that was aborted"), long, "/abort_request")
            reply = await _arrived(other, url, "beside one that was aborted")
        if len(reply.output_ids) != long.num_tokens or reply.meta_info.finish_reason.type != "length":
            raise Nonconformity(f"{url}: /abort_request of one request ended another")
    return "ends its request and no other"


def _check_aborted(url: str, reply: Reply, long: Long, what: str) -> None:
    finish = reply.meta_info.finish_reason
    if finish.type != "abort":
        raise Nonconformity(
            f"{url}: after {what} the reply has finish_reason {finish.type!r} and {len(reply.output_ids)} of "
            f"{long.num_tokens} tokens"
        )
    if len(reply.output_ids) >= long.num_tokens:
        raise Nonconformity(f"{url}: {what} did not end the reply")
    if len(reply.logprobs) != len(reply.output_ids):
        raise Nonconformity(
            f"{url}: {len(reply.output_ids)} tokens and {len(reply.logprobs)} log-probs after {what}"
        )


async def cancelled_requests(target: Target) -> str:
    """An engine stops working for a client that hung up, also through the router."""
    for url in target.engine_urls:
        await _check_cancelled(target, url, engine_url=url)
    if target.router_url and len(target.engine_urls) == 1:
        await _check_cancelled(target, target.router_url, engine_url=target.engine_urls[0])
    return "leave the engine"


async def _check_cancelled(target: Target, url: str, *, engine_url: str) -> None:
    """Checks that an abandoned request leaves the engine. SGLang checks every four seconds whether a client is still connected, so the
    reply must take longer.

    A machine may become faster between measuring how long a reply takes and asking for it, so a failure is tried again
    with a longer one.
    """
    for at_least_s in LONG_S:
        long = await long_reply(target, engine_url, at_least_s=at_least_s)
        if await _leaves_engine(target, url, long, engine_url=engine_url):
            return
    raise Nonconformity(f"{url}: the engine goes on with a request whose client hung up")


async def _leaves_engine(target: Target, url: str, long: Long, *, engine_url: str) -> bool:
    """Whether a request whose client hangs up has left the engine before a request that is a fifth shorter is complete.
    The shorter request is sampled at the same time, so a busy machine slows both down; a time limit would report a slow engine as broken.
    """
    shorter = asyncio.create_task(
        target.sample(engine_url, long.prompt, int(0.8 * long.num_tokens)), name="shorter reply"
    )
    task = asyncio.create_task(target.sample(url, long.prompt, long.num_tokens), name="long reply")
    try:
        await target.until_running(engine_url, task, num_requests=2)
        if not task.cancel():  # the reply was complete, so no client hung up
            return False
        await _arrived(shorter, engine_url, "beside one whose client hung up")
        for _ in range(NUM_LOOKS):
            if not await target.num_requests(engine_url):
                return True
            await asyncio.sleep(LOOK_S)
        return False
    finally:
        shorter.cancel()
        task.cancel()
        await asyncio.gather(shorter, task, return_exceptions=True)


async def _arrived(task: asyncio.Task[Reply], url: str, which: str) -> Reply:
    try:
        return await asyncio.wait_for(task, WAIT_S)
    except TimeoutError as error:
        raise Nonconformity(f"{url}: no reply within {WAIT_S:.0f} s of a request {which}") from error


NUM_KEYS, REQUESTS_PER_KEY = 12, 4
NUM_PROMPTS = 50


class NotChecked(Exception):
    """There is nothing to check; the message names the reason."""


async def affinity(target: Target) -> str:
    """Requests of one episode go to one engine, and episodes to all engines."""
    if not target.router_url:
        raise NotChecked("there is no router")
    if len(target.engine_urls) < 2:
        raise NotChecked("the router has one engine")
    engines: dict[str, set[str]] = {}
    for key in (f"conformance-{number}" for number in range(NUM_KEYS)):
        for _ in range(REQUESTS_PER_KEY):
            reply = await target.sample(target.router_url, target.prompt(8), 1, routing_key=key)
            engines.setdefault(key, set()).add(reply.engine)
    wandering = [key for key, seen in engines.items() if len(seen) > 1]
    if wandering:
        raise Nonconformity(
            f"{target.router_url}: requests with one routing key went to several engines, for {len(wandering)} of {NUM_KEYS} keys"
        )
    used = {next(iter(seen)) for seen in engines.values()}
    if len(used) < 2:
        raise Nonconformity(
            f"{target.router_url}: {NUM_KEYS} routing keys all went to one of {len(target.engine_urls)} engines"
        )
    return f"{NUM_KEYS} keys over {len(used)} engines"


async def burst(target: Target) -> str:
    """Each of many simultaneous requests gets a reply, and the reply is its own."""
    prompts = [target.prompt(4 + number) for number in range(NUM_PROMPTS)]
    expected = [await target.sample(target.engine_urls[0], prompt, 4) for prompt in prompts]

    async def one(number: int) -> str:
        which, rid = number % NUM_PROMPTS, f"conformance-{target.seed}-{number}"
        try:
            reply = await target.sample(target.front_url, prompts[which], 4, rid=rid)
        except (Nonconformity, OSError) as error:
            return str(error) or type(error).__name__
        return _foreign(reply, rid, expected[which], target)

    faults = [fault for fault in await asyncio.gather(*map(one, range(target.num_burst_requests))) if fault]
    if faults:
        raise Nonconformity(
            f"{target.front_url}: {len(faults)} of {target.num_burst_requests} requests at once failed; the first: {faults[0]}"
        )
    return f"{target.num_burst_requests} requests"


def _foreign(reply: Reply, rid: str, expected: Reply, target: Target) -> str:
    """The reason why this is not the reply to its request; "" if it is."""
    if reply.meta_info.id != rid:
        return f"request {rid} got the reply to {reply.meta_info.id}"
    if reply.meta_info.prompt_tokens != expected.meta_info.prompt_tokens:
        return f"request {rid} got the reply to another prompt"
    if target.model.is_exact and reply.output_ids != expected.output_ids:
        return f"request {rid} got other tokens than when it was alone"
    return ""


CHECKS: dict[str, Callable[[Target], Awaitable[str]]] = {
    "token_ids": token_ids,
    "prefill_logprobs": prefill_logprobs,
    "stop_tokens": stop_tokens,
    "weight_versions": weight_versions,
    "pause_modes": pause_modes,
    "abort": abort,
    "cancelled_requests": cancelled_requests,
    "affinity": affinity,
    "burst": burst,
}
"""Every check that needs no other implementation of the model, by its name in `--only`."""
