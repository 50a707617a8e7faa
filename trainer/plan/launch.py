"""The commands that start a planned run: learner, engines, router and workers, for each way of launching.

They are printed, never run. Addresses and shared paths depend on the site: the lines contain them in capitals, or read them from the
settings that docs/deploy.md names.
"""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from trainer.plan.planning import RunPlan
from trainer.recipe import Recipe

ENGINE_PORT, ROUTER_PORT = 30001, 30000
# The URL is longer with TLS and a password: docs/deploy.md.
REDIS_URL = "redis://HOST:6379/0"
POD_SLOTS = 16  # slots of a worker's pod, which brings a Docker host of that size
# SkyPilot's names of GPUs, where they are not the name of the chip.
SKYPILOT_NAMES = {"A100-80": "A100-80GB", "H100PCIE-80": "H100", "RTX4090-24": "RTX4090", "H200-141": "H200"}


def launch_text(plan: RunPlan, recipe_path: Path, way: str) -> str:
    """`way` is one of `WAYS`."""
    return "\n".join(WAYS[way](plan, recipe_path))


def _torchrun(plan: RunPlan, recipe_path: Path) -> Iterator[str]:
    model, run_dir = plan.recipe.model, _run_dir(plan)
    yield f"# On {_every(_nodes(plan, plan.gpus.engines.count), 'machine')} with engines, each engine on GPUs of its own:"
    for engine in range(_engines_per_node(plan)):
        first = _first_engine_gpu(plan) + engine * plan.engines.gpus_per_engine
        devices = ",".join(str(first + number) for number in range(plan.engines.gpus_per_engine))
        yield f"CUDA_VISIBLE_DEVICES={devices} {_engine_words(plan, model, ENGINE_PORT + engine)} &"
    yield "# On the machine of the router; of the engines' machines, HOST is each in turn:"
    ports = range(ENGINE_PORT, ENGINE_PORT + _engines_per_node(plan))
    flags = " ".join(f"--engine http://HOST:{port}" for port in ports)
    yield f"python -m infra.serving.router --host 0.0.0.0 --port {ROUTER_PORT} {flags} &"
    reach = f"SWERVE_REDIS_URL={REDIS_URL} SWERVE_ROUTER_URL=http://HOST:{ROUTER_PORT}"
    if plan.fleet:
        yield f"# On {_every(plan.fleet.hosts.count, 'host')} of sandboxes, with the addresses of Redis and of the router:"
        yield f"{reach} SWERVE_SLOTS={plan.fleet.slots_per_host} python -m workers.run &"
    nodes, processes = _learner_nodes(plan), _learner_processes(plan)
    yield f"# On {_every(nodes, 'machine')} of the learner; add --resume to resume a run:"
    meeting = (
        f"--nnodes {nodes} --node-rank RANK --master-addr HOST --master-port 29500 " if nodes > 1 else ""
    )
    yield (
        f"{reach} CUDA_DEVICE_MAX_CONNECTIONS=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True torchrun {meeting}"
        f"--nproc-per-node {processes} -m trainer.run {recipe_path} --run-dir {run_dir}"
    )


