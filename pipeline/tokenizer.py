"""The policy's tokenizer, sent to workers by content: they need no model directory and hold no stale one.

Kept in Redis under its hash; every request names the hash. A few megabytes once per run.
"""

import hashlib
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from pipeline import keys
from pipeline.message import Message, decode_body, encode_body


class TokenizerBundle(Message, frozen=True, kw_only=True):
    tokenizer_json: bytes  # of the `tokenizers` package
    chat_template: str  # Jinja
    eos_token: str
    bos_token: str
    stop_token_ids: tuple[int, ...]  # sampling ends with any of these; it is part of the sampled ids
    vocab_size: int


async def put_tokenizer(redis: Redis, bundle: TokenizerBundle) -> str:
    """Store `bundle`; returns its hash, the name by which requests refer to it."""
    body = encode_body(bundle)
    name = hashlib.sha256(body).hexdigest()[:16]
    await redis.set(keys.tokenizer(name), body)
    return name


async def get_tokenizer(redis: Redis, name: str) -> TokenizerBundle | None:
    body = await redis.get(keys.tokenizer(name))
    return None if body is None else decode_body(body, TokenizerBundle)


def read_bundle(model_directory: Path) -> TokenizerBundle:
    """The bundle of a Hugging Face model directory.

    Raises ValueError naming the file and field that is missing.
    """
    config = _json(model_directory / "tokenizer_config.json")
    model = _json(model_directory / "config.json")
    template_file = model_directory / "chat_template.jinja"
    template = template_file.read_text() if template_file.exists() else config.get("chat_template")
    if not isinstance(template, str):
        raise ValueError(
            f"{model_directory}: no chat_template in tokenizer_config.json and no chat_template.jinja; add one"
        )
    eos_token = _token_text(config.get("eos_token"))
    if not eos_token:
        raise ValueError(
            f"{model_directory}/tokenizer_config.json: eos_token is missing; it ends a turn of the policy"
        )
    tokenizer_json = (model_directory / "tokenizer.json").read_bytes()
    return TokenizerBundle(
        tokenizer_json=tokenizer_json,
        chat_template=template,
        eos_token=eos_token,
        bos_token=_token_text(config.get("bos_token")),
        stop_token_ids=_stop_ids(tokenizer_json, eos_token, model),
        vocab_size=_vocab_size(model_directory, model),
    )


def _json(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; a model directory needs it") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def _token_text(value: object) -> str:
    """Older files wrap a token in an object with a `content` field."""
    if isinstance(value, dict):
        value = value.get("content")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return value if isinstance(value, str) else ""


def _vocab_size(model_directory: Path, model: dict[str, object]) -> int:
    size = model.get("vocab_size")
    if not isinstance(size, int):
        raise ValueError(f"{model_directory}/config.json: vocab_size is missing")
    return size


def _stop_ids(tokenizer_json: bytes, eos_token: str, model: dict[str, object]) -> tuple[int, ...]:
    class _Added(msgspec.Struct):
        id: int
        content: str

    class _Tokenizer(msgspec.Struct):
        added_tokens: list[_Added] = []

    ids = {
        t.id
        for t in msgspec.json.decode(tokenizer_json, type=_Tokenizer).added_tokens
        if t.content == eos_token
    }
    configured = model.get("eos_token_id")
    match configured:
        case int():
            ids.add(configured)
        case list():
            ids.update(i for i in configured if isinstance(i, int))  # pyright: ignore[reportUnknownVariableType]
        case _:
            pass
    if not ids:
        raise ValueError(
            f"no token id for eos_token {eos_token!r}: neither in tokenizer.json nor as eos_token_id in config.json"
        )
    return tuple(sorted(ids))
