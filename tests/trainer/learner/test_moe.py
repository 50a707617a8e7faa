"""Which layouts divide a mixture of experts."""

from pathlib import Path

from benchmarks.small_models import DELTA_NET, GLM4_MOE, write_model
from tests.trainer.learner.tiny import config
from trainer.learner.architecture import alone_faults, layout_faults
from trainer.learner.config import LoraConfig
from trainer.learner.families.registry import read_architecture


def test_a_layout_must_divide_the_experts(qwen3_moe: Path) -> None:
    architecture = read_architecture(qwen3_moe)
    assert layout_faults(architecture, config(expert_parallel=4)) == []
    (fault,) = layout_faults(architecture, config(expert_parallel=3))
    assert fault.startswith("learner.expert_parallel = 3 does not divide the model's 8 experts")


def test_experts_need_their_positions_divided_under_tensor_parallelism(qwen3_moe: Path) -> None:
    architecture = read_architecture(qwen3_moe)
    (fault,) = layout_faults(architecture, config(tensor_parallel=2))
    assert "set learner.sequence_parallel = true" in fault
    assert layout_faults(architecture, config(tensor_parallel=2, sequence_parallel=True)) == []


def test_a_dense_model_has_no_experts_to_divide(qwen3: Path) -> None:
    (fault,) = layout_faults(read_architecture(qwen3), config(expert_parallel=2))
    assert fault.startswith("learner.expert_parallel = 2: the model has no experts")


def test_the_first_dense_layers_and_the_shared_expert_must_be_divided_too(tmp_path: Path) -> None:
    odd = GLM4_MOE | {"intermediate_size": 129, "moe_intermediate_size": 33, "n_shared_experts": 1}
    architecture = read_architecture(write_model(tmp_path, "glm4_moe", **odd))
    faults = layout_faults(architecture, config(tensor_parallel=2, sequence_parallel=True))
    assert [fault.split(":")[0] for fault in faults] == [
        "learner.tensor_parallel = 2 does not divide the model's 129 columns of the MLP",
        "learner.tensor_parallel = 2 does not divide the model's 33 columns of the shared expert",
    ]


def test_engines_get_no_adapters_of_experts_or_of_gated_attention(
    qwen3: Path, qwen3_moe: Path, tmp_path: Path
) -> None:
    attention = LoraConfig(rank=4, targets=("q_proj", "v_proj", "o_proj"))
    assert list(alone_faults(read_architecture(qwen3), LoraConfig(rank=4))) == []
    assert list(alone_faults(read_architecture(qwen3_moe), attention)) == []
    (fault,) = alone_faults(read_architecture(qwen3_moe), LoraConfig(rank=4))
    assert "take down_proj, gate_proj, up_proj out of learner.lora.targets" in fault
    gated = write_model(tmp_path / "gated", "qwen3_5_text", **DELTA_NET)
    (fault,) = alone_faults(read_architecture(gated), attention)
    assert 'set weights.adapters = "merged"' in fault
