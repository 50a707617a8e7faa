"""`python -m trainer.plan`, as people call it: what fits, what does not, by how much, and what would make it fit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.journal.rows import EpisodeRow
from trainer.plan.__main__ import describe
from trainer.plan.division import num_adapter_parameters
from trainer.plan.planning import DELTA_SHARE, RunPlan, make_plan, misfits, needs
from trainer.plan.remedies import remedies
from trainer.recipe import Recipe, load_recipe
from trainer.records.journal_writer import Journal

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
    assert again.stdout.splitlines()[-1].startswith("everything fits")


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


@pytest.mark.parametrize("transport", ["disk", "delta"])
def test_a_version_of_adapters_alone_is_planned_with_their_size(recipe: Path, transport: str) -> None:
    wishes = ("learner.recompute=full", "learner.lora.rank=16", f"weights.transport={transport}")
    merged, alone = (
        make_plan(of(recipe, *wishes, f"weights.adapters={kind}")) for kind in ("merged", "alone")
    )
    num_parameters = num_adapter_parameters(alone.architecture, alone.recipe.learner.lora)
    assert alone.publication.num_bytes == 2 * num_parameters < merged.publication.num_bytes / 50
    assert alone.publication.load_s < merged.publication.load_s
    assert alone.storage.base_bytes == merged.storage.weights_bytes
    assert alone.storage.disk_bytes < merged.storage.disk_bytes
    assert "and their base of" in describe(alone)


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


def test_linear_attention_keeps_a_state_for_each_request_and_nothing_for_a_token(recipe: Path) -> None:
    engines = plan_of(recipe, "model=Qwen3.5-9B").engines
    assert engines.kv_bytes_per_token == 2 * 8 * 4 * 256 * 2
    assert engines.state_bytes == 24 * (32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)
    free_bytes = engines.usable_bytes - engines.weight_bytes
    context_bytes = 32768 * engines.kv_bytes_per_token + engines.state_bytes
    assert engines.episodes_held(32768) == engines.num_engines * (free_bytes // context_bytes)


def test_layers_with_a_window_have_less_cache_and_read_their_window_alone(recipe: Path) -> None:
    engines = plan_of(recipe, "model=gpt-oss-20b", "learner.sequence_parallel=true").engines
    layer_bytes = 2 * 8 * 64 * 2
    # SGLang's own default: four fifths of the tokens for the half of the layers that has a window of 128.
    assert engines.kv_bytes_per_token == int(layer_bytes * (12 + 0.8 * 12))
    assert engines.read_bytes(32768) == pytest.approx(layer_bytes * 12 * (32768 + 128), abs=32768)
    assert engines.read_bytes(100) == pytest.approx(layer_bytes * 24 * 100, abs=100)


def test_a_model_whose_layers_all_have_a_window_is_held_and_read_whole(recipe: Path, tmp_path: Path) -> None:
    shape = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    rest = {"intermediate_size": 14336, "vocab_size": 32000, "sliding_window": 4096, "max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "rms_norm_eps": 1e-5} | shape | rest))
    engines = plan_of(recipe, f"model={tmp_path}").engines
    assert engines.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    assert engines.read_bytes(32768) == 32768 * engines.kv_bytes_per_token


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


def test_a_delta_is_late_by_all_that_is_read_and_written_for_it(recipe: Path) -> None:
    disk, delta = (
        plan_of(recipe, f"weights.transport={name}", "plan.network_gib_per_s=1000000").publication
        for name in ("disk", "delta")
    )
    read_s = disk.num_bytes / (2 * 2**30)
    # The engines of both read the version once. For a delta the trainer reads three, and a receiver reads one and writes one.
    assert delta.load_s - disk.load_s == pytest.approx((3 + 2 - 1) * read_s, rel=0.01)


def test_the_share_of_a_delta_is_the_one_that_was_measured() -> None:
    (measured,) = re.findall(
        r"^\| 1 \| [\d.]+ MB \| ([\d.]+) % \|$", Path("docs/weights.md").read_text(), re.M
    )
    assert pytest.approx(float(measured) / 100) == DELTA_SHARE


def test_processes_that_broadcast_weights_take_memory_of_the_first_gpu(recipe: Path) -> None:
    without, with_it = plan_of(recipe).rank, plan_of(recipe, "weights.transport=distributed").rank
    embedding_bytes = 151936 * 4096 * 2
    assert with_it.senders == 8 * (2**30 + embedding_bytes)  # for eight engines
    assert with_it.gpu_bytes - without.gpu_bytes == with_it.senders
    plan = plan_of(recipe, "weights.transport=distributed", "plan.gpus=8xA100-40+16xA100-40")
    (need,) = (need for need in misfits(plan) if need.part == "learner GPU")
    assert 'weights.transport = "delta"' in str(remedies(plan, need)[0])


def test_a_learners_speed_is_a_range_until_it_was_measured(recipe: Path) -> None:
    dense, mixture = plan_of(recipe), plan_of(recipe, "model=Qwen3-30B-A3B", "learner.sequence_parallel=true")
    measured = plan_of(recipe, "plan.utilisation=0.3")
    assert dense.step.slow_s == pytest.approx(2 * dense.step.fast_s)
    assert mixture.step.utilisation(mixture.step.fast_s) < dense.step.utilisation(dense.step.slow_s)
    assert dense.step.fast_s < measured.step.fast_s == measured.step.slow_s < dense.step.slow_s
    assert "assumed; plan.utilisation takes what you have measured" in describe(dense)
    assert "plan.utilisation" not in describe(measured)


def test_a_plan_says_what_a_gpu_sends_to_experts_of_others_and_to_other_machines(recipe: Path) -> None:
    changes = ["model=Qwen3-30B-A3B", "learner.sequence_parallel=true"]
    whole, divided = plan_of(recipe, *changes), plan_of(recipe, *changes, "learner.expert_parallel=8")
    assert whole.step.sent_bytes == 0
    assert "to experts of other GPUs" not in describe(whole)
    passes = 2 if divided.recipe.learner.recompute == "none" else 3
    of_layer = 8 * 7 / 8 * passes * (2 * 2048 * 2 + 4)
    assert divided.step.sent_bytes == pytest.approx(divided.step.num_tokens * 48 * of_layer / 8)
    assert divided.step.sent_to_machines_bytes == 0
    assert "to experts of other GPUs" in describe(divided)
    apart = plan_of(recipe, *changes, "learner.expert_parallel=8", "plan.gpus_per_node=2").step
    assert apart.sent_to_machines_bytes == pytest.approx(apart.sent_bytes * 6 / 7)


def test_another_division_of_the_gpus_is_tried_with_each_change(recipe: Path) -> None:
    changes = (
        "learner.recompute=full",
        "learner.sequence_parallel=true",
        "learner.distributed_optimizer=false",
    )
    plan = make_plan(of(recipe, *changes, "plan.gpus=16xA100-40", "plan.learner_gpus=4"))
    (need,) = (need for need in misfits(plan) if need.part == "learner GPU")
    tried = list(map(str, remedies(plan, need)))
    assert any(
        one.startswith("learner.tensor_parallel = 8 with plan.learner_gpus = 8 save") for one in tried
    ), tried
    assert any(
        one.startswith("learner.distributed_optimizer = true with plan.learner_gpus = 8 save")
        for one in tried
    )
    assert all(remedy.fits for remedy in remedies(plan, need))


def test_more_machines_are_tried_where_no_division_of_these_is_enough(recipe: Path) -> None:
    plan = make_plan(of(recipe, "model=Qwen3-32B", "learner.recompute=full", "plan.gpus=16xA100-40"))
    (need,) = (need for need in misfits(plan) if need.part == "learner GPU")
    first, *_ = remedies(plan, need)
    assert first.fits
    assert {"plan.gpus"} < {change.key for change in first.changes}


def test_engines_that_take_turns_are_up_to_date_later(recipe: Path) -> None:
    together, in_turns = plan_of(recipe), plan_of(recipe, "weights.engines_at_once=1")
    assert in_turns.publication.load_s > together.publication.load_s


def test_as_many_episodes_run_at_once_as_end_in_a_second_times_their_seconds(recipe: Path) -> None:
    plan = plan_of(recipe, "plan.episode_s=600", "admission.max_lag_versions=99", "plan.hosts=999x64")
    fleet, demand = plan.fleet, plan.fast.demand
    assert fleet is not None
    assert demand.num_needed == pytest.approx(128 / plan.fast.train_s * 600, abs=1)
    assert fleet.hosts_for(demand.num_needed) == -(-demand.num_needed // 54)
    assert demand.num_possible == min(plan.bounds.values()) < demand.num_needed
    assert plan.fast.step_s == pytest.approx(128 / (demand.num_possible / 600))


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
    assert (plan.length.turns, plan.length.tokens, plan.fast.demand.episode_s) == (11.5, 9000, 300)
    assert "measured over 4 episodes" in plan.length.source
    with pytest.raises(ValueError, match="its journal holds no finished training episode"):
        make_plan(of(recipe), measured=recipe.parent / "nosuch")


PROGRAM = ("rollout.context.policy=stop", "rollout.harness=qwen-code")


def test_the_opening_of_an_agent_program_is_in_each_context_and_nothing_of_it_is_sampled(
    recipe: Path,
) -> None:
    without, plan = plan_of(recipe, "rollout.context.policy=stop"), plan_of(recipe, *PROGRAM)
    opening_tokens = 17_900
    assert plan.length.opening_tokens == opening_tokens
    assert plan.length.tokens == without.length.tokens + opening_tokens / 2
    share = without.length.sampled_tokens / without.length.tokens
    assert plan.length.sampled_tokens == pytest.approx(share * (plan.length.tokens - opening_tokens))
    assert plan.episodes_held < without.episodes_held
    given = plan_of(recipe, *PROGRAM, "plan.episode_tokens=20000")
    assert given.length.tokens == 20_000, "what is given has the opening in it"


def test_the_plan_says_what_an_agent_program_takes_and_where_the_figures_are_from(recipe: Path) -> None:
    (line,) = (line for line in describe(plan_of(recipe, *PROGRAM)).splitlines() if "program: " in line)
    assert (
        "qwen-code 0.15.10: 17,900 tokens before the task, 55% of the context; 830 MiB of the 4.0 GiB" in line
    )
    assert re.search(r"7\.2 s of CPU an episode, [\d.]+( to [\d.]+)? of 256 cores \(measured once: ", line)
    assert "program: " not in describe(plan_of(recipe))


def test_a_program_whose_opening_fills_the_context_is_refused_by_the_plan(recipe: Path) -> None:
    done = command(
        recipe,
        *(word for change in PROGRAM for word in ("--set", change)),
        "--set",
        "rollout.limits.context_tokens=16384",
    )
    assert done.returncode == 2
    assert "rollout.harness: qwen-code begins with 17900 tokens before the task" in done.stderr


SOURCES = (
    'sources=[{name="a", tasks="a.jsonl", share=9, group_size=4, limits={turns=80}}, {name="b", tasks="b.jsonl", share=1, group_size=12, '
    "limits={context_tokens=16384}}]"
)


def test_a_plan_of_several_sources_counts_with_the_largest_groups_contexts_and_turns(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace('train = "tasks.jsonl"', ""))
    plan = plan_of(recipe, SOURCES)
    rollout = plan.recipe.rollout
    assert (rollout.group_size, rollout.limits.context_tokens, rollout.limits.turns) == (12, 32768, 80)
    assert plan.length.turns == 40
    assert plan.fast.episodes_per_step == 16 * 12


def test_a_plan_counts_each_group_with_the_largest_size_that_it_may_have(recipe: Path) -> None:
    plan, fixed = plan_of(recipe, "curriculum.max_group_size=20"), plan_of(recipe)
    assert (plan.fast.episodes_per_step, fixed.fast.episodes_per_step) == (16 * 20, 16 * 8)
    bound = "admission.max_lag_versions"
    assert plan.bounds[bound] == fixed.bounds[bound] * 20 / 8
    assert plan.storage.held_bytes == fixed.storage.held_bytes * 20 / 8


def test_of_the_agent_programs_of_several_sources_the_longest_opening_counts(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace('train = "tasks.jsonl"', ""))
    program = 'harness="qwen-code", context={policy="stop"}'
    plan = plan_of(recipe, SOURCES.replace("group_size=4", program))
    assert plan.program is not None
    assert (plan.program.name, plan.length.opening_tokens) == ("qwen-code", 17_900)
    with pytest.raises(
        ValueError, match=r"^sources\.a, .*: rollout\.context\.policy: 'head_tail' cuts the context"
    ):
        plan_of(recipe, SOURCES.replace("group_size=4", 'harness="qwen-code"'))


IN_FP8 = ("model=Qwen3-8B-FP8", "weights.precision=fp8", "learner.snapshots_kept=6")


def test_versions_in_eight_bits_take_half_of_the_network_and_of_the_engines_memory(recipe: Path) -> None:
    plan, whole = plan_of(recipe, *IN_FP8), plan_of(recipe, "learner.snapshots_kept=6")
    embeddings = 2 * 151_936 * 4096
    layer = 4096 * (32 + 2 * 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12_288
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    num_bytes = 2 * (embeddings + norms) + 36 * (layer + layer // 128**2 * 4)
    assert plan.engines.weight_bytes == plan.storage.weights_bytes == plan.publication.num_bytes == num_bytes
    assert whole.storage.weights_bytes == 2 * (embeddings + norms + 36 * layer)
    assert plan.storage.checkpoint_bytes == whole.storage.checkpoint_bytes
    assert plan.rank == whole.rank
    assert plan.engines.kv_tokens > whole.engines.kv_tokens
    assert "8.19 billion parameters" in describe(plan)
    assert "8.8 GiB in FP8 of" in describe(plan)


def test_gpus_without_eight_bits_and_layouts_that_cut_blocks_are_refused(recipe: Path) -> None:
    with pytest.raises(ValueError, match="A100-80 computes no products in FP8"):
        plan_of(recipe, *IN_FP8, "plan.gpus=8xH100-80+8xA100-80")
    mixture = ("model=Qwen3-30B-A3B-FP8", "learner.sequence_parallel=true")
    assert plan_of(recipe, *IN_FP8, *mixture, "plan.engine_gpus=2").engines.num_engines == 4
    with pytest.raises(
        ValueError, match=r"gate_proj has 192 outputs on each of the 4 GPUs .*lower plan\.engine_gpus"
    ):
        plan_of(recipe, *IN_FP8, *mixture, "plan.engine_gpus=4")
