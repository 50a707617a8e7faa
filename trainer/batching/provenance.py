"""Whether what is to be trained is what the engine sampled: the digests that the worker made, computed again from the sample."""

from collections.abc import Iterable

import numpy as np

from pipeline.reply_digest import ReplyDigester
from trainer.batching.batch import Sample


class AlteredReply(ValueError):
    """Tokens, prompt or log-probs of a reply are not those of its digest."""


def check_provenance(samples: Iterable[Sample]) -> None:
    """Raises AlteredReply naming the first reply that the engine did not sample so, or that nothing proves."""
    for sample in samples:
        _check(sample)


def _check(sample: Sample) -> None:
    tokens_T, logprobs_T = sample.tokens_T.astype("<i4"), sample.behaviour_logprobs_T.astype("<f4")
    in_replies_T = np.zeros(sample.num_tokens, np.bool_)
    digester, position = ReplyDigester(), 0
    for reply in sample.replies:
        if not reply.digest:
            raise AlteredReply(
                f"turn {reply.turn} has no digest: its worker is older than this trainer; update the workers"
            )
        digester.extend(tokens_T[position : reply.start].tobytes())
        sampled = tokens_T[reply.start : reply.end].tobytes()
        if digester.digest(sampled, logprobs_T[reply.start : reply.end].tobytes()) != reply.digest:
            raise AlteredReply(
                f"turn {reply.turn} is not what the engine sampled: prompt, tokens or log-probs differ from its digest"
            )
        digester.extend(sampled)
        in_replies_T[reply.start : reply.end] = True
        position = reply.end
    if not np.array_equal(in_replies_T, sample.trained_T):
        raise AlteredReply(f"sample {sample.branch} trains other tokens than those of its replies")
