"""The text of tokens, from the file of a tokenizer."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel

from infra.web.rollout_page import token_texts
from tests.infra.web.example_run import Serve, read
from tests.pipeline import samples


def test_pieces_of_a_byte_level_vocabulary_are_told_as_their_package_tells_them() -> None:
    pieces = ["Ġdef", "Ċ", "add", "Ã©", "ĉ", "<|end|>"]
    tokenizer = Tokenizer(WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token="add"))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<|end|>"])
    found = token_texts(tokenizer.to_str().encode())
    assert found == {0: " def", 1: "\n", 2: "add", 3: "é", 4: "\t", 5: "<|end|>"}
    assert all(tokenizer.decode([number]) == found[number] for number in range(5))


def test_a_part_of_a_character_is_replaced() -> None:
    file = {"model": {"vocab": {"Ã": 0}}, "decoder": {"type": "ByteLevel"}}
    assert token_texts(json.dumps(file).encode()) == {0: "\ufffd"}


def test_spaces_of_sentencepiece_are_spaces() -> None:
    file = {"model": {"vocab": [["\u2581the", -1.0], ["n", -2.0]]}}
    assert token_texts(json.dumps(file).encode()) == {0: " the", 1: "n"}


def test_a_file_of_another_form_has_no_texts() -> None:
    assert token_texts(b'{"vocabulary": 1}') is None
    assert token_texts(b"\xff") is None


async def test_without_redis_the_tokenizer_beside_the_weights_of_the_run_is_read(
    serve: Serve, run_dir: Path
) -> None:
    version = run_dir / "weights" / "v000001"
    version.mkdir(parents=True)
    client, address = await serve(run_dir), f"/api/runs/{samples.RUN}/rollouts/solved"
    (turn,) = (await read(client, address))["turns"]
    assert [token["text"] for token in turn["tokens"]] == [None, None, None]
    file = {"model": {"vocab": {"a": 5, "b": 6, "c": 7}}}
    (version / "tokenizer.json").write_text(json.dumps(file))
    (turn,) = (await read(client, address))["turns"]
    assert [token["text"] for token in turn["tokens"]] == ["a", "b", "c"]
