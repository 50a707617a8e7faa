"""The tokenizers of judges, each with its chat template, made ready once for a process."""

import asyncio

from pipeline.errors import RequestError
from workers.policy.render import Renderer
from workers.policy.sglang import TokenizerSource


class JudgeTokenizers:
    """By the content hash under which the trainer stored them."""

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source
        self._renderers: dict[str, Renderer] = {}
        self._making = asyncio.Lock()

    async def renderer(self, name: str) -> Renderer:
        """Raises RequestError if the tokenizer is unknown or cannot be used."""
        async with self._making:
            if name not in self._renderers:
                bundle = await self._source(name)
                if bundle is None:
                    raise RequestError(f"judge.tokenizer: {name} was never announced")
                self._renderers[name] = await asyncio.to_thread(Renderer, bundle)
            return self._renderers[name]
