"""What a step did with each token that it trained, as the learner reports it and as it is kept. Plain numpy, no torch.

Shape suffix T: tokens of one sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.rollout_store.trained import TrainedTokens, TrainedTurn
from trainer.batching.batch import Batch, Sample

_LARGEST_HALF = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class SampleTokens:
    """Of one sample. Where a token is not trained, the arrays hold 0."""

    request_id: str
    branch: int
    logprobs_T: npt.NDArray[np.float32]  # nats, under the weights before the update
    weights_T: npt.NDArray[np.float32]  # the objective's factor on the policy gradient
    # Why there is no policy gradient: places in pipeline.rollout_store.trained.REASONS.
    reasons_T: npt.NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Memory that the arrays take."""
        return self.logprobs_T.nbytes + self.weights_T.nbytes + self.reasons_T.nbytes


def trained_tokens(batch: Batch, tokens: Sequence[SampleTokens], *, version: int) -> dict[str, TrainedTokens]:
    """By request id, as it is kept. `version` is of the weights that the step started from."""
    reported = {(one.request_id, one.branch): one for one in tokens}
    turns: dict[str, list[TrainedTurn]] = {}
    for sample in batch.samples:
        found = reported.get((sample.request_id, sample.branch))
        if found is not None:
            turns.setdefault(sample.request_id, []).extend(_turns(sample, found))
    return {
        request_id: TrainedTokens(step=batch.step, version=version, turns=tuple(of_rollout))
        for request_id, of_rollout in turns.items()
    }


def num_tokens(trained: TrainedTokens) -> int:
    return sum(len(turn.reasons) for turn in trained.turns)


def _turns(sample: Sample, tokens: SampleTokens) -> list[TrainedTurn]:
    weights_T = tokens.weights_T.clip(-_LARGEST_HALF, _LARGEST_HALF)
    return [
        TrainedTurn(
            turn=reply.turn,
            logprobs=tokens.logprobs_T[reply.start : reply.end].astype("<f4").tobytes(),
            advantages=sample.advantages_T[reply.start : reply.end].astype("<f4").tobytes(),
            weights=weights_T[reply.start : reply.end].astype("<f2").tobytes(),
            reasons=tokens.reasons_T[reply.start : reply.end].tobytes(),
        )
        for reply in sample.replies
    ]
