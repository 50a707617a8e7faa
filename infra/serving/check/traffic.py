"""Checks of many requests: which engine gets which, and whether each gets its own reply."""

import asyncio

from infra.serving.check.target import Nonconformity, Reply, Target

NUM_KEYS, REQUESTS_PER_KEY = 12, 4
NUM_PROMPTS = 50


class NotChecked(Exception):
    """There is nothing to check; the text says why."""


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
    """Many requests at once: each gets a reply, and it is its own."""
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
    """Why this is not the reply to its request; "" if it is."""
    if reply.meta_info.id != rid:
        return f"request {rid} got the reply to {reply.meta_info.id}"
    if reply.meta_info.prompt_tokens != expected.meta_info.prompt_tokens:
        return f"request {rid} got the reply to another prompt"
    if target.model.is_exact and reply.output_ids != expected.output_ids:
        return f"request {rid} got other tokens than when it was alone"
    return ""
