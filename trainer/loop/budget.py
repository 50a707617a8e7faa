"""How many groups may be asked for at the moment: staleness, bytes in Redis, bytes in memory and a streak of failures,
whichever allows the fewest.
"""

import time

from trainer.loop.parts import Parts
from trainer.loop.state import Standing
from trainer.recipe import Recipe
from trainer.rollouts.admission import Backlog

REDIS_SHARE = 0.5  # of what a bounded Redis may hold, for answers; the rest is requests, and other runs


class Room:
    """Of one run. `queue_bytes` is what Redis held of its answers when last asked, `redis_bytes` what it may hold of
    everything, 0 without a bound; `is_refused`: it took nothing in when last asked.
    """

    def __init__(self, recipe: Recipe, parts: Parts, standing: Standing) -> None:
        self._group_size = recipe.rollout.group_size
        self._bounds = recipe.admission
        self._parts = parts
        self._standing = standing
        self.queue_bytes = 0
        self.redis_bytes = 0
        self.is_refused = False

    def groups(self) -> int:
        book = self._parts.book
        room = self._parts.admission.room(
            begun_steps=self._standing.begun_steps,
            published_steps=self._standing.published_steps,
            live_groups=book.num_live,
        )
        for backlog in (self._in_redis, self._in_memory):
            room = backlog.room(room, group_size=self._group_size, open_groups=book.num_open)
        return self._parts.ledger.brake.room(room, open_groups=book.num_open, now=time.monotonic())

    def sentence(self) -> str:
        """Why nothing is asked for at the moment, or how much more may be."""
        for backlog in (self._in_redis, self._in_memory):
            if closed := backlog.sentence(self._group_size):
                return closed
        return self._parts.admission.sentence(
            begun_steps=self._standing.begun_steps,
            published_steps=self._standing.published_steps,
            live_groups=self._parts.book.num_live,
        )

    @property
    def needs_checkpoint(self) -> bool:
        """Whether Redis is full of answers, which only a checkpoint lets it forget."""
        return self.is_refused or self._in_redis.is_full(self._group_size)

    @property
    def _in_redis(self) -> Backlog:
        book = self._parts.book
        return Backlog(
            "of answers wait in Redis for a checkpoint",
            min(
                self._bounds.max_queue_bytes,
                int(self.redis_bytes * REDIS_SHARE) or self._bounds.max_queue_bytes,
            ),
            held_bytes=self.queue_bytes,
            num_awaited=book.num_awaited,
            largest_bytes=book.largest_body_bytes,
        )

    @property
    def _in_memory(self) -> Backlog:
        book = self._parts.book
        return Backlog(
            "of answers wait in the trainer's memory for their step",
            self._bounds.max_held_bytes,
            held_bytes=book.held_bytes,
            num_awaited=book.num_awaited,
            largest_bytes=book.largest_bytes,
        )
