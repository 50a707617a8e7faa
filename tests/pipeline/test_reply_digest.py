"""The digest of a reply stands for prompt, tokens and log-probs, and for nothing else."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from pipeline.message import pack_float32s, pack_int32s
from pipeline.trajectory import ReplyDigester, reply_digest

PROMPT, SAMPLED, LOGPROBS = pack_int32s([1, 2]), pack_int32s([3, 4]), pack_float32s([-0.5, -0.25])
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(pack_int32s)


def test_a_digest_is_what_its_description_says() -> None:
    """Workers and trainers of different releases must agree on it."""
    lengths = (8).to_bytes(8, "little") + (8).to_bytes(8, "little")
    whole = hashlib.blake2b(PROMPT + SAMPLED + LOGPROBS + lengths, digest_size=16)
    assert reply_digest(PROMPT, SAMPLED, LOGPROBS) == whole.digest()


def test_any_change_shows() -> None:
    changed = [
        (pack_int32s([1, 3]), SAMPLED, LOGPROBS),
        (PROMPT, pack_int32s([4, 3]), LOGPROBS),
        (PROMPT, SAMPLED, pack_float32s([-0.25, -0.5])),
        (PROMPT, SAMPLED, pack_float32s([-0.5, -0.25000003])),
        (PROMPT + SAMPLED[:4], SAMPLED[4:], LOGPROBS),
        (b"", PROMPT + SAMPLED, LOGPROBS),
    ]
    digests = {reply_digest(*parts) for parts in changed}
    assert len(digests) == len(changed)
    assert reply_digest(PROMPT, SAMPLED, LOGPROBS) not in digests


@given(st.lists(st.tuples(IDS, IDS), max_size=5))
def test_replies_after_a_growing_prompt_have_the_digests_that_each_has_alone(
    turns: list[tuple[bytes, bytes]],
) -> None:
    digester, held = ReplyDigester(), b""
    for fed, sampled in turns:
        logprobs = bytes(len(sampled))
        digester.extend(fed)
        assert digester.digest(sampled, logprobs) == reply_digest(held + fed, sampled, logprobs)
        digester.extend(sampled)
        held += fed + sampled
