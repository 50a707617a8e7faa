"""What a checkpoint takes of a host's memory, in two processes, and what undoing a step takes, against what the plan says."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.small_models import write_model
from tests.trainer.learner.checkpoint_memory_ranks import Layout, Peaks
from tests.trainer.learner.tiny import config, train
from trainer.learner.families.registry import read_architecture
from trainer.learner.megatron import Learner
from trainer.learner.optimizer import Undo
from trainer.plan.division import Division
from trainer.plan.memory import rank_memory

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[3]
SLACK_BYTES = 6 << 20
"""Names, plans and metadata of the tensors, and what Python's allocator takes at a time."""

# glibc gives what is freed back at once. Otherwise free memory within its heap is counted, or filled again without being counted.
RETURNS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}

# Weights of 24 MiB, and six times as much of the optimizer.
SHAPE = {"vocab_size": 16384, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
DIVIDED = {"distributed_optimizer": True}
LAYOUTS = {
    "data, divided": DIVIDED,
    "data": {},
    "tensor, divided": DIVIDED | {"tensor_parallel": 2},
    "fp32, divided": DIVIDED | {"dtype": "fp32"},
    "MLPs only": {"train_only": (".mlp.",)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("large"), "qwen3", head_dim=64, **SHAPE)


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Peaks]]:
    results = tmp_path_factory.mktemp("two")
    layouts = [
        Layout(name=name, config=config(**({"dtype": "bf16"} | changes)), model_directory=str(model))
        for name, changes in LAYOUTS.items()
    ]
    (results / "plan.json").write_bytes(msgspec.json.encode(layouts))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launcher, "-m", "tests.trainer.learner.checkpoint_memory_ranks"]
    finished = subprocess.run(
        [*command, str(results / "plan.json"), str(results)],
        cwd=REPOSITORY,
        env=os.environ | RETURNS_MEMORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-8000:]
    return [
        msgspec.json.decode((results / f"rank-{rank}.json").read_bytes(), type=dict[str, Peaks])
        for rank in range(2)
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_takes_what_the_plan_says_of_each_process(
    name: str, model: Path, ranks: list[dict[str, Peaks]]
) -> None:
    options, architecture = config(**({"dtype": "bf16"} | LAYOUTS[name])), read_architecture(model)
    division = Division.of(options, architecture, 2)
    planned = rank_memory(architecture, options, division, 0).host_checkpoint
    for rank in ranks:
        assert rank[name].first <= planned + SLACK_BYTES
    assert max(rank[name].first for rank in ranks) >= planned - SLACK_BYTES


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_next_checkpoint_takes_no_more(name: str, ranks: list[dict[str, Peaks]]) -> None:
    for rank in ranks:
        assert rank[name].second <= SLACK_BYTES


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_read_one_tensor_at_a_time(
    name: str, model: Path, ranks: list[dict[str, Peaks]]
) -> None:
    largest = 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"]  # the embedding, in fp32
    for rank in ranks:
        assert rank[name].read <= 2 * largest + SLACK_BYTES, "its bytes, and the tensor"


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_takes_back_a_step_of_several_updates_takes_what_the_plan_says(
    qwen3: Path, dtype: str, distributed_optimizer: bool
) -> None:
    options = config(dtype=dtype, distributed_optimizer=distributed_optimizer, num_minibatches=2)
    learner, architecture = Learner(options, model_directory=qwen3), read_architecture(qwen3)
    train(learner, 1)
    undo = Undo(learner._model, learner._optimizer)
    copies = [
        *undo._weights.values(),
        *(tensor for part in undo._parameters for tensor in part),
        *(tensor for part in undo._states for state in part for tensor in state.values() if tensor.dim()),
    ]
    planned = rank_memory(architecture, options, Division.of(options, architecture, 1), 0)
    assert sum(copy.nbytes for copy in copies) == planned.host_undo
    assert planned.host_bytes == planned.host_undo + planned.host_checkpoint
    alone = msgspec.structs.replace(options, num_minibatches=1)
    assert rank_memory(architecture, alone, Division.of(alone, architecture, 1), 0).host_undo == 0
