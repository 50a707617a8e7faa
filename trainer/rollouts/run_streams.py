"""The two streams of a run: trajectories, and the judgements of trajectories.

Trajectories are read first, so that a judgement finds its member. Both are acknowledged with the checkpoint that holds what became
of them.
"""

from arq.connections import ArqRedis

from pipeline import stream
from pipeline.judge import JudgementHead
from pipeline.kinds import JUDGE
from trainer.rollouts.ledger import LedgerState
from trainer.rollouts.stream_reader import StreamReader


class RunStreams:
    """Of one run."""

    def __init__(
        self,
        redis: ArqRedis,
        run_id: str,
        rollouts: StreamReader,
        judgements: StreamReader[JudgementHead],
    ) -> None:
        self._redis = redis
        self._run_id = run_id
        self._rollouts = rollouts
        self._judgements = judgements

    async def open(self) -> None:
        """Make the trainer's consumer groups, once."""
        await stream.open_reader(self._redis, self._run_id)
        await stream.open_reader(self._redis, self._run_id, JUDGE)

    async def acknowledge(self, state: LedgerState) -> None:
        """Acknowledge what is settled in a checkpoint. Repeating it changes nothing."""
        await stream.acknowledge(self._redis, self._run_id, state.pending)
        self._rollouts.forget(state.pending)
        await stream.acknowledge(self._redis, self._run_id, state.pending_judgements, JUDGE)
        self._judgements.forget(state.pending_judgements)

    async def recover(self) -> int:
        """Accept what was delivered before and neither accepted nor acknowledged. Returns how many entries."""
        return await self._rollouts.recover() + await self._judgements.recover()

    async def read(self, *, block_ms: int) -> int:
        """Accept what is new, waiting up to `block_ms` for a trajectory. Returns how many entries."""
        num_rollouts = await self._rollouts.read(block_ms=block_ms)
        return num_rollouts + await self._judgements.read(block_ms=None)
