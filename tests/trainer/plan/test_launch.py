"""The commands that start a planned run: programs, scripts and manifests understand them, and the numbers are the plan's."""

import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from infra.serving import engine, router
from tests.infra.cluster.programs import CLUSTER, run, tool
from trainer.plan.launch import WAYS, launch_text
from trainer.plan.planning import make_plan
from trainer.recipe import load_recipe

RECIPE = Path("trainer/recipes/qwen3_32b_4node.toml")


def lines(way: str, recipe: Path = RECIPE) -> list[str]:
    text = launch_text(make_plan(load_recipe(recipe)), recipe, way)
    return [line for line in text.splitlines() if not line.startswith("#")]


def words_of(program: str, way: str) -> list[list[str]]:
    """The arguments of each line that starts `program`."""
    split = [shlex.split(line.removesuffix(" &")) for line in lines(way)]
    return [words[words.index(program) + 1 :] for words in split if program in words]


def test_torchrun_starts_a_process_for_each_gpu_and_the_programs_understand_their_flags() -> None:
    engines = [engine.parse_arguments(words) for words in words_of("infra.serving.engine", "torchrun")]
    assert [(one.tensor_parallel, one.device) for one in engines] == [(4, "cuda"), (4, "cuda")]
    assert len({one.port for one in engines}) == 2
    assert router.parse_arguments(words_of("infra.serving.router", "torchrun")[0])
    (learner,) = words_of("torchrun", "torchrun")
    assert learner[: learner.index("-m")] == [
        *("--nnodes", "2", "--node-rank", "RANK", "--master-addr", "HOST", "--master-port", "29500"),
        *("--nproc-per-node", "8"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "trainer.run", "--help"], capture_output=True, text=True, check=True
    )
    assert {flag for flag in learner if flag.startswith("--run")} <= set(
        re.findall(r"--[a-z-]+", done.stdout)
    )


def test_engines_keep_off_the_gpus_of_a_learner_on_the_same_machine() -> None:
    text = "\n".join(lines("torchrun", Path("trainer/recipes/qwen3_8b_1node.toml")))
    assert re.findall(r"CUDA_VISIBLE_DEVICES=(\S+)", text) == ["4", "5", "6", "7"]
    assert "torchrun --nproc-per-node 4 " in text


def test_slurm_gets_the_nodes_and_gpus_of_the_plan() -> None:
    _, router_line, engines, workers, trainer = lines("slurm")
    assert all(Path(line.split()[-1]).exists() for line in (router_line, engines, workers))
    assert "--nodes=2 --ntasks-per-node=2 --gpus-per-task=4" in engines
    assert "SWERVE_SLOTS=54" in workers
    assert "--array=1-4" in workers
    assert "--nodes=2 --ntasks-per-node=8 --gpus-per-node=8 infra/cluster/slurm/trainer.sbatch" in trainer


