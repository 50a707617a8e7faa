"""`python -m trainer.plan`, as people call it: what fits, what does not, by how much, and what would make it fit."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.plan.planning import RunPlan, make_plan, misfits, needs
from trainer.plan.remedies import remedies
from trainer.recipe import Recipe, load_recipe
from trainer.records.journal import EpisodeRow, Journal

RECIPE = """
name = "r"
model = "Qwen3-8B"
num_steps = 100
[tasks]
train = "tasks.jsonl"
[rollout]
group_size = 8
agent = "agent.yaml"
[batch]
groups_per_step = 16
[learner]
lr = 1e-6
micro_batch_tokens = 32768
tensor_parallel = 4
distributed_optimizer = true
[plan]
gpus = "16xH100-80"
hosts = "4x64"
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def command(recipe: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer.plan", recipe, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def of(recipe: Path, *changes: str) -> Recipe:
    return load_recipe(recipe, changes)


def test_what_does_not_fit_is_an_error_that_says_by_how_much_and_what_would_make_it_fit(recipe: Path) -> None:
    done = command(recipe)
    assert done.returncode == 2
    assert "everything fits" not in done.stdout
    assert len(done.stderr.splitlines()) == 1
    found = re.search(
        r"error: a GPU of the learner needs ([\d.]+) GiB and has ([\d.]+) GiB: ([\d.]+) GiB too much. "
        r'Tried: .*learner.recompute = "full" saves ([\d.]+) GiB and fits',
        done.stderr,
    )
    assert found, done.stderr
    needed, usable, excess, saved = map(float, found.groups())
    assert needed - usable == pytest.approx(excess, abs=0.11)
    assert saved > excess
    again = command(recipe, "--set", "learner.recompute=full")
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.endswith("everything fits\n")


def test_the_plan_needs_neither_torch_nor_weights_nor_tasks(recipe: Path) -> None:
    program = (
        "import sys; from trainer.plan.__main__ import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'numpy', 'megatron', 'transformers'} & sys.modules.keys(); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, recipe, "--set", "learner.recompute=full"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_without_gpus_is_refused(recipe: Path) -> None:
    done = command(recipe, "--set", "plan.gpus=")
    assert done.returncode == 2
    assert "--gpus is missing: say which, as in --gpus 16xH100-80" in done.stderr


def test_the_command_line_wins_over_the_recipe(recipe: Path) -> None:
    done = command(recipe, "--gpus", "8xH200-141+4xL40S-48", "--hosts", "2x32x512")
    assert "learner: 8xH200-141: tensor 4 x pipeline 1 x context 1 x data 2" in done.stdout
    assert "engines: 4 of 1 x L40S-48" in done.stdout
    assert "2 hosts x 32 slots = 64" in done.stdout


def test_changes_are_combined_where_none_alone_is_enough(recipe: Path) -> None:
    plan = make_plan(of(recipe, "plan.gpus=8xA100-40+8xA100-40", "learner.distributed_optimizer=false"))
    (need, *_) = misfits(plan)
    tried = remedies(plan, need)
    assert need.part == "learner GPU"
    assert len(tried[0].changes) > 1
    assert tried[0].fits
    assert not any(remedy.fits for remedy in tried[1:])
    assert tried[0].saved_bytes >= need.excess_bytes


def test_a_remedy_saves_what_the_plan_with_it_needs_less(recipe: Path) -> None:
    plan = make_plan(of(recipe))
    need = needs(plan)["learner GPU"]
    (full,) = (one for one in remedies(plan, need) if one.changes[0].value == "full")
    with_it = make_plan(full.changes[0].apply(plan.recipe))
    assert need.needed_bytes - needs(with_it)["learner GPU"].needed_bytes == full.saved_bytes


@pytest.mark.parametrize(
    ("changes", "part", "remedy"),
    [
        (("model=Qwen3-32B",), "engine GPU", "plan.engine_gpus"),
        (("admission.max_queue_bytes=1000000",), "Redis", "admission.max_queue_bytes"),
        (("admission.max_held_bytes=1000000",), "trainer memory", "admission.max_held_bytes"),
        (("learner.snapshots_kept=64", "plan.node_memory_gib=128"), "learner host", "learner.snapshots_kept"),
    ],
)
def test_every_part_that_is_too_small_has_a_remedy_that_fits(
    changes: tuple[str, ...], part: str, remedy: str, recipe: Path
) -> None:
    plan = make_plan(of(recipe, *changes))
    (need,) = (need for need in misfits(plan) if need.part == part)
    fitting = [one for one in remedies(plan, need) if one.fits]
    assert remedy in {change.key for one in fitting for change in one.changes}


def test_a_layout_that_does_not_divide_the_model_is_refused(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"learner.tensor_parallel = 3 does not divide"):
        make_plan(of(recipe, "learner.tensor_parallel=3"))
    with pytest.raises(ValueError, match=r"plan.engine_gpus = 3 does not divide"):
        make_plan(of(recipe, "plan.engine_gpus=3"))


def plan_of(recipe: Path, *changes: str) -> RunPlan:
    return make_plan(of(recipe, "learner.recompute=full", *changes))


def test_an_engine_holds_what_its_weights_leave_of_the_memory(recipe: Path) -> None:
    engines = plan_of(recipe).engines
    assert engines.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2
    free_bytes = 0.85 * 81559 * 2**20 - 2 * 8_190_735_360
    assert engines.kv_tokens == int(free_bytes / engines.kv_bytes_per_token)
    assert engines.episodes_held(32768) == 8 * (engines.kv_tokens // 32768)


def test_heads_are_held_twice_where_an_engine_has_more_gpus_than_key_value_heads(recipe: Path) -> None:
    assert plan_of(recipe, "plan.engine_gpus=8").engines.kv_bytes_per_token == 2 * 36 * 128 * 2
    changes = ("model=Qwen3-30B-A3B", "plan.engine_gpus=8", "learner.sequence_parallel=true")
    assert plan_of(recipe, *changes).engines.kv_bytes_per_token == 2 * 48 * 128 * 2


def test_an_offloaded_optimizer_is_on_the_gpu_in_the_update_alone(recipe: Path) -> None:
    without, with_it = plan_of(recipe).rank, plan_of(recipe, "learner.offload_optimizer=true").rank
    assert (with_it.optimizer, with_it.host_optimizer) == (0, without.optimizer)
    assert with_it.update == without.update + without.optimizer
    assert with_it.weights + with_it.gradients + with_it.update <= with_it.gpu_bytes < without.gpu_bytes


def test_a_delta_sends_a_part_of_what_other_transports_send(recipe: Path) -> None:
    sent = {
        transport: plan_of(recipe, f"weights.transport={transport}").publication
        for transport in ("disk", "delta", "distributed")
    }
    assert {published.num_bytes for published in sent.values()} == {2 * 8_190_735_360}
    assert sent["delta"].sent_bytes < 0.1 * sent["disk"].sent_bytes
    assert sent["distributed"].sent_bytes == 8 * sent["disk"].sent_bytes  # eight engines on one machine


def test_engines_that_take_turns_are_up_to_date_later(recipe: Path) -> None:
    together, in_turns = plan_of(recipe), plan_of(recipe, "weights.engines_at_once=1")
    assert in_turns.publication.load_s > together.publication.load_s


def test_as_many_episodes_run_at_once_as_end_in_a_second_times_their_seconds(recipe: Path) -> None:
    plan = plan_of(recipe, "plan.episode_s=600", "admission.max_lag_versions=99", "plan.hosts=999x64")
    per_second = 128 / plan.step.train_s
    assert plan.demand.num_needed == pytest.approx(per_second * 600, abs=1)
    fleet = plan.fleet
    assert fleet is not None
    assert fleet.hosts_for(plan.demand.num_needed) == -(-plan.demand.num_needed // 54)
    assert plan.demand.num_possible == min(plan.bounds.values()) < plan.demand.num_needed
    assert plan.step_s == pytest.approx(128 / (plan.demand.num_possible / 600))


def test_slots_are_what_cores_and_memory_of_a_host_allow(recipe: Path) -> None:
    by_cores, by_memory = plan_of(recipe, "plan.hosts=2x16x512"), plan_of(recipe, "plan.hosts=2x64x100")
    assert by_cores.fleet
    assert by_memory.fleet
    assert by_cores.fleet.slots_per_host == 16
    assert by_memory.fleet.slots_per_host == 21  # 85 % of 100 GiB at 4 GiB a container


def test_redis_holds_what_was_sampled_since_the_checkpoint(recipe: Path) -> None:
    often, seldom = plan_of(recipe, "checkpoint.every_steps=1"), plan_of(recipe, "checkpoint.every_steps=21")
    between = seldom.storage.redis_bytes - often.storage.redis_bytes
    assert between == 20 * 128 * (often.storage.trajectory_bytes + 500)


def test_measured_episodes_take_the_place_of_assumed_ones(recipe: Path) -> None:
    directory = recipe.parent / "run" / "journal"
    with Journal(directory) as journal:
        for number in range(4):
            journal.append(
                EpisodeRow(
                    request_id=f"r{number}",
                    group_id="g",
                    task_id="t",
                    purpose="train",
                    member=number,
                    group_size=4,
                    fate="trained",
                    num_turns=10 + number,
                    num_tokens=9000,
                    sampled_tokens=2000,
                    claimed_at=1000.0,
                    finished_at=1300.0,
                )
            )
    plan = make_plan(of(recipe, "learner.recompute=full"), measured=recipe.parent / "run")
    assert (plan.length.turns, plan.length.tokens, plan.demand.episode_s) == (11.5, 9000, 300)
    assert "measured over 4 episodes" in plan.length.source
    with pytest.raises(ValueError, match="its journal holds no finished training episode"):
        make_plan(of(recipe), measured=recipe.parent / "nosuch")
