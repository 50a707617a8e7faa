"""Which samples of a batch each update trains on. Plain numpy, no torch."""

from collections.abc import Iterator

import numpy as np

from trainer.batching.batch import Batch
from trainer.learner.config import LearnerConfig


def minibatches(batch: Batch, config: LearnerConfig) -> Iterator[list[int]]:
    """Indices of the samples of each update: every epoch divides the batch anew, alike on all ranks and on reruns.

    The division depends on which samples there are, not on their order. A trajectory is never divided. Samples without a
    trained token are left out, and so is an update without any sample.
    """
    trained = [index for index, sample in enumerate(batch.samples) if sample.num_trained_tokens]
    trained.sort(key=lambda index: (batch.samples[index].request_id, batch.samples[index].branch))
    trajectories: dict[str, list[int]] = {}
    for index in trained:
        trajectories.setdefault(batch.samples[index].request_id, []).append(index)
    whole = list(trajectories.values())
    for epoch in range(config.num_epochs):
        shuffled = np.random.default_rng((config.seed, batch.step, epoch)).permutation(len(whole))
        for part in np.array_split(shuffled, config.num_minibatches):
            if len(part):
                yield [index for place in part for index in whole[place]]
