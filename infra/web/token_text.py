"""The text of each token, from the file of a tokenizer, as far as it can be told of a token alone.

The file is read as JSON: the package that made it is heavy, and all that is needed is its vocabulary. A token of a byte-level
vocabulary may hold a part of a character, which is shown as the replacement character.
"""

from collections.abc import Callable, Mapping

import msgspec

TokenTexts = Mapping[int, str]
_WORD_START = "\u2581"  # stands for a space in vocabularies of SentencePiece


class _Addition(msgspec.Struct):
    """A token that the vocabulary's model does not make, such as one that ends a turn."""

    id: int
    content: str


class _VocabularyModel(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = msgspec.field(default_factory=dict[str, int])


class _VocabularyFile(msgspec.Struct):
    """What is read of `tokenizer.json`."""

    model: _VocabularyModel
    added_tokens: list[_Addition] = msgspec.field(default_factory=list[_Addition])
    pre_tokenizer: msgspec.Raw = msgspec.Raw(b"null")
    decoder: msgspec.Raw = msgspec.Raw(b"null")


def token_texts(tokenizer_json: bytes) -> TokenTexts | None:
    """The text of each token by its id; None for a file of a form that we do not know."""
    try:
        file = msgspec.json.decode(tokenizer_json, type=_VocabularyFile)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    vocabulary = file.model.vocab
    pairs = (
        [(piece, number) for piece, number in vocabulary.items()]
        if isinstance(vocabulary, dict)
        else [(piece, number) for number, (piece, _) in enumerate(vocabulary)]
    )
    is_byte_level = b"ByteLevel" in bytes(file.pre_tokenizer) + bytes(file.decoder)
    text_of = _byte_level_text() if is_byte_level else _plain_text
    texts = {number: text_of(piece) for piece, number in pairs}
    texts.update({one.id: one.content for one in file.added_tokens})
    return texts


def _plain_text(piece: str) -> str:
    return piece.replace(_WORD_START, " ")


def _byte_level_text() -> Callable[[str], str]:
    """Each character of a piece stands for one byte: printable ones for themselves, the others, in order, for those from 256 on."""
    themselves = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(byte): byte for byte in themselves}
    others = [byte for byte in range(256) if byte not in set(themselves)]
    byte_of |= {chr(256 + place): byte for place, byte in enumerate(others)}

    def text_of(piece: str) -> str:
        if any(character not in byte_of for character in piece):
            return piece
        return bytes(byte_of[character] for character in piece).decode(errors="replace")

    return text_of
