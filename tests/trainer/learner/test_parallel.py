"""Two processes against one: every layout must lead to the weights that one process would have reached."""

from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest

from benchmarks.small_models import EXPERTS, MINISTRAL3, write_model
from tests.trainer.forking import run_ranks
from tests.trainer.learner.ranks import (
    DISPATCHED_TOKENS,
    FED,
    REPORTED_LAYOUTS,
    WITH_EXPERTS,
    Case,
    Reported,
    Seen,
    gradient_case,
    head_gradients,
    token_logprobs,
)
from tests.trainer.learner.tiny import (
    config,
    largest_difference,
    make_samples,
    of_two_versions,
    read_export,
    train,
)
from trainer.learner.config import LagMetrics, LearnerConfig, LossConfig, StepMetrics
from trainer.learner.families.registry import read_architecture
from trainer.learner.megatron import Learner
from trainer.plan.planning import dispatched_bytes

pytestmark = pytest.mark.cpu_only

LAYOUTS = {
    "data": {},
    "data, few samples a pass": {"micro_batch_tokens": 300},
    "data, distributed optimizer": {"distributed_optimizer": True},
    "tensor": {"tensor_parallel": 2},
    "tensor, distributed optimizer": {"tensor_parallel": 2, "distributed_optimizer": True},
    "tensor, odd vocabulary": {"tensor_parallel": 2},
    "tensor, sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "context": {"context_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "pipeline, tied": {"pipeline_parallel": 2},
    "pipeline, tied, MLPs only": {"pipeline_parallel": 2, "train_only": (".mlp.",)},
    "pipeline, minibatches, reference": {
        "pipeline_parallel": 2,
        "num_minibatches": 2,
        "loss": LossConfig(reference_kl=0.1),
    },
    "data, each trajectory alike": {"loss": LossConfig(kind="cispo", aggregation="trajectory", entropy=0.05)},
    "tensor, sequence, entropy": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "loss": LossConfig(kind="reinforce", entropy=0.5),
    },
    "context, minibatches, proximal": {
        "context_parallel": 2,
        "num_minibatches": 2,
        "loss": LossConfig(kind="decoupled_ppo", aggregation="constant", constant_tokens=16, entropy=0.05),
    },
    "data, experts replayed": {"routing_replay": True},
    "pipeline, experts replayed": {"pipeline_parallel": 2, "routing_replay": True},
    "pipeline, unrotated layers": {"pipeline_parallel": 2},
    "context, scaled queries": {"context_parallel": 2},
    "data, resumed": {},
    "tensor, resumed": {"tensor_parallel": 2},
    "tensor, distributed optimizer, resumed": {"tensor_parallel": 2, "distributed_optimizer": True},
    "data, distributed optimizer, resumed": {"distributed_optimizer": True},
    "pipeline, resumed": {"pipeline_parallel": 2},
}


def single(options: LearnerConfig) -> LearnerConfig:
    return msgspec.structs.replace(
        options, tensor_parallel=1, sequence_parallel=False, context_parallel=1, pipeline_parallel=1
    )


