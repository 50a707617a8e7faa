"""The audit of log-probs: the learner recomputes some tokens of a step under the weights that sampled them.

It takes a share of the step's tokens, because each of them costs another forward pass for each weight version in its sample. It
changes no weights, so it may run whenever the learner is free, also after the step's weights are published.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tokenizers import Tokenizer

from pipeline.tokenizer import TokenizerBundle
from trainer.batching.audit import drawn, drift_by_kind, drift_by_position, drift_by_version
from trainer.batching.batch import Batch
from trainer.batching.logprob_gap import Gap
from trainer.batching.token_kinds import Decode
from trainer.recipe import AuditRecipe
from trainer.records.audit_row import AuditRow


class AuditedLearner(Protocol):
    async def measure_gap(self, batch: Batch) -> Gap: ...


class Auditor:
    """Of one run."""

    def __init__(
        self,
        recipe: AuditRecipe,
        learner: AuditedLearner,
        *,
        seed: int,
        decode: Decode,
        record: Callable[[AuditRow], None],
    ) -> None:
        """`decode` turns sampled tokens into text."""
        self._recipe = recipe
        self._learner = learner
        self._seed = seed
        self._decode = decode
        self._record = record

    async def audit(self, batch: Batch) -> AuditRow:
        """Measure the gap on a share of what a step trained, and write it down."""
        began = time.monotonic()
        part = drawn(batch, self._recipe.share, seed=self._seed)
        gap = await self._learner.measure_gap(part)
        row = AuditRow(
            step=batch.step,
            num_tokens=gap.num_tokens,
            num_batch_tokens=batch.num_trained_tokens,
            num_unmeasured=gap.num_unmeasured,
            num_samples=len(part.samples),
            num_positions=gap.num_positions,
            gap_max=gap.max,
            gap_mean=gap.mean,
            audit_s=time.monotonic() - began,
            by_version=drift_by_version(gap),
            by_position=drift_by_position(gap),
            by_kind=drift_by_kind(gap, part, self._decode),
        )
        self._record(row)
        return row


def decoder(bundle: TokenizerBundle) -> Decode:
    """Sampled tokens as text, control tokens included, as workers decode them."""
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return decode
