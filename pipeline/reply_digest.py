"""The digest of a reply: evidence that what is trained is what the engine sampled, after the prompt that the engine was sent.

The worker computes it from what goes to the engine and what comes back, before anything of ours touches either. It travels with
the turn, and the trainer computes it again from the arrays that the learner is given. It guards against mistakes, not against
a worker that lies.
"""

import hashlib
import struct

from pipeline.message import Float32s, Int32s

DIGEST_BYTES = 16

_LENGTHS = struct.Struct("<QQ")


class ReplyDigester:
    """Digests of the replies in one unbroken run of tokens, each after all the tokens before it.

    A digest is the BLAKE2b of the prompt's ids, the reply's ids, its log-probs as float32, and the bytes of the first two.
    Several replies after one growing prompt cost one pass over it.
    """

    def __init__(self) -> None:
        self._prompt = hashlib.blake2b(digest_size=DIGEST_BYTES)
        self._prompt_bytes = 0

    def extend(self, tokens: Int32s) -> None:
        """Put tokens behind the prompt."""
        self._prompt.update(tokens)
        self._prompt_bytes += len(tokens)

    def digest(self, sampled: Int32s, logprobs: Float32s) -> bytes:
        """Of the reply `sampled` to the prompt so far."""
        whole = self._prompt.copy()
        whole.update(sampled)
        whole.update(logprobs)
        whole.update(_LENGTHS.pack(self._prompt_bytes, len(sampled)))
        return whole.digest()


def reply_digest(prompt: Int32s, sampled: Int32s, logprobs: Float32s) -> bytes:
    """The digest of one reply."""
    digester = ReplyDigester()
    digester.extend(prompt)
    return digester.digest(sampled, logprobs)
