"""What the learner trains on: samples, and the batch that one optimizer step consumes.

Plain numpy, no torch: everything before the learner can be imported on a machine without it. Shape suffix T: tokens of one
sample.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Sample:
    """One unbroken run of tokens as the policy saw them. Each sampled token is trained in exactly one sample.

    In Sample(tokens_T=[7, 8, 9], trained_T=[False, True, True], versions_T=[-1, 4, 5], ...) the policy was fed token 7 and
    sampled 8 and 9, the second after weights 5 had arrived. `behaviour_logprobs_T[t]` belongs to `tokens_T[t]`, given all
    tokens before it.
    """

    request_id: str
    group_id: str
    branch: int
    tokens_T: npt.NDArray[np.int32]
    trained_T: npt.NDArray[np.bool_]
    # In nats, under the distribution that the engine sampled from; 0 where not trained.
    behaviour_logprobs_T: npt.NDArray[np.float32]
    advantages_T: npt.NDArray[np.float32]  # 0 where not trained
    versions_T: npt.NDArray[np.int32]  # weight version that sampled the token; -1 where not trained

    @property
    def num_tokens(self) -> int:
        return len(self.tokens_T)

    @property
    def num_trained_tokens(self) -> int:
        return int(self.trained_T.sum())

    @property
    def num_bytes(self) -> int:
        """Memory that the arrays take."""
        arrays = (
            self.tokens_T,
            self.trained_T,
            self.behaviour_logprobs_T,
            self.advantages_T,
            self.versions_T,
        )
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything that one optimizer step consumes, the same on every rank."""

    step: int  # 1 for the first optimizer step of the run
    samples: tuple[Sample, ...]
    temperature: float  # the sampling temperature the behaviour log-probs belong to
    num_trajectories: int
    request_ids: tuple[str, ...]  # trajectories trained here, one entry each
    lag_max: int  # in weight versions, over trajectories: the newest version minus the trajectory's first
    lag_mean: float

    @property
    def num_trained_tokens(self) -> int:
        return sum(sample.num_trained_tokens for sample in self.samples)
