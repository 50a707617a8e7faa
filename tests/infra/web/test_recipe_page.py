"""What a run was told to do, and its logs."""

import os
from pathlib import Path

import msgspec

from infra.web.recipe_page import PIECE_BYTES
from pipeline.journal.reading import LAUNCHES, Launch
from tests.infra.web.example_run import Serve, read
from tests.pipeline import samples

RUN = f"/api/runs/{samples.RUN}"


async def test_the_commands_that_started_a_run_are_told_with_what_they_changed(
    serve: Serve, run_dir: Path
) -> None:
    first = Launch(at=1000.0, host="a", pid=7, command="python -m trainer.run r.toml", directory="/work")
    second = msgspec.structs.replace(first, at=2000.0, changed=("num_steps: 9 -> 12",), set=("num_steps: 12",))
    lines = [msgspec.json.encode(first), b"{torn", msgspec.json.encode(second)]
    (run_dir / LAUNCHES).write_bytes(b"\n".join(lines))
    shown = await read(await serve(run_dir), f"{RUN}/recipe")
    assert [one["at"] for one in shown["launches"]] == [1000.0, 2000.0]
    assert shown["launches"][1]["changed"] == ["num_steps: 9 -> 12"]
    assert shown["text"] == "num_steps = 9\n"
    assert shown["keys"] == {"num_steps": "9"}


async def test_two_recipes_are_compared_by_their_keys(serve: Serve, run_dir: Path) -> None:
    other = run_dir.parent / "other"
    other.mkdir()
    (other / "run.json").write_text('{"run_id": "other"}')
    (other / "recipe.toml").write_text("num_steps = 12\n[learner]\nlr = 1e-6\n")
    client = await serve(run_dir.parent)
    shown = await read(client, f"{RUN}/recipe", **{"with": "other"})
    assert shown["differences"] == [
        {"key": "learner.lr", "here": None, "there": "1e-06"},
        {"key": "num_steps", "here": "9", "there": "12"},
    ]
    (other / "recipe.toml").write_text("no TOML")
    assert len((await read(client, f"{RUN}/recipe", **{"with": "other"}))["differences"]) == 1
    async with client.get(f"{RUN}/recipe", params={"with": "nobody"}) as response:
        assert response.status == 404


async def test_a_log_is_read_from_its_end_in_pieces(serve: Serve, run_dir: Path) -> None:
    (run_dir / "logs").mkdir()
    written = "".join(f"line {number}\n" for number in range(20_000))
    (run_dir / "logs" / "engine.log").write_text(written)
    client = await serve(run_dir)
    (log,) = (await read(client, f"{RUN}/recipe"))["logs"]
    assert (log["name"], log["num_bytes"]) == ("engine.log", len(written))
    text, before = "", len(written)
    while before:
        piece = await read(client, f"{RUN}/logs/engine.log", before=before)
        assert len(piece["text"]) <= PIECE_BYTES
        text, before = piece["text"] + text, piece["start"]
    assert text == written
    assert (await read(client, f"{RUN}/logs/engine.log"))["text"].endswith("line 19999\n")


async def test_nothing_but_a_log_of_the_run_is_read(serve: Serve, run_dir: Path) -> None:
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "engine.log").write_text("well")
    (run_dir / "logs" / "link.log").symlink_to(run_dir / "run.json")
    os.mkfifo(run_dir / "logs" / "pipe.log")
    client = await serve(run_dir)
    assert [one["name"] for one in (await read(client, f"{RUN}/recipe"))["logs"]] == ["engine.log"]
    for name in ("link.log", "pipe.log", "..%2Frun.json", "%2Fetc%2Fpasswd", "nothing.log"):
        async with client.get(f"{RUN}/logs/{name}") as response:
            assert response.status == 404, name
            assert "there are: engine.log" in (await response.json())["error"]