@pytest.fixture(scope="module")
def models(
    qwen3: Path, qwen3_moe: Path, tied_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    odd = write_model(tmp_path_factory.mktemp("odd"), "qwen2", vocab_size=63)
    smollm3 = write_model(
        tmp_path_factory.mktemp("smollm3"),
        "smollm3",
        num_hidden_layers=4,
        no_rope_layers=[1, 1, 0, 1],
        pad_token_id=None,
    )
    ministral3 = write_model(tmp_path_factory.mktemp("ministral3"), "ministral3", **MINISTRAL3)
    special = {
        "tied": tied_llama,
        "odd": odd,
        "experts": qwen3_moe,
        "unrotated": smollm3,
        "scaled queries": ministral3,
    }
    return {name: next((model for word, model in special.items() if word in name), qwen3) for name in LAYOUTS}


@pytest.fixture(scope="module")
def checkpoints(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Written by one process after three steps, with the plain and with the distributed optimizer."""
    written = {}
    for distributed_optimizer in (False, True):
        learner = Learner(config(distributed_optimizer=distributed_optimizer), model_directory=qwen3)
        train(learner, 3)
        written[distributed_optimizer] = tmp_path_factory.mktemp("checkpoint") / "step-3"
        learner.save(written[distributed_optimizer], b"one process")
    return written


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest,
    models: dict[str, Path],
    checkpoints: dict[bool, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """What two processes left behind, of the layouts that tests of this run ask for."""
    results = tmp_path_factory.mktemp("two")
    cases = []
    asked_for = {
        item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")
    }
    # The first is also the one in which rank 0 leads.
    for name, changes in LAYOUTS.items():
        if name != "data" and name not in asked_for:
            continue
        options = config(**changes)
        resume_from = str(checkpoints[options.distributed_optimizer]) if "resumed" in name else None
        cases.append(
            Case(
                name=name,
                config=options,
                model_directory=str(models[name]),
                resume_from=resume_from,
                vocab_size=63 if "odd" in name else 64,
            )
        )
    (results / "plan.json").write_bytes(msgspec.json.encode(cases))
    run_ranks(2, "tests.trainer.learner.ranks", str(results / "plan.json"), str(results), logs=results)
    return results


# Quick: a layout of two processes learns what one process does.
@pytest.mark.slow_but_for("data, distributed optimizer")
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_learn_what_one_would(
    name: str, models: dict[str, Path], checkpoints: dict[bool, Path], results: Path, tmp_path: Path
) -> None:
    options, vocab_size = single(config(**LAYOUTS[name])), 63 if "odd" in name else 64
    learner = Learner(options, model_directory=models[name], keep_tokens=True)
    if "resumed" in name:
        learner.restore(checkpoints[options.distributed_optimizer])
    logprobs = learner.logprobs(make_samples(vocab_size=vocab_size), 0.8)
    losses = train(learner, 4, vocab_size=vocab_size)
    learner.export(tmp_path / "one")

    seen = msgspec.json.decode((results / f"{name}.json").read_bytes(), type=Seen)
    for expected, observed in zip(logprobs, seen.logprobs, strict=True):
        np.testing.assert_allclose(observed, expected, atol=2e-5)
    np.testing.assert_allclose(seen.losses, losses, rtol=1e-4)
    assert set(seen.adam_steps) == set(learner.adam_steps())
    of_one = token_logprobs(learner)
    assert seen.token_logprobs.keys() == of_one.keys()
    for request_id, values in seen.token_logprobs.items():
        np.testing.assert_allclose(values, of_one[request_id], atol=2e-4)
    one, two, start = (
        read_export(directory) for directory in (tmp_path / "one", results / name, models[name])
    )
    assert largest_difference(one, start) > 5e-3
    assert largest_difference(one, two) < 2e-5


@pytest.mark.slow_but_for("data, distributed optimizer")
@pytest.mark.parametrize("name", ["tensor", "data, distributed optimizer", "pipeline"])
def test_what_two_processes_saved_one_can_go_on_from(
    name: str, models: dict[str, Path], results: Path, tmp_path: Path
) -> None:
    learner = Learner(single(config(**LAYOUTS[name])), model_directory=models[name])
    assert learner.restore(results / f"{name}-checkpoint") == b"two processes"
    assert set(learner.adam_steps()) == {4.0}
    learner.export(tmp_path / "resumed")
    restored, exported = read_export(tmp_path / "resumed"), read_export(results / name)
    assert largest_difference(restored, exported) == 0
    uninterrupted = Learner(single(config(**LAYOUTS[name])), model_directory=models[name])
    expected = train(uninterrupted, 7)[4:]
    np.testing.assert_allclose(train(learner, 3), expected, rtol=1e-4)


@pytest.fixture(scope="module")
def reported(results: Path) -> list[Reported]:
    """By each rank."""
    return [
        msgspec.json.decode((results / f"reported-{rank}.json").read_bytes(), type=Reported)
        for rank in range(2)
    ]


@pytest.mark.parametrize("name", REPORTED_LAYOUTS)
def test_each_of_two_processes_reports_the_step_that_one_would(
    name: str, models: dict[str, Path], reported: list[Reported]
) -> None:
    """Also what is told apart by lag, which steers how stale rollouts may be, and the largest ratio, which is no sum."""
    alone = Learner(config(), model_directory=models[name]).step(of_two_versions())
    assert isinstance(alone, StepMetrics)
    assert [one.lag for one in alone.by_lag] == [0, 2]
    numbers = (
        "loss",
        "grad_norm",
        "entropy",
        "ratio_mean",
        "ratio_max",
    )
    for rank in reported:
        for field in numbers:
            assert getattr(rank.steps[name], field) == pytest.approx(getattr(alone, field), rel=1e-4), field
        assert flat(rank.steps[name]) == pytest.approx(flat(alone), rel=1e-4)
        for ours, expected in zip(rank.steps[name].by_lag, alone.by_lag, strict=True):
            assert flat(ours) == pytest.approx(flat(expected), rel=1e-4)


def flat(metrics: StepMetrics | LagMetrics) -> dict[str, float]:
    """The shares, plain and by signal."""
    assert metrics.signal is not None
    named = {f"signal_{name}": value for name, value in msgspec.structs.asdict(metrics.signal).items()}
    plain = ("ess_share", "masked_share", "vetoed_share", "behaviour_kl")
    return named | {name: getattr(metrics, name) for name in plain}


@pytest.mark.parametrize("name", REPORTED_LAYOUTS)
def test_what_is_not_finite_on_one_rank_is_skipped_by_both(
    name: str, models: dict[str, Path], reported: list[Reported]
) -> None:
    """If a rank decided for itself, one would step while the other does not."""
    expected = train(Learner(config(), model_directory=models[name]), 1)
    for rank in reported:
        assert rank.broken[name] == ["loss", "gradient"][: len(rank.broken[name])]
        np.testing.assert_allclose(rank.next_steps[name], expected, rtol=1e-4)
    assert len(reported[0].broken["pipeline"]) == 2


def test_the_first_rank_receives_the_adapters_that_it_lacks_one_by_one(results: Path) -> None:
    """It holds the first layer's. Half precision is sent as it is."""
    received, sizes = msgspec.json.decode((results / "gathered.json").read_bytes())
    assert sorted(received) == sorted(size for name, size in sizes.items() if ".layers.1." in name)
    assert len(received) == 2 * 7
    assert sum(sizes.values()) == 2 * sum(received)


@pytest.mark.parametrize("vocab_size", [37, 19])
def test_the_gradients_of_a_split_head_are_those_of_the_whole_one(vocab_size: int, results: Path) -> None:
    data = gradient_case()
    whole = head_gradients(data | {"targets": data["targets"] % vocab_size}, vocab_size)
    shards = [np.load(results / f"gradient-{vocab_size}-{rank}.npz") for rank in range(2)]
    joined = np.concatenate([shard["weight"] for shard in shards])
    np.testing.assert_allclose(joined, whole["weight"], atol=1e-5)
    np.testing.assert_allclose(sum(shard["hidden"] for shard in shards), whole["hidden"], atol=1e-5)
    for shard in shards:
        np.testing.assert_allclose(shard["logprobs"], whole["logprobs"], atol=1e-5)
        np.testing.assert_allclose(shard["entropies"], whole["entropies"], atol=1e-5)


@pytest.mark.parametrize("name", FED)
def test_rank_0_leads_and_the_other_follows(name: str, results: Path, models: dict[str, Path]) -> None:
    seen = msgspec.json.decode((results / f"fed, {name}.json").read_bytes())
    expected = train(Learner(single(config(**LAYOUTS[name])), model_directory=models[name]), 3)
    np.testing.assert_allclose(seen["losses"], expected, rtol=1e-4)
    assert (seen["extra"], seen["steps"], seen["remembered"]) == ("cursor", 2, True)
    assert [(one["rank"], one["busy"]) for one in seen["gpu_use"]] == [(0, {"waiting": 0.25}), (1, {"waiting": 0.5})]
    assert read_export(results / f"fed, {name}").keys() == read_export(models[name]).keys()


def test_a_rank_is_sent_the_experts_of_its_own_positions_and_layers_a_byte_for_each(results: Path) -> None:
    """Five times: three steps, and log-probs under two versions."""
    received = {
        name: msgspec.json.decode((results / f"fed, {name}-received.json").read_bytes()) for name in FED
    }
    num_positions = sum(sample.num_tokens - 1 for sample in make_samples())
    whole = 5 * num_positions * 2 * EXPERTS["num_experts_per_tok"]
    assert received["data"] == 0
    assert received["pipeline, experts replayed"] == whole / 2
    assert 0.3 * whole < received["data, experts replayed"] < 0.7 * whole


@pytest.mark.parametrize("name", [WITH_EXPERTS])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_way_to_experts_of_another_process_is_as_many_bytes_as_a_plan_says(
    name: str, recompute: Literal["none", "selective", "full"], results: Path, models: dict[str, Path]
) -> None:
    """A plan counts what goes to the other process, half of all if the experts are chosen equally often. Each process besides tells the
    other, as integers of 8 bytes, how many rows it sends to each of its experts.
    """
    architecture = read_architecture(models[name])
    assert architecture.experts is not None
    counted = [msgspec.json.decode((results / f"dispatched-{rank}.json").read_bytes()) for rank in range(2)]
    num_passes = 1 if recompute == "none" else 2
    numbers = 2 * num_passes * architecture.num_layers * architecture.experts.count * 8
    num_positions = sum(length - 1 for length in DISPATCHED_TOKENS)
    planned = dispatched_bytes(architecture, config(expert_parallel=2, recompute=recompute))
    assert sum(one[recompute] for one in counted) == 2 * num_positions * planned + numbers
