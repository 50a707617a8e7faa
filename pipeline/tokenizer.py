"""The policy's tokenizer as a message, so that workers need no model directory and never use an old vocabulary.

It is stored in Redis under the hash of its content, and every request names the hash. It takes a few megabytes, once per run.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from redis.asyncio import Redis

from pipeline import keys
from pipeline.chat import ReplyFormat, recognised
from pipeline.message import Message, decode_body, encode_body
from pipeline.model_config import language_keys

T = TypeVar("T")


class TokenizerBundle(Message, frozen=True, kw_only=True):
    tokenizer_json: bytes  # the format of the `tokenizers` package
    chat_template: str  # Jinja
    eos_token: str
    bos_token: str
    stop_token_ids: tuple[int, ...]  # sampling ends with any of these; it is part of the sampled ids
    vocab_size: int
    # Further variables of the chat template, such as enable_thinking.
    template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    reply_format: ReplyFormat = ReplyFormat()


async def put_tokenizer(redis: Redis, bundle: TokenizerBundle) -> str:
    """Store `bundle`; returns its hash, the name by which requests refer to it."""
    body = encode_body(bundle)
    name = hashlib.sha256(body).hexdigest()[:16]
    await redis.set(keys.tokenizer(name), body)
    return name


async def get_tokenizer(redis: Redis, name: str) -> TokenizerBundle | None:
    body = await redis.get(keys.tokenizer(name))
    return None if body is None else decode_body(body, TokenizerBundle)


class _Wrapped(msgspec.Struct):
    content: str


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    eos_token: str | _Wrapped | None = None  # older files wrap a token in an object
    bos_token: str | _Wrapped | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class _ModelConfig(msgspec.Struct):
    vocab_size: int
    eos_token_id: int | list[int] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct):
    # The second form is that of Unigram: tokens in the order of their ids.
    vocab: dict[str, int] | list[tuple[str, float]]


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = msgspec.field(default_factory=list[_AddedToken])


class _WholeTokenizerFile(_TokenizerFile):
    model: _Vocabulary = msgspec.field(default_factory=lambda: _Vocabulary({}))

    @property
    def tokens(self) -> dict[int, str]:
        """Every token by its id."""
        vocab = self.model.vocab
        pairs = vocab.items() if isinstance(vocab, dict) else ((one, id) for id, (one, _) in enumerate(vocab))
        return {id: token for token, id in pairs} | {token.id: token.content for token in self.added_tokens}


def read_bundle(
    model_directory: Path,
    *,
    template_file: Path | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> TokenizerBundle:
    """The bundle of a Hugging Face model directory. `template_file` replaces the directory's own chat template.

    Raises ValueError naming the file and field that is missing.
    """
    config = _read(model_directory / "tokenizer_config.json", _TokenizerConfig)
    model = _read_model(model_directory / "config.json")
    tokenizer = _read(model_directory / "tokenizer.json", _TokenizerFile)
    template = _chat_template(model_directory, config) if template_file is None else _text_of(template_file)
    eos_token = _text(config.eos_token)
    if not eos_token:
        raise ValueError(
            f"{model_directory}/tokenizer_config.json: eos_token is missing; it ends a turn of the policy"
        )
    stop_token_ids = {token.id for token in tokenizer.added_tokens if token.content == eos_token}
    stop_token_ids |= _ids(model.eos_token_id)
    # If a model has another token for the end of a turn than for the end of a text, only this file lists it.
    generation = model_directory / "generation_config.json"
    if generation.exists():
        stop_token_ids |= _ids(_read(generation, _GenerationConfig).eos_token_id)
    if not stop_token_ids:
        raise ValueError(
            f"{model_directory}: no id for {eos_token!r}, neither in tokenizer.json nor in config.json nor in "
            "generation_config.json"
        )
    return TokenizerBundle(
        tokenizer_json=(model_directory / "tokenizer.json").read_bytes(),
        chat_template=template,
        eos_token=eos_token,
        bos_token=_text(config.bos_token),
        stop_token_ids=tuple(sorted(stop_token_ids)),
        vocab_size=model.vocab_size,
        template_kwargs=dict(template_kwargs or {}),
        reply_format=recognised(template),
    )


def vocabulary_difference(one: TokenizerBundle, other: TokenizerBundle, *, whose: str = "the policy") -> str:
    """The first token of `one` that `other` does not have under the same id, in words; "" if it has all of them. `whose` names `one`.

    `other` may have more tokens. Only ids and their texts are compared, because ids are all that a model gets.
    """
    ours, theirs = (
        msgspec.json.decode(bundle.tokenizer_json, type=_WholeTokenizerFile).tokens for bundle in (one, other)
    )
    for number, token in sorted(ours.items()):
        if theirs.get(number) != token:
            return f"id {number} is {token!r} for {whose} and {theirs.get(number, 'no token')!r} there"
    return ""


def _chat_template(model_directory: Path, config: _TokenizerConfig) -> str:
    path = model_directory / "chat_template.jinja"
    if path.exists():
        return _text_of(path)
    match config.chat_template:
        case str(template):
            return template
        case list(templates):
            named = {one.name: one.template for one in templates}
            if "default" in named:
                return named["default"]
            raise ValueError(
                f"{model_directory}/tokenizer_config.json: chat_template has {sorted(named)}, none of them named default; "
                "give the one to use as a file"
            )
        case None:
            raise ValueError(
                f"{model_directory}: no chat_template, neither in tokenizer_config.json nor as a .jinja file"
            )


def _text_of(template_file: Path) -> str:
    try:
        return template_file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{template_file}: {error}; give a chat template in Jinja") from error


def _ids(eos_token_id: int | list[int] | None) -> set[int]:
    match eos_token_id:
        case int(one):
            return {one}
        case list(several):
            return set(several)
        case None:
            return set()


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing; a model directory needs it") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: {error}") from error


def _read_model(path: Path) -> _ModelConfig:
    try:
        return msgspec.convert(language_keys(_read(path, dict[str, Any])), _ModelConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}; take the file that came with the weights") from error


def _text(token: str | _Wrapped | None) -> str:
    match token:
        case _Wrapped(content):
            return content
        case str():
            return token
        case None:
            return ""
