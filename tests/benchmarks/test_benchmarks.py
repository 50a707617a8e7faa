"""Every benchmark runs through in its short mode and says what it is meant to say; no test asks how fast anything is."""

import asyncio
import json
import os
import sys
from typing import Any

import pytest

from benchmarks.report import Comparison, compared, p50, p95

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]  # a busy machine makes them longer, not wrong

KEYS = ["name", "ours", "rival", "rival_name", "unit", "ratio"]


async def said(name: str) -> list[dict[str, Any]]:
    """The lines of `python -m benchmarks.NAME --short --json`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"benchmarks.{name}", "--short", "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()
    lines = [json.loads(line) for line in out.splitlines()]
    assert lines
    for line in lines:
        assert list(line) == KEYS
        assert line["name"] == name
        assert min(line["ours"], line["rival"]) >= 0
    return lines


def rivals(lines: list[dict[str, Any]]) -> set[str]:
    return {line["rival_name"] for line in lines}


@pytest.mark.docker
async def test_steps_are_measured_against_all_four_and_leave_nobody_behind(task_image: str) -> None:
    lines = await said("steps")
    assert rivals(lines) == {
        "mini-swe-agent 2.4.6",
        "docker exec",
        "Docker API exec",
        "host bash -c",
    }
    (survivors,) = (line for line in lines if "survive" in line["unit"])
    assert survivors["ours"] == 0


@pytest.mark.docker
async def test_containers_are_measured_against_the_engine_with_the_same_options(task_image: str) -> None:
    assert rivals(await said("containers")) == {"Docker API, same options"}


@pytest.mark.docker
async def test_both_sides_of_the_episodes_solve_the_bug(task_image: str) -> None:
    assert rivals(await said("episodes")) == {"mini-swe-agent 2.4.6", "ours without controls"}


async def test_claims_are_measured_against_arq() -> None:
    lines = await said("claims")
    assert all(rival.startswith("arq's defaults") for rival in rivals(lines))
    assert sum("share of time busy" in line["unit"] for line in lines) == 3


async def test_a_simulated_fleet_is_compared_with_a_small_one() -> None:
    assert rivals(await said("scaling")) == {"10 workers, 10 episodes", "10 workers, 200 episodes"}


async def test_waiting_is_compared_with_that_of_a_synchronous_loop() -> None:
    lines = await said("overlap")
    assert all(0 <= line["ours"] <= 1 for line in lines if "share" in line["unit"])


def test_a_ratio_is_of_all_rounds_and_each_round_has_its_own() -> None:
    one = compared("x", [[2.0, 4.0], [8.0]], [[1.0], [2.0]], p50, rival_name="r", unit="ms", scale=10)
    assert (one.ours, one.rival, one.ratio) == (40.0, 15.0, 40 / 15)
    assert one.rounds == (3.0, 4.0)


def test_against_nothing_there_is_no_ratio() -> None:
    assert Comparison(name="x", ours=1.0, rival=0.0, rival_name="r", unit="u").ratio is None


def test_the_95th_percentile_is_one_of_the_samples() -> None:
    assert p95([float(number) for number in range(100, 0, -1)]) == 95.0
    assert p95([1.0]) == 1.0


async def test_hold_reads_every_kind_of_hostile_input() -> None:
    lines = await said("hold")
    assert rivals(lines) == {"100 ms"}
    assert len({line["unit"] for line in lines}) == len(lines) > 5


@pytest.mark.docker
async def test_the_relay_is_measured_against_a_server_in_the_same_container(task_image: str) -> None:
    lines = await said("relay")
    assert rivals(lines) == {"same container", "2 ms", "5 ms", "2 MB", "100 ms"}
    (memory,) = (line for line in lines if line["rival_name"] == "2 MB")
    assert memory["ours"] < 2, "each connection's buffer in process 1 is bounded"


async def test_all_three_learners_take_the_same_steps() -> None:
    lines = await said("learner")
    assert rivals(lines) == {"bare Megatron", "transformers", "the whole step"}
    assert {line["unit"].split(" of ")[0] for line in lines} == {"tokens a second", "MiB", "%"}


async def test_both_forms_of_experts_do_the_same_work() -> None:
    assert rivals(await said("experts")) == {"a product for each expert"}


async def test_keeping_tokens_is_compared_with_the_step() -> None:
    assert rivals(await said("kept_tokens")) == {"nothing kept", "the step", "unpacked"}


async def test_pages_of_the_table_are_those_that_sqlite_selects() -> None:
    assert rivals(await said("web_table")) == {"200 ms", "SQLite"}


async def test_pages_are_measured_in_a_browser() -> None:
    assert rivals(await said("web_pages")) == {"1 CPU s", "0.1 CPU s"}


async def test_the_device_is_measured_by_operations_and_by_the_bytes_of_an_export() -> None:
    assert rivals(await said("device")) >= {"no known peak", "one file written"}


async def test_a_version_of_adapters_alone_is_measured_against_merged_weights() -> None:
    lines = await said("adapters")
    assert rivals(lines) == {"merged"}
    num_bytes = [line["ratio"] for line in lines if line["unit"].startswith("bytes")]
    assert len(num_bytes) == 2
    assert num_bytes[0] < 0.5, "the matrices of this small model are not much wider than its adapters"


async def test_a_version_is_measured_against_the_whole_of_it_and_a_copy() -> None:
    lines = await said("weight_patches")
    assert rivals(lines) == {"whole version", "copy"}
    num_bytes = [line["ratio"] for line in lines if line["unit"].startswith("bytes")]
    assert len(num_bytes) == 3
    assert max(num_bytes) < 0.2, "a step at a small learning rate changes a few values"


async def test_the_begin_of_a_checkpoint_is_measured_against_a_copy_and_against_all_of_it() -> None:
    assert rivals(await said("checkpoints")) == {"the same tensors copied", "the whole checkpoint"}


async def test_tracing_is_measured_for_trainer_and_worker_wherever_spans_go() -> None:
    lines = await said("tracing")
    assert len(lines) == 6
    assert rivals(lines) == {"the step's time", "the rollout's time"}
    cost = {line["unit"]: line["ours"] for line in lines if "trainer" in line["unit"]}
    nowhere, file, endpoint = cost.values()
    assert nowhere < min(file, endpoint), "without a destination no row becomes a span"


async def test_comparisons_of_recipes_are_measured_against_an_unpaired_test_and_goals() -> None:
    assert rivals(await said("compare")) == {"unpaired", "the goal"}
