"""Checks of replies that something interrupts: new weights, a pause, an abort, a client that hangs up."""

import asyncio
import uuid

from infra.serving.check.target import Long, Nonconformity, Reply, Target, long_reply, under_way

WAIT_S = 120.0
"""How long an interrupted reply may take to arrive."""

LONG_S = (8.0, 24.0)
"""How long a reply takes whose client hangs up, the second time where the engine did not notice the first."""

NUM_LOOKS, LOOK_S = 5, 0.1
"""An engine may count a request that has just ended in one more step."""


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
    """A paused engine samples nothing and is healthy; after it, replies go on, or end where they were aborted."""
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
        late = asyncio.create_task(target.sample(url, long.prompt, 1))
        await asyncio.wait({late, task}, timeout=1.5 * long.took_s, return_when=asyncio.FIRST_COMPLETED)
        sampled = task.done() or late.done()
        if sampled:
            raise Nonconformity(f"{url}: a paused engine ({mode}) goes on sampling")
    finally:
        await target.resume(url)
    await _arrived(late, url, f"that was sent during a pause ({mode})")


async def abort(target: Target) -> str:
    """An aborted request ends at once with what was sampled of it; others go on."""
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
    """An engine stops working for a client that hung up; through the router as well."""
    for url in target.engine_urls:
        await _check_cancelled(target, url, engine_url=url)
    if target.router_url and len(target.engine_urls) == 1:
        await _check_cancelled(target, target.router_url, engine_url=target.engine_urls[0])
    return "leave the engine"


async def _check_cancelled(target: Target, url: str, *, engine_url: str) -> None:
    """SGLang looks every four seconds whether a client is still there, so the reply must take longer than that.

    A machine may become faster between measuring how long a reply takes and asking for it, so a failure is tried again
    with a longer one.
    """
    for at_least_s in LONG_S:
        long = await long_reply(target, engine_url, at_least_s=at_least_s)
        if await _leaves_engine(target, url, long, engine_url=engine_url):
            return
    raise Nonconformity(f"{url}: the engine goes on with a request whose client hung up")


async def _leaves_engine(target: Target, url: str, long: Long, *, engine_url: str) -> bool:
    """Whether a request whose client hangs up has left the engine before one that is a fifth shorter is complete.

    The shorter one is sampled beside it, so a busy machine slows both down; a clock would take a slow engine for a broken one.
    """
    shorter = asyncio.create_task(target.sample(engine_url, long.prompt, int(0.8 * long.num_tokens)))
    task = asyncio.create_task(target.sample(url, long.prompt, long.num_tokens))
    try:
        await target.until_running(engine_url, task, num_requests=2)
        if not task.cancel():  # the reply was complete, so nobody hung up
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
