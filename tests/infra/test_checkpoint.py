"""Checkpoints that a server would only refuse after minutes: the file and what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from infra.serving import engine
from infra.serving.served_models import INDEX, check_weights

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two shards and their index."""
    (tmp_path / "config.json").write_text("{}")
    save_file(
        {"a": torch.zeros(4, 3), "b": torch.zeros(5, dtype=torch.bfloat16)},
        tmp_path / FIRST,
        {"format": "pt"},
    )
    save_file({"c": torch.zeros((), dtype=torch.int64), "d": torch.zeros(0, 7)}, tmp_path / SECOND)
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}})
    )
    return tmp_path


def test_a_whole_checkpoint_is_let_through(model: Path, tiny_model: Path) -> None:
    check_weights(model)
    check_weights(tiny_model)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def garble_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"dtype"', b'"dty\xffe"', 1))


def retype(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"I64"', b'"I32"', 1))


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (cut, r"cut short: 6 of 8 bytes"),
    (grow, r"longer than it says: 9 of 8 bytes"),
    (garble_header, r"header is damaged"),
    (retype, r"header is damaged .*c of I32 \[\] in 8 bytes"),
    (lambda path: path.write_bytes(b""), r"0 bytes that are not a safetensors file"),
    (lambda path: path.write_bytes(b"<!DOCTYPE html>" * 100), r"1,500 bytes that are not a safetensors file"),
    (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), r"a Git LFS pointer"),
    (lambda path: path.unlink(), rf"names {SECOND}, which is not there"),
    (lambda path: save_file({"c": torch.zeros(1)}, path), rf"looks for d in {SECOND}"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE)
def test_a_damaged_file_is_named_with_what_is_wrong(
    model: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(model / SECOND)
    with pytest.raises(ValueError, match=said) as refusal:
        check_weights(model)
    assert SECOND in str(refusal.value)


def test_an_index_that_is_none_is_named(model: Path) -> None:
    (model / INDEX).write_text("{}")
    with pytest.raises(ValueError, match=rf"{INDEX}: it is not an index of weights"):
        check_weights(model)


def test_the_engine_does_not_start_on_a_damaged_checkpoint(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(model / FIRST)
    with pytest.raises(SystemExit, match="2"):
        engine.main(["--model", str(model)])
    assert f"{FIRST}: it is cut short" in capsys.readouterr().err
