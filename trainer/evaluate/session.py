"""One session of an evaluation: plays what has no verdict yet, several episodes at a time, and records each as it ends."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.request import Endpoint, Limits, RolloutRequest, Sampling
from pipeline.task import Task
from pipeline.trajectory import Trajectory
from trainer.evaluate.players import EpisodeLost, Players, request_id
from trainer.evaluate.results import EpisodeResult, EvaluationDirectory
from trainer.records.rollout_writer import RolloutWriter


@dataclass(frozen=True, slots=True)
class EpisodeForm:
    """What all requests of an evaluation have in common."""

    run_id: str
    endpoint: Endpoint
    agent_config: str
    sampling: Sampling
    limits: Limits
    samples: int  # of each task

    def fill(self, task: Task, sample: int) -> RolloutRequest:
        return RolloutRequest(
            id=request_id(self.run_id, task, sample),
            run_id=self.run_id,
            purpose="eval",
            task=task,
            group_id=f"{self.run_id}.{task.id}",
            member=sample,
            group_size=self.samples,
            version_at_enqueue=0,
            sampling=self.sampling,
            limits=self.limits,
            agent_config=self.agent_config,
            tokenizer="",
            endpoint=self.endpoint,
            enqueued_at=time.time(),
        )


@dataclass(frozen=True, slots=True)
class Session:
    """Plays, keeps each rollout in `rollouts`, and records it. `on_result` is told of each new result, and of how many have ended."""

    form: EpisodeForm
    directory: EvaluationDirectory
    rollouts: RolloutWriter
    players: Players
    max_concurrent: int
    on_result: Callable[[EpisodeResult], None]

    async def run(self, todo: Sequence[tuple[Task, int]]) -> None:
        """Cancelled, it leaves what has ended recorded. Raises OSError if a result cannot be written."""
        waiting = iter(todo)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.max_concurrent, len(todo))):
                    group.create_task(self._work_off(waiting))
        except* OSError as several:
            raise several.exceptions[0] from None

    async def _work_off(self, waiting: Iterator[tuple[Task, int]]) -> None:
        for task, sample in waiting:
            request = self.form.fill(task, sample)
            try:
                trajectory = await self.players.play(request)
            except EpisodeLost as loss:
                self.on_result(self.directory.record_loss(task, sample, str(loss)))
                continue
            self.on_result(await asyncio.to_thread(self._record, trajectory))
            await self.players.settle(trajectory.claim.request.id)

    def _record(self, trajectory: Trajectory) -> EpisodeResult:
        self.rollouts.add_trajectory(trajectory)
        self.rollouts.sync()
        return self.directory.record(trajectory)
