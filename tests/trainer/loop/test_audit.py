"""The audit of a step: which samples the learner recomputes, and the row that comes of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace as with_fields

from pipeline.chat import ChatMessage
from pipeline.journal.rows import AuditRow
from pipeline.message import pack_float32s, pack_int32s
from pipeline.tokenizer import read_bundle
from pipeline.trajectory import Action, Trajectory, Turn, VersionSpan
from tests.trainer.learner.tiny import make_batch
from tests.trainer.trajectories import trajectory
from trainer.batching.audit import Gap, measure_gap
from trainer.batching.batch import Batch, Sample
from trainer.batching.samples import samples_of
from trainer.loop.learner_thread import LearnerThread
from trainer.loop.step import audited, decoder
from workers.policy.render import Renderer

COMMAND = "ls -la /testbed"
TEXT = f"<think>\nWhere is it?\n</think>\n\nI look.\n\n```bash\n{COMMAND}\n```"


class Agreeing:
    """A learner that holds the weights 3 and is 0.25 nats surer than the engine of all it recomputes."""

    def __init__(self) -> None:
        self.num_tokens = 0

    async def measure_gap(self, batch: Batch) -> Gap:
        self.num_tokens = batch.num_trained_tokens
        return measure_gap(batch, (3,), self._recompute)

    def _recompute(
        self, version: int, samples: Sequence[Sample], temperature: float
    ) -> list[npt.NDArray[np.float32]]:
        return [sample.behaviour_logprobs_T + np.float32(0.25) for sample in samples]


def played(renderer: Renderer, number: int) -> Trajectory:
    """A reply with a thought and a command, of which the weights 3 sampled the first ten tokens and the weights 4 the others."""
    ids = [*renderer.encode_text(TEXT), renderer.end_id]
    turn = Turn(
        kept_tokens=0,
        fed=pack_int32s([1, 2]),
        sampled=pack_int32s(ids),
        logprobs=pack_float32s([-0.5] * len(ids)),
        versions=(VersionSpan(3, 0, 10), VersionSpan(4, 10, len(ids))),
        stop="stop",
        text=renderer.decode(ids),
        reply=ChatMessage("assistant", TEXT.partition("</think>\n\n")[2], reasoning="Where is it?"),
        actions=(Action(command=COMMAND),),
    )
    made = trajectory(turn)
    request = with_fields(made.claim.request, id=f"r{number}")
    return with_fields(made, claim=with_fields(made.claim, request=request))


@pytest.fixture
def renderer(tiny_model: Path) -> Renderer:
    return Renderer(read_bundle(tiny_model))


def batch_of(renderer: Renderer, num_trajectories: int) -> Batch:
    rollouts = [played(renderer, number) for number in range(num_trajectories)]
    return make_batch(
        tuple(sample for one in rollouts for sample in samples_of(one, vocab_size=2**16, max_tokens=2**12))
    )


async def audit_of(renderer: Renderer, tiny_model: Path, batch: Batch, *, share: float) -> AuditRow:
    decode = decoder(read_bundle(tiny_model))
    learner = Agreeing()
    row = await audited(batch, cast(LearnerThread, learner), share=share, seed=1, decode=decode)
    assert row.num_tokens + row.num_unmeasured == learner.num_tokens
    return row


async def test_a_share_of_the_tokens_is_audited_and_what_it_cost_is_written_down(
    renderer: Renderer, tiny_model: Path
) -> None:
    batch = batch_of(renderer, 20)
    row = await audit_of(renderer, tiny_model, batch, share=0.1)
    assert (row.step, row.num_samples, row.num_tokens) == (1, 2, 20)
    assert row.num_batch_tokens == batch.num_trained_tokens
    assert row.num_positions == sum(sample.num_tokens - 1 for sample in batch.samples[:2])
    assert (row.gap_max, row.gap_mean) == (0.25, 0.25)
    assert list(row.by_version) == ["3"]


async def test_the_tokens_of_a_real_tokenizer_are_told_apart(renderer: Renderer, tiny_model: Path) -> None:
    (sample,) = batch_of(renderer, 1).samples
    versions_T = np.where(sample.trained_T, 3, -1).astype(np.int32)
    whole = make_batch((replace(sample, versions_T=versions_T),))
    row = await audit_of(renderer, tiny_model, whole, share=1.0)
    counts = {kind: drift.num_tokens for kind, drift in row.by_kind.items()}
    assert counts["end"] == 1
    assert sum(counts.values()) == sample.num_trained_tokens
    assert decoder(read_bundle(tiny_model))(sample.tokens_T[2:-1].tolist()) == TEXT
    assert counts["call"] <= len(COMMAND)
    assert counts["thought"] <= TEXT.index("\n\nI look.")
    assert min(counts.values()) > 0


async def test_an_audit_of_nothing_measures_nothing(renderer: Renderer, tiny_model: Path) -> None:
    row = await audit_of(renderer, tiny_model, batch_of(renderer, 2), share=0.0)
    assert (row.num_tokens, row.gap_max, row.by_kind) == (0, None, {})
