"""A policy that replays given replies, for tests and debugging, with the same tokens and turns as a sampled one."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.agent.config import load_agent
from pipeline.chat_template import Tools
from pipeline.errors import EngineError
from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim
from pipeline.tokenizer import TokenizerBundle
from pipeline.trajectory import VersionSpan, reply_digest
from workers.policy.conversation import Conversation
from workers.policy.render import Renderer
from workers.policy.speaker import Sampled, Speaker, Voice


class ScriptedPolicies:
    """Opens conversations that all reply `replies`, in order, as if weights `version` had sampled them with certainty."""

    def __init__(self, bundle: TokenizerBundle, replies: Sequence[str], *, version: int = 0) -> None:
        self._bundle = bundle
        self._renderers: dict[bool, Renderer] = {}
        self._replies = tuple(replies)
        self._version = version

    async def open(self, claim: Claim) -> Conversation:
        """A conversation at the beginning of the script. After the last reply it raises EngineError."""
        renderer = self._renderer(load_agent(claim.request.agent_config).tools)
        return Conversation(renderer, self._speaker(claim, renderer), claim.request)

    async def voice(self, claim: Claim) -> Voice:
        """The same script for an agent program. It answers the program's requests in the order of arrival."""
        renderer = self._renderer(())
        return Voice(renderer, self._speaker(claim, renderer))

    def _renderer(self, tools: Tools) -> Renderer:
        renderer = self._renderers.get(bool(tools)) or Renderer(self._bundle, tools)
        self._renderers[bool(tools)] = renderer
        return renderer

    def _speaker(self, claim: Claim, renderer: Renderer) -> Speaker:
        request = claim.request
        return Speaker(
            _Script(renderer, self._replies, self._version),
            max_new_tokens=request.sampling.max_new_tokens,
            context_tokens=request.limits.context_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Script:
    renderer: Renderer
    replies: tuple[str, ...]
    version: int

    async def sample(
        self, prompt: Sequence[int], *, kept_tokens: int, max_new_tokens: int, turn: int
    ) -> Sampled:
        if turn >= len(self.replies):
            raise EngineError(f"the script ends after {len(self.replies)} replies")
        whole = [*self.renderer.encode_text(self.replies[turn]), self.renderer.end_id]
        ids = whole[:max_new_tokens]
        logprobs = [0.0] * len(ids)
        return Sampled(
            ids=ids,
            logprobs=logprobs,
            versions=(VersionSpan(self.version, 0, len(ids)),),
            stop="stop" if len(ids) == len(whole) else "length",
            digest=reply_digest(pack_int32s(prompt), pack_int32s(ids), pack_float32s(logprobs)),
            engine="script",
        )