def _slurm(plan: RunPlan, recipe_path: Path) -> Iterator[str]:
    engine_nodes, processes = _nodes(plan, plan.gpus.engines.count), _learner_processes(plan)
    flags = f"--device cuda --tensor-parallel {plan.engines.gpus_per_engine}"
    yield "# From the repository's root. infra/cluster/slurm/site.local.sh may set these too, and it wins: a password belongs there."
    yield (
        f"export SWERVE_REDIS_URL={REDIS_URL} SWERVE_ROUTER_URL=http://NODE:{ROUTER_PORT} "
        f"SWERVE_MODEL={plan.recipe.model}"
    )
    yield "sbatch --nodelist=NODE infra/cluster/slurm/router.sbatch"
    yield (
        f"SWERVE_ENGINE_FLAGS='{flags} -- {_passed_on(plan)}' sbatch "
        f"--nodes={engine_nodes} --ntasks-per-node={_engines_per_node(plan)} --gpus-per-task={plan.engines.gpus_per_engine} "
        "infra/cluster/slurm/engines.sbatch"
    )
    if plan.fleet:
        yield (
            f"SWERVE_SLOTS={plan.fleet.slots_per_host} sbatch --array=1-{plan.fleet.hosts.count} "
            f"--cpus-per-task={plan.fleet.hosts.cores} --mem=0 infra/cluster/slurm/worker.sbatch"
        )
    yield "# Starts the run, or resumes the one in its directory:"
    yield (
        f"sbatch --nodes={_learner_nodes(plan)} --ntasks-per-node={processes} --gpus-per-node={processes} "
        f"infra/cluster/slurm/trainer.sbatch {recipe_path} {_run_dir(plan)}"
    )


