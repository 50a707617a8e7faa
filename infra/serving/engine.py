"""Starts one SGLang engine, on the CPU or on GPUs, as Swerve's workers and learner need it.

    python -m infra.serving.engine --model DIR [--port 30001] [--device cpu|cuda] [-- SGLANG FLAGS]

The process becomes SGLang's own server: its pid, its signals, its exit status. On both devices:

- tokens in, tokens out: no tokenizer is loaded, so requests carry `input_ids` and end at a token id. With `--chat` one is loaded, and the
  engine also speaks OpenAI's chat completions, for other agents; - `/health` answers at once, also while generation is paused for new
  weights (SGLang's own check generates a token, so it would hang, and the router would consider the engine dead); - the weights it starts
  from have a version (`--weight-version`, default 0), as later ones do; - an idle engine sleeps; - `/metrics` serves SGLang's metrics to
  Prometheus; - everything that would make the start fail is checked first: the port, the GPUs, the architecture and the weight files
  (`served_models.py`). Each mistake is one line, with exit status 2.

On the CPU the wheel from PyPI is used unchanged. Its GPU-only imports are satisfied by stand-ins that refuse to be
called (`cpu_shim/sitecustomize.py`), its processes are forked, not spawned (`cpu_shim/forked_server.py`), and its attention
is computed for all sequences at once (`cpu_shim/batched_attention.py`). Memory is not pinned (`cpu_shim/unpinned_memory.py`).
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from infra import ports
from infra.serving import served_models
from pipeline.commandline import parse_own_part, program, refuse

EPILOG = "Flags after -- go to SGLang unchanged."
CPU_SHIM = Path(__file__).parent / "cpu_shim"
# SGLang imports these at module level. It uses them on GPUs, or for images, sound, notebooks, constrained decoding.
STAND_INS = ("sgl_kernel", "triton", "torchvision", "soundfile", "xgrammar", "IPython")
# Hidden: SGLang hooks into a real Triton through the first; its tensor dumper loads the second if it can.
HIDDEN = ("triton.knobs", "megatron")

COMMON_FLAGS = (
    *("--skip-server-warmup", "--sleep-on-idle", "--grammar-backend", "none", "--enable-metrics"),
    *("--log-level-http", "warning"),  # the router calls /health every second
)
CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    # --max-total-tokens bounds the KV pool; the fraction only has to leave room for it.
    *("--disable-overlap-schedule", "--mem-fraction-static", "0.5"),
    # Of the backends of adapters, only this one has no kernels of a GPU.
    *("--lora-backend", "torch_native"),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("infra.serving.engine"), description="Start one SGLang engine.", epilog=EPILOG
    )
    parser.add_argument("--model", required=True, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30001)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", help="default: float32 on the CPU, the checkpoint's own on GPUs")
    parser.add_argument("--num-threads", type=int, default=1, help="CPU only: threads of one forward pass")
    parser.add_argument("--max-total-tokens", type=int, help="KV cache, in tokens; default: 16384 on the CPU")
    parser.add_argument("--max-running-requests", type=int, help="default: 16 on the CPU")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of this engine")
    parser.add_argument(
        "--chat", action="store_true", help="load the tokenizer and serve /v1/chat/completions too"
    )
    parser.add_argument("--weight-version", default="0", help="version of the weights in --model")
    return parse_own_part(parser, argv)


def engine_command(arguments: argparse.Namespace) -> list[str]:
    """The command line that serves these arguments."""
    on_cpu = arguments.device == "cpu"
    flags = [
        "--model-path",
        arguments.model,
        "--host",
        arguments.host,
        "--port",
        str(arguments.port),
        *COMMON_FLAGS,
    ]
    if served_models.is_fp8(Path(arguments.model)):
        # The default is what config.json says. Said aloud, it is in what the engine reports of itself, where the trainer looks for it.
        flags += ["--quantization", "fp8"]
    flags += ["--weight-version", arguments.weight_version, "--tp-size", str(arguments.tensor_parallel)]
    flags += () if arguments.chat else ("--skip-tokenizer-init",)
    flags += CPU_FLAGS if on_cpu else ()
    dtype = arguments.dtype or ("float32" if on_cpu else None)
    max_total_tokens = arguments.max_total_tokens or (16384 if on_cpu else None)
    max_running_requests = arguments.max_running_requests or (16 if on_cpu else None)
    if dtype:
        flags += ["--dtype", dtype]
    if max_total_tokens:
        flags += ["--max-total-tokens", str(max_total_tokens)]
    if max_running_requests:
        flags += ["--max-running-requests", str(max_running_requests)]
    module = "forked_server" if on_cpu else "sglang.launch_server"
    return [sys.executable, "-m", module, *flags, *arguments.passed_on]


def engine_environment(arguments: argparse.Namespace, inherited: dict[str, str]) -> dict[str, str]:
    """``inherited`` with the variables that SGLang reads."""
    environment = inherited | {
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    if arguments.device == "cuda":
        return environment
    python_path = os.pathsep.join(filter(None, (str(CPU_SHIM), inherited.get("PYTHONPATH"))))
    return environment | {
        "PYTHONPATH": python_path,
        "SWERVE_CPU_SHIM": ",".join((*STAND_INS, *(f"-{module}" for module in HIDDEN))),
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(arguments.num_threads),
    }


def check_start(arguments: argparse.Namespace) -> None:
    """Raises ValueError for mistakes that SGLang would notice late, or report with a traceback."""
    try:
        served_models.check_weights(Path(arguments.model))
        if "--model-impl" not in arguments.passed_on and "SGLANG_EXTERNAL_MODEL_PACKAGE" not in os.environ:
            served_models.check_architecture(Path(arguments.model), device=arguments.device)
    except ValueError as error:
        raise ValueError(f"--model: {error}") from error
    fix = "stop it or give another --port"
    ports.check_free(arguments.port, host=arguments.host, needed_by="engine", fix=fix)
    if arguments.device == "cuda":
        check_gpus(arguments.tensor_parallel)


def check_gpus(num_wanted: int) -> None:
    """Raises ValueError if torch sees fewer GPUs."""
    import torch

    num_seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_seen < num_wanted:
        raise ValueError(
            f"--device cuda: torch {torch.__version__} sees {num_seen} GPUs and --tensor-parallel is {num_wanted}; check "
            "nvidia-smi, CUDA_VISIBLE_DEVICES and that torch is a CUDA build, or give --device cpu"
        )


def main(argv: list[str] | None = None) -> NoReturn:
    arguments = parse_arguments(argv)
    try:
        check_start(arguments)
    except ValueError as error:
        refuse(error)
    command = engine_command(arguments)
    os.execve(command[0], command, engine_environment(arguments, dict(os.environ)))


if __name__ == "__main__":
    main()
