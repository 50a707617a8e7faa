"""One rollout from Redis or its store, with its judgement, its life and its group."""

import asyncio
import contextlib

from redis.asyncio import Redis

from infra.web.conversation import conversation
from infra.web.fleet import RedisReader
from infra.web.journal_files import JsonRow
from infra.web.rollout_row import RolloutRow
from infra.web.runs import OpenRun
from infra.web.token_text import TokenTexts, token_texts
from pipeline.cli import explain, finding, lookup, stored
from pipeline.cli.explain import Life
from pipeline.cli.finding import FoundRollout
from pipeline.connection import RedisUnavailable
from pipeline.judge import Judgement
from pipeline.message import MalformedMessage
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.rollout_store.trained import TrainedTokens
from pipeline.tokenizer import TokenizerBundle, get_tokenizer

MAX_TOKENIZERS = 4  # whose texts are kept
WEIGHTS, TOKENIZER = "weights", "tokenizer.json"


class RolloutPages:
    """Everything that is known of one rollout. Redis has more of it than the store, and forgets it sooner."""

    def __init__(self, redis: RedisReader) -> None:
        self._redis = redis
        self._texts: dict[str, TokenTexts | None] = {}

    async def page(self, run: OpenRun, request_id: str) -> JsonRow:
        """Raises LookupError if neither Redis nor the run's directory knows the rollout."""
        row, group = await asyncio.to_thread(_row_and_group, run, request_id)
        try:
            found = await self._redis.read(lambda redis: lookup.rollout(redis, request_id, [run.directory]))
            life = await self._redis.read(lambda redis: _life(redis, request_id, run))
            judgement = await self._redis.read(lambda redis: _judgement(redis, request_id))
        except (RedisUnavailable, MalformedMessage):
            found, life, judgement = await asyncio.to_thread(_stored, run, request_id)
        except LookupError:
            if row is None:
                raise
            found, life, judgement = await asyncio.to_thread(_stored, run, request_id)
        if judgement is None:
            kept = await asyncio.to_thread(stored.find_stored, [run.directory], request_id)
            judgement = kept[0].rollout.judgement if kept else None
        return await asyncio.to_thread(
            conversation,
            found,
            row,
            judgement=judgement,
            life=life,
            group=group,
            token_texts=await self._token_texts(found, run),
            trained=await asyncio.to_thread(_trained, run, row),
        )

    async def _token_texts(self, found: FoundRollout, run: OpenRun) -> TokenTexts | None:
        """Of the request's tokenizer, which lies in Redis, and beside each version of the weights that the run's directory keeps."""
        name = found.request.tokenizer if found.request else ""
        if not name:
            return None
        if name not in self._texts:
            try:
                bundle = await self._redis.read(lambda redis: _bundle(redis, name))
                tokenizer_json = bundle.tokenizer_json if bundle else None
            except (RedisUnavailable, MalformedMessage):
                tokenizer_json = None
            if tokenizer_json is None:
                tokenizer_json = await asyncio.to_thread(_exported_tokenizer, run)
            if tokenizer_json is None:
                return None
            while len(self._texts) >= MAX_TOKENIZERS:
                del self._texts[next(iter(self._texts))]
            self._texts[name] = await asyncio.to_thread(token_texts, tokenizer_json)
        return self._texts[name]


def _exported_tokenizer(run: OpenRun) -> bytes | None:
    """All versions of a run have the tokenizer of the model that it started with."""
    for path in run.directory.glob(f"{WEIGHTS}/*/{TOKENIZER}"):
        with contextlib.suppress(OSError):  # a version that is removed meanwhile
            return path.read_bytes()
    return None


async def _bundle(redis: Redis, name: str) -> TokenizerBundle | None:
    return await get_tokenizer(redis, name)


async def _judgement(redis: Redis, request_id: str) -> Judgement | None:
    found = await finding.judging_of(redis, request_id)
    return None if found is None else found.result


async def _life(redis: Redis, request_id: str, run: OpenRun) -> Life | None:
    try:
        return await explain.life(redis, request_id, run.directory)
    except LookupError:
        return None


def _stored(run: OpenRun, request_id: str) -> tuple[FoundRollout, Life | None, Judgement | None]:
    """From the directory alone. A rollout that only the journal has is shown without a body."""
    try:
        found = stored.find([run.directory], request_id)
    except LookupError:
        if request_id not in run.rollouts.rows:
            raise
        found = finding.Found(
            request_id=request_id,
            state="answered",
            request=None,
            lease=None,
            result=None,
            failures=(),
            unreadable="its body is in no store: the recipe keeps none, or the store removed it for newer ones",
            source=str(run.directory),
        )
    try:
        life = explain.stored_life(request_id, run.directory)
    except LookupError:
        life = None
    return found, life, None


def _trained(run: OpenRun, row: RolloutRow | None) -> TrainedTokens | None:
    """Of the step that trained the rollout by the journal: a step that a resume took back may have left a record, too."""
    if row is None or row.step is None:
        return None
    found = RolloutStore(run.directory / DIRECTORY).trained(row.request_id)
    return found if found is not None and found.step == row.step else None


def _row_and_group(run: OpenRun, request_id: str) -> tuple[RolloutRow | None, list[RolloutRow]]:
    with run.lock:
        row = run.rollouts.rows.get(request_id)
        return row, run.rollouts.group(row.group_id) if row is not None and row.group_id else []