def _kubernetes(plan: RunPlan, recipe_path: Path) -> Iterator[str]:
    """A kustomize overlay, as JSON, which is valid YAML."""
    engine_gpus, processes = str(plan.engines.gpus_per_engine), str(_learner_processes(plan))
    nodes = _learner_nodes(plan)
    overlay: dict[str, Any] = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "swerve",
        "resources": ["../infra/cluster/kubernetes"],
        "replicas": [
            {"name": "engine", "count": plan.engines.num_engines},
            {"name": "trainer", "count": nodes},
            *([{"name": "worker", "count": -(-plan.fleet.num_slots // POD_SLOTS)}] if plan.fleet else []),
        ],
        "configMapGenerator": [
            {
                "name": "swerve",
                "behavior": "merge",
                "literals": [
                    f"SWERVE_ENGINES={plan.engines.num_engines}",
                    f"SWERVE_ENGINE_GPUS={engine_gpus}",
                    f"SWERVE_MODEL=/app/runs/models/{Path(plan.recipe.model).name}",
                    f"SWERVE_RUN_DIR=/app/runs/{plan.recipe.name}",
                ],
            }
        ],
        "patches": [
            _gpu_patch("engine", engine_gpus, args=["--", *_passed_on(plan).split()]),
            _gpu_patch("trainer", processes, env=_environment({"NODES": str(nodes), "GPUS": processes})),
        ],
    }
    yield "# my-overlay/kustomization.yaml: kubectl apply -k my-overlay. Copy the recipe to runs/recipe.toml of the volume first:"
    yield f"# {recipe_path}, with its model, tasks and agent under paths of the volume. The base sets SWERVE_REDIS_URL, to its own Redis."
    yield msgspec.json.format(msgspec.json.encode(overlay), indent=2).decode()


def _environment(values: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": key, "value": value} for key, value in values.items()]


def _gpu_patch(name: str, num_gpus: str, **changes: Any) -> dict[str, Any]:
    gpus = {"nvidia.com/gpu": num_gpus}
    container = {"name": name, "resources": {"requests": gpus, "limits": gpus}, **changes}
    patch = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {"template": {"spec": {"containers": [container]}}},
    }
    return {"patch": msgspec.json.encode(patch).decode()}


def _skypilot(plan: RunPlan, recipe_path: Path) -> Iterator[str]:
    learner, engines = plan.gpus.learner, plan.gpus.engines
    per_node = plan.recipe.plan.gpus_per_node
    if learner.device is not engines.device:
        raise ValueError("--launch skypilot: learner and engines must have GPUs of one kind")
    total = learner.count + engines.count
    name = learner.device.name
    chip = SKYPILOT_NAMES.get(name, name.split("-")[0])
    yield "# From the repository's root. infra/cluster/skypilot/gpus.yaml names the shared bucket or volume; Redis is yours."
    yield f"export SWERVE_REDIS_URL={REDIS_URL}"
    environment = {
        "SWERVE_RECIPE": recipe_path,
        "SWERVE_RUN_DIR": f"/shared/runs/{plan.recipe.name}",
        "SWERVE_MODEL": f"/shared/models/{Path(plan.recipe.model).name}",
        "LEARNER_NODES": _learner_nodes(plan),
        "LEARNER_GPUS": _learner_processes(plan),
        "ENGINE_GPUS": plan.engines.gpus_per_engine,
        "ENGINE_FLAGS": _passed_on(plan),
    }
    words = " ".join(f"--env {shlex.quote(f'{key}={value}')}" for key, value in environment.items())
    yield (
        f"sky launch --cluster {plan.recipe.name} --num-nodes {_nodes(plan, total)} --gpus {chip}:{min(total, per_node)} {words} "
        "--env SWERVE_REDIS_URL infra/cluster/skypilot/gpus.yaml"
    )
    if plan.fleet:
        hosts = plan.fleet.hosts
        yield (
            f"sky launch --cluster {plan.recipe.name}-workers --num-nodes {hosts.count} --cpus {hosts.cores}+ --env "
            f"SWERVE_SLOTS={plan.fleet.slots_per_host} --env SWERVE_ROUTER_URL=http://HOST:{ROUTER_PORT} --env SWERVE_REDIS_URL "
            "infra/cluster/skypilot/workers.yaml"
        )


WAYS: dict[str, Callable[[RunPlan, Path], Iterator[str]]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
}


def _every(count: int, noun: str) -> str:
    return f"each of the {count} {noun}s" if count > 1 else f"the {noun}"


def _engine_words(plan: RunPlan, model: str, port: int) -> str:
    return (
        f"python -m infra.serving.engine --model {model} --device cuda --host 0.0.0.0 --port {port} --tensor-parallel "
        f"{plan.engines.gpus_per_engine} -- {_passed_on(plan)}"
    )


def _passed_on(plan: RunPlan) -> str:
    """SGLang's own flags, which the engines' program passes on."""
    reports = " --enable-return-routed-experts" if plan.recipe.learner.routing_replay else ""
    return f"--mem-fraction-static {plan.recipe.plan.engine_memory_share:g}{reports}{_adapter_flags(plan.recipe)}{_fp8_flags(plan)}"


def _adapter_flags(recipe: Recipe) -> str:
    if recipe.weights.adapters == "merged":
        return ""
    lora = recipe.learner.lora
    return f" --enable-lora --max-lora-rank {lora.rank} --lora-target-modules {' '.join(lora.targets)}"


def _fp8_flags(plan: RunPlan) -> str:
    """On Blackwell SGLang chooses kernels for which it rearranges weights in FP8 once, when it starts, and not those of a later version."""
    if plan.recipe.weights.precision == "learner" or not plan.gpus.engines.device.is_blackwell:
        return ""
    return " --fp8-gemm-backend triton --moe-runner-backend triton"


def _run_dir(plan: RunPlan) -> str:
    return f"runs/{plan.recipe.name}"


def _nodes(plan: RunPlan, num_gpus: int) -> int:
    return -(-num_gpus // plan.recipe.plan.gpus_per_node)


def _learner_nodes(plan: RunPlan) -> int:
    return _nodes(plan, plan.gpus.learner.count)


def _learner_processes(plan: RunPlan) -> int:
    """The number of processes on each machine of the learner."""
    return -(-plan.gpus.learner.count // _learner_nodes(plan))


def _engines_per_node(plan: RunPlan) -> int:
    return -(-plan.engines.num_engines // _nodes(plan, plan.gpus.engines.count))


def _first_engine_gpu(plan: RunPlan) -> int:
    """The index of the engines' first GPU: after the learner's GPUs if both are on one machine."""
    learner, engines = plan.gpus.learner.count, plan.gpus.engines.count
    return learner if learner + engines <= plan.recipe.plan.gpus_per_node else 0
