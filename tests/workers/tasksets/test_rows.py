import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from workers.tasksets.rows import read_rows

ROWS: list[dict[str, Any]] = [{"id": "a", "tests": ["x", "y"]}, {"id": "b", "tests": []}]
OTHERS: list[dict[str, Any]] = [{"id": "c", "tests": ["z"]}]


def values(path: Path, split: str | None = None) -> list[dict[str, Any]]:
    return [dict(row.values) for row in read_rows(path, split)]


def write(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def saved(directory: Path, *shards: list[dict[str, Any]]) -> Path:
    """As the `datasets` package saves one to disk."""
    names = [f"data-{number:05}-of-{len(shards):05}.arrow" for number in range(len(shards))]
    write(
        directory / "state.json", {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    )
    write(directory / "dataset_info.json", {"features": {}})
    for name, rows in zip(names, shards, strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(directory / name), table.schema) as stream:
            stream.write_table(table)
    return directory


def test_rows_are_the_same_in_every_form(tmp_path: Path) -> None:
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    served = {"features": [], "rows": [{"row_idx": 7, "row": row} for row in ROWS], "num_rows_total": 2}
    for path in (
        write(tmp_path / "a.jsonl", lines),
        write(tmp_path / "a.json", ROWS),
        write(tmp_path / "one-split.json", {"test": ROWS}),
        write(tmp_path / "served.json", served),
        parquet(tmp_path / "a.parquet", ROWS),
        saved(tmp_path / "saved", ROWS),
        saved(tmp_path / "shards", ROWS[:1], ROWS[1:]),
        next(saved(tmp_path / "arrow", ROWS).glob("*.arrow")),
    ):
        assert values(path) == ROWS, path


def test_a_split_is_a_key_a_file_a_directory_or_a_column(tmp_path: Path) -> None:
    parquet(tmp_path / "hub/data/train-00000-of-00002.parquet", ROWS[:1])
    parquet(tmp_path / "hub/data/train-00001-of-00002.parquet", ROWS[1:])
    parquet(tmp_path / "hub/data/test-00000-of-00001.parquet", OTHERS)
    parquet(tmp_path / "flat/train.parquet", ROWS)
    parquet(tmp_path / "flat/test.parquet", OTHERS)
    write(tmp_path / "dictionary/dataset_dict.json", {"splits": ["train", "test"]})
    saved(tmp_path / "dictionary/train", ROWS)
    saved(tmp_path / "dictionary/test", OTHERS)
    write(tmp_path / "keys.json", {"train": ROWS, "test": OTHERS})
    for name in ("hub", "hub/data", "flat", "dictionary", "keys.json"):
        assert values(tmp_path / name, "train") == ROWS, name
        assert values(tmp_path / name, "test") == OTHERS, name
        with pytest.raises(ValueError, match=r"--split is missing: choose one of .*train"):
            read_rows(tmp_path / name)
        with pytest.raises(ValueError, match="--split dev: choose one of"):
            read_rows(tmp_path / name, "dev")
    column = write(tmp_path / "column.json", [{"split": "train"}, {"split": "test", "n": 1}])
    assert values(column, "test") == [{"split": "test", "n": 1}]
    assert len(values(column)) == 2


def test_a_saved_dataset_is_of_the_split_that_it_was_saved_from(tmp_path: Path) -> None:
    path = saved(tmp_path / "saved", ROWS)
    assert values(path, "train") == values(path) == ROWS
    with pytest.raises(ValueError, match=r"saved: --split test: choose one of train$"):
        read_rows(path, "test")
    told_apart = saved(tmp_path / "told", [{"split": "train", "n": 1}, {"split": "test", "n": 2}])
    assert values(told_apart, "train") == [{"split": "train", "n": 1}]
    with pytest.raises(ValueError, match=r"--split dev: choose one of train, test$"):
        read_rows(told_apart, "dev")


def test_a_byte_order_mark_is_no_part_of_the_rows(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", "\n".join(map(json.dumps, ROWS))), ("a.json", json.dumps(ROWS))):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert values(tmp_path / name) == ROWS
    (tmp_path / "list.jsonl").write_text(json.dumps(ROWS), encoding="utf-8-sig")
    with pytest.raises(ValueError, match=r"call it \.json"):
        read_rows(tmp_path / "list.jsonl")


def test_a_row_is_named_by_file_and_number(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": 2}\n')
    keys = write(tmp_path / "a.json", {"train": ROWS})
    table = parquet(tmp_path / "a.parquet", ROWS)
    assert [row.where for row in read_rows(lines)] == [f"{lines}:1", f"{lines}:3"]
    assert read_rows(keys)[1].where == f"{keys}: train row 2"
    assert read_rows(table)[1].where == f"{table}: row 2"


def test_a_line_that_is_no_object_is_refused_when_it_is_used_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": "x"}\n{"a"\n[1]\n"\xff"\n' + b"[" * 100_000 + b'\n{"a": "y"}')
    first, *broken, last = read_rows(path)
    assert (first.text("a"), last.text("a")) == ("x", "y")
    for number, row in enumerate(broken, 2):
        with pytest.raises(
            ValueError, match=rf"a\.jsonl:{number}: (not JSON|must be a JSON object, is list)"
        ):
            row.optional_text("a")


def test_an_instance_is_read_out_of_what_a_trainer_wraps_it_in(tmp_path: Path) -> None:
    row = ROWS[0]
    wrapped = [
        {"instance": row, "prompt": "x"},
        {"instance": json.dumps(row), "data_source": "x"},
        {"text": "x", "metadata": {"instance": row, "data_source": "x"}},
        {"text": "x", "metadata": {"instance": json.dumps(row)}},
        {"text": "x", "metadata": json.dumps({"instance": row, "data_source": "x"})},
        {"text": "x", "metadata": json.dumps({"data_source": "x", "instance": json.dumps(row)})},
        {"text": "x", "metadata": {"data_source": "x"}, "instance": row},
    ]
    assert values(write(tmp_path / "a.json", wrapped)) == [row] * len(wrapped)
    rows = [{"instance": "{"}, {"metadata": '{"instance": {'}, {"metadata": {"instance": "["}}]
    for row, name in zip(
        read_rows(write(tmp_path / "b.json", rows)), ("instance", "metadata", "instance"), strict=True
    ):
        with pytest.raises(ValueError, match=rf"row \d: {name}: neither JSON"):
            row.text("id")


def test_metadata_that_holds_no_instance_is_a_column_like_any_other(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "metadata": metadata} for metadata in ("for instance: {", "{", "[1]", 5, {"a": 1}, None)
    ]
    assert values(write(tmp_path / "a.json", rows)) == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "a,b\n", r"a\.csv: must end in one of \.jsonl, \.json, \.parquet"),
        ("a.jsonl", "\n", r"a\.jsonl: no rows"),
        ("a.jsonl", '[\n{"a": 1}\n]\n', r"a\.jsonl: a JSON list and not a record a line; call it \.json"),
        ("a.json", "[]", r"a\.json: no rows"),
        ("a.json", '{"a": 1}\n{"a": 2}\n', r"a\.json: not JSON: .*\.jsonl"),
        ("a.json", '{"a": 1}', r"a\.json: must be a list of rows"),
        ("a.parquet", "PAR1", r"a\.parquet: not a \.parquet file"),
        ("a.arrow", "ARROW", r"a\.arrow: not a \.arrow file"),
        ("d/readme.txt", "", r"d: neither a saved dataset nor a folder"),
        ("d/state.json", "{}", r"state\.json: _data_files"),
        ("d/state.json", '{"_data_files": [{"filename": "gone.arrow"}]}', r"gone\.arrow: not a \.arrow file"),
        ("d/dataset_dict.json", "[", r"dataset_dict\.json: not a JSON file"),
        ("d/dataset_dict.json", "[]", r"dataset_dict\.json: must be a JSON object"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        read_rows(path if path.parent == tmp_path else path.parent)


def test_a_file_without_splits_has_none_to_choose(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no splits in it"):
        read_rows(write(tmp_path / "a.jsonl", '{"a": 1}\n'), "train")
    with pytest.raises(ValueError, match="no such file or directory"):
        read_rows(tmp_path / "gone.jsonl")
