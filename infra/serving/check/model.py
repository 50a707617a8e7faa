"""What the checks know of the served model, from its directory and from the engine; and a second implementation of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.serving.check.target import Model, ServerInfo

# One reply may hold so large a part of the engine's KV cache: some checks have two replies under way, and a third waiting.
CACHE_PART = 4


def describe(directory: Path, info: ServerInfo) -> Model:
    """The model in `directory` as an engine started with `info` serves it. Raises ValueError naming what is missing."""
    config = _json(directory / "config.json")
    if not config:
        raise ValueError(
            f"{directory}: no config.json in it; give --model the directory that the engine serves"
        )
    text = config.get("text_config", config)
    limits = [text.get("max_position_embeddings"), info.context_length]
    limits += [info.max_total_num_tokens // CACHE_PART] if info.max_total_num_tokens else []
    return Model(
        vocab_size=int(text["vocab_size"]),
        context_tokens=min(int(limit) for limit in limits if limit),
        special_ids=_special_ids(directory, config),
        dtype=info.dtype
        if info.dtype != "auto"
        else str(text.get("torch_dtype") or text.get("dtype") or "auto"),
    )


def _special_ids(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    for source in (config, _json(directory / "generation_config.json")):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = source.get(key)
            found.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    added = _json(directory / "tokenizer.json").get("added_tokens", [])
    return frozenset(found | {int(token["id"]) for token in added})


def _json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}


class TransformersReference:
    """The model computed by transformers on the CPU, in fp32, one sequence at a time."""

    def __init__(self, directory: Path) -> None:
        """Takes four bytes of memory for each parameter. Raises OSError or ValueError for what transformers cannot load."""
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, prompt: Sequence[int], sampled: Sequence[int], temperature: float) -> list[float]:
        torch = self._torch
        ids_1T = torch.tensor([[*prompt, *sampled]])
        with torch.no_grad():
            logits_SV = self._model(ids_1T).logits[0, len(prompt) - 1 : -1]
        logprobs_SV = (logits_SV / temperature).log_softmax(-1)
        return logprobs_SV.gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()