def test_kubernetes_renders_the_overlay_with_the_numbers_of_the_plan(tmp_path: Path) -> None:
    shutil.copytree(CLUSTER / "kubernetes", tmp_path / "infra/cluster/kubernetes")
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    (overlay / "kustomization.yaml").write_text("\n".join(lines("kubernetes")))
    made = run(tool("kubectl"), "kustomize", overlay)
    assert made.returncode == 0, made.stderr
    objects = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(made.stdout)}
    learner, engines = objects["StatefulSet", "trainer"]["spec"], objects["StatefulSet", "engine"]["spec"]
    assert (learner["replicas"], engines["replicas"]) == (2, 4)
    assert objects["Deployment", "worker"]["spec"]["replicas"] == 14  # 216 slots, 16 in each pod
    (container,) = learner["template"]["spec"]["containers"]
    environment = {one["name"]: one.get("value") for one in container["env"]}
    assert (environment["NODES"], environment["GPUS"]) == ("2", "8")
    assert environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "SWERVE_REDIS_URL" in environment
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    (container,) = engines["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert container["command"][-2:] == ["--tensor-parallel", "$(SWERVE_ENGINE_GPUS)"]
    assert container["args"] == ["--", "--mem-fraction-static", "0.85"]
    (settings,) = (one["data"] for (kind, name), one in objects.items() if name.startswith("swerve-"))
    assert settings["SWERVE_ENGINE_GPUS"] == "4"


def test_skypilot_gets_only_variables_that_its_files_know() -> None:
    for line in (line for line in lines("skypilot") if line.startswith("sky")):
        words = shlex.split(line)
        task = yaml.safe_load(Path(words[-1]).read_text())
        given = {word.partition("=")[0] for flag, word in pairwise(words) if flag == "--env"}
        assert given <= task["envs"].keys()
    assert "--num-nodes 4 --gpus H100:8" in lines("skypilot")[1]


@pytest.mark.parametrize("way", WAYS)
def test_engines_report_their_routing_where_the_recipe_replays_it(way: str) -> None:
    replayed = "\n".join(lines(way, Path("trainer/recipes/qwen3_30b_a3b_2node.toml")))
    assert "--enable-return-routed-experts" in replayed
    assert "--enable-return-routed-experts" not in "\n".join(lines(way))


def test_engines_in_eight_bits_keep_their_weights_as_they_are_published_on_blackwell_too() -> None:
    packed = ("weights.precision=fp8", "learner.snapshots_kept=9", "model=Qwen3-32B-FP8")
    for gpus, flags in {
        "32xB200-180": "--fp8-gemm-backend triton --moe-runner-backend triton",
        "32xH100-80": "",
    }.items():
        plan = make_plan(load_recipe(RECIPE, [*packed, f"plan.gpus={gpus}"]))
        engine_line = next(
            one for one in launch_text(plan, RECIPE, "torchrun").splitlines() if "serving.engine" in one
        )
        assert engine_line.endswith(f"--mem-fraction-static 0.85{flags and f' {flags}'} &")


def test_an_engine_hands_on_the_flags_behind_its_own_also_where_there_are_none() -> None:
    own = ["--model", "m", "--"]
    passed_on = ["--mem-fraction-static", "0.85", "--enable-return-routed-experts"]
    assert engine.engine_command(engine.parse_arguments([*own, *passed_on]))[-3:] == passed_on
    assert "--" not in engine.engine_command(engine.parse_arguments(own))


@pytest.mark.parametrize("way", ["torchrun", "slurm", "skypilot"])
def test_what_is_printed_says_where_redis_is_to_every_program_that_needs_it(way: str) -> None:
    needs_redis = (
        "workers.run",
        "trainer.run",
        "worker.sbatch",
        "trainer.sbatch",
        "gpus.yaml",
        "workers.yaml",
    )
    exported = False
    for line in lines(way):
        exported = exported or line.startswith("export SWERVE_REDIS_URL=redis://HOST:6379/0")
        if any(program in line for program in needs_redis):
            assert exported or line.startswith("SWERVE_REDIS_URL=redis://HOST:6379/0 "), line
            assert way != "skypilot" or "--env SWERVE_REDIS_URL" in line


@pytest.mark.parametrize(
    "path",
    [
        "infra/cluster/slurm/trainer.sbatch",
        "infra/cluster/kubernetes/trainer.yaml",
        "infra/cluster/skypilot/gpus.sh",
        "infra/docker/trainer.Dockerfile",
    ],
)
def test_every_launcher_lets_the_allocator_grow_its_segments(path: str) -> None:
    assert re.search(r"PYTORCH_CUDA_ALLOC_CONF\b.*expandable_segments:True", Path(path).read_text())


def test_a_learner_that_torchrun_starts_lets_the_allocator_grow_its_segments() -> None:
    (line,) = (line for line in lines("torchrun") if "trainer.run" in line)
    assert " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun " in line


@pytest.mark.parametrize("way", WAYS)
def test_engines_are_started_to_take_adapters_if_versions_are_adapters_alone(way: str) -> None:
    adapted = ["learner.lora={rank=16, targets=['q_proj', 'v_proj']}"]
    words = re.sub(r'[",\s\\]+', " ", launched(way, [*adapted, "weights.adapters=alone"]))
    assert "--enable-lora --max-lora-rank 16 --lora-target-modules q_proj v_proj" in words
    assert "--enable-lora" not in launched(way, adapted)


def launched(way: str, overrides: list[str]) -> str:
    return launch_text(make_plan(load_recipe(RECIPE, overrides)), RECIPE, way)


def test_a_way_is_printed_by_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.plan", RECIPE, "--launch", "slurm"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "infra/cluster/slurm/trainer.sbatch" in done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_what_does_not_fit_is_not_launched(way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.plan", RECIPE, "--set", "learner.recompute=none", "--launch", way],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "a GPU of the learner needs" in done.stderr
