"""A policy that replays given replies, for tests and debugging, with the same tokens and turns as a sampled one."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.agent.config import load_agent
from pipeline.errors import EngineError
from pipeline.message import pack_float32s, pack_int32s
from pipeline.reply_digest import reply_digest
from pipeline.request import Claim
from pipeline.tokenizer import TokenizerBundle
from pipeline.trajectory import VersionSpan
from workers.policy.conversation import Conversation, Sampled
from workers.policy.render import Renderer


class ScriptedPolicies:
    """Opens conversations that all reply `replies`, in order, as if weights `version` had sampled them with certainty."""

    def __init__(self, bundle: TokenizerBundle, replies: Sequence[str], *, version: int = 0) -> None:
        self._bundle = bundle
        self._renderers: dict[bool, Renderer] = {}
        self._replies = tuple(replies)
        self._version = version

    async def open(self, claim: Claim) -> Conversation:
        """A conversation at the beginning of the script. Past its end it raises EngineError."""
        tools = load_agent(claim.request.agent_config).tools
        renderer = self._renderers.get(bool(tools)) or Renderer(self._bundle, tools)
        self._renderers[bool(tools)] = renderer
        return Conversation(renderer, _Script(renderer, self._replies, self._version), claim.request)


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
