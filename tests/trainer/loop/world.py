"""Everything around a trainer: workers, judges, people, and streams that deliver twice."""

from arq.connections import ArqRedis

from benchmarks.scripted_fleet import finish
from pipeline import deadletters, keys, queue, stream
from pipeline.kinds import JUDGE
from pipeline.message import encode
from pipeline.request import Claim
from pipeline.trajectory import Failed
from tests.pipeline.judging import judge_all
from tests.trainer.trainer_side import RUN

LOST = Failed(boundary="sandbox", message="the host went down", transient=True)
IMAGE_GONE = Failed(boundary="sandbox", message="no such image", transient=False)
VERDICTS: tuple[float | Failed, ...] = (0.0, 1.0, 0.0, 1.0, LOST, IMAGE_GONE)


class World:
    """Everything but the trainer: workers, people, and a stream that delivers twice."""

    def __init__(self, redis: ArqRedis) -> None:
        self.redis = redis
        self.claims: list[Claim] = []
        self.was_requeued = False

    async def work(self, number: int) -> None:
        """Claim a request and answer it."""
        await self.claim(number)
        await self.answer(number)

    async def claim(self, _: int) -> None:
        taken = await queue.take(self.redis, "w", 1)
        self.claims += [one for one in taken if isinstance(one, Claim)]

    async def answer(self, number: int) -> None:
        """Perhaps of a request that was withdrawn meanwhile, or whose group is closed."""
        if self.claims:
            claim = self.claims.pop(number % len(self.claims))
            await finish(self.redis, claim, lambda request: VERDICTS[number % len(VERDICTS)])

    async def copy(self, number: int) -> None:
        heads = await stream.newest_heads(self.redis, RUN, 20)
        if heads:
            head = heads[number % len(heads)].head
            await self.redis.xadd(keys.stream(RUN), {"head": encode(head)})

    async def judge(self, _: int) -> None:
        await judge_all(self.redis, 0.5, None, limit=1)

    async def copy_judgement(self, number: int) -> None:
        heads = await stream.newest_heads(self.redis, RUN, 20, JUDGE)
        if heads:
            head = heads[number % len(heads)].head
            await self.redis.xadd(keys.stream(RUN, JUDGE), {"head": encode(head)})

    async def requeue(self, number: int) -> None:
        dead = sorted(await deadletters.listed(self.redis, RUN))
        if dead:
            self.was_requeued = True
            await deadletters.requeue(self.redis, RUN, dead[number % len(dead)])


WORLD = ("work", "work", "work", "claim", "answer", "copy", "requeue", "judge", "judge", "copy_judgement")
