"""Delivers adapters alone: each version is a directory in PEFT's format, which engines load beside the weights that the run began with.

An engine gets these weights, the base, whole and once after each of its starts; `transport.py` and `delta.py` bring both. Then it loads
one small directory per version, without a pause, and keeps the earlier ones: a request that it is sampling ends with the adapter that it
named. Each reply reports the name of the base, so tokens are those of a version exactly if the request named it and the reply names
the run's base.

An adapter is unloaded when no request can need it. SGLang unloads an adapter only when the last request that named it has ended, and loads
no other one meanwhile, so nothing is unloaded while such a request may still run.
"""

import contextlib
import logging
import time
from collections.abc import Iterator

from msgspec.structs import replace

from pipeline.weights import WeightVersion, parse_version_name, run_of
from trainer.weights.engines import EngineFailure, Engines, PauseMode, Served
from trainer.weights.transport import WeightTransport

log = logging.getLogger("swerve.weights")

UNUSED_S = 960.0
"""The time after which no request names a version any more that a newer one has replaced. A worker names the version that is served when
it sends a request, and waits for the answer for 900 s at most (`EngineSettings` in workers/policy/sglang.py).
"""


class AdapterTransport:
    """A `WeightTransport` of adapters, which `adapters` carries; `base` carries the weights that they belong to."""

    def __init__(
        self, adapters: WeightTransport, *, base: WeightTransport, base_version: WeightVersion
    ) -> None:
        """`base_version` need not be prepared yet."""
        self._adapters = adapters
        self._base = base
        self._base_version = base_version
        # What an engine reported last, by its URL.
        self._lacks_base: dict[str, bool] = {}
        self._loaded: dict[str, dict[str, str]] = {}
        # When an engine's adapter was seen first as one that no turn names, by engine and name.
        self._replaced_at: dict[tuple[str, str], float] = {}

    async def prepare(self, version: int, step: int) -> WeightVersion:
        if not await self._base.is_available(self._base_version):
            await self._base.prepare(self._base_version.version, step=0)
        made = await self._adapters.prepare(version, step)
        return replace(made, is_adapter=True)

    async def is_available(self, version: WeightVersion) -> bool:
        return (
            version.is_adapter
            and await self._base.is_available(self._base_version)
            and await self._adapters.is_available(version)
        )

    async def served(self, engines: Engines, engine_url: str, version: WeightVersion) -> Served:
        """The adapter of `version`, or else the run's newest one; the whole weights if the engine lacks the base or has no adapter."""
        whole = await self._base.served(engines, engine_url, self._base_version)
        is_base = whole.weight_version == self._base_version.name
        self._lacks_base[engine_url] = not (is_base and self._base.is_current(whole, self._base_version))
        if self._lacks_base[engine_url]:
            return whole
        loaded = self._loaded[engine_url] = await engines.adapters(engine_url)
        ours = {number: name for name, run_id, number in _published(loaded) if run_id == version.run_id}
        name = ours.get(version.version) or (ours[max(ours)] if ours else None)
        return whole if name is None else Served(weight_version=name, model_path=loaded[name])

    def is_current(self, served: Served, version: WeightVersion) -> bool:
        return self._adapters.is_current(served, version)

    def needs_pause(self, engine_url: str) -> bool:
        return self._lacks_base[engine_url]

    async def prefetch(self, engine_url: str, version: WeightVersion) -> None:
        if self._lacks_base[engine_url]:
            await self._base.prefetch(engine_url, self._base_version)
        await self._adapters.prefetch(engine_url, version)

    async def deliver(
        self, engines: Engines, engine_url: str, version: WeightVersion, mode: PauseMode
    ) -> None:
        if self._lacks_base[engine_url]:
            await self._base.deliver(engines, engine_url, self._base_version, mode)
        try:
            await self._adapters.deliver(engines, engine_url, version, mode)
        except EngineFailure:
            # What an engine has in part, or from another directory, it does not load again.
            with contextlib.suppress(EngineFailure):
                await engines.unload(engine_url, version.name)
            raise

    async def tidy(self, engines: Engines, engine_url: str, oldest_named: int) -> None:
        """Unloads the adapters that no turn has named for UNUSED_S, those of earlier runs too. A failure is logged, and tried again."""
        now = time.monotonic()
        for name, run_id, number in _published(self._loaded[engine_url]):
            if run_id == self._run_id and number >= oldest_named:
                continue
            if now - self._replaced_at.setdefault((engine_url, name), now) < UNUSED_S:
                continue
            try:
                await engines.unload(engine_url, name)
            except EngineFailure as error:
                log.warning("weights: %s keeps adapter %s: %s", engine_url, name, error)
                self._replaced_at[engine_url, name] = now
            else:
                del self._replaced_at[engine_url, name]

    async def discard_old(self, oldest_needed: int) -> None:
        await self._adapters.discard_old(oldest_needed)

    @property
    def _run_id(self) -> str:
        return run_of(self._base_version.name)


def _published(loaded: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    """The adapters that runs have published: name, run and version."""
    for name in loaded:
        with contextlib.suppress(ValueError):
            yield name, *parse_version_name(name)
