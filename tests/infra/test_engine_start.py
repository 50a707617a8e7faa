"""What engine and router refuse to start with: one line that says what to change, and exit status 2."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from infra.serving import engine, served_models
from tests.conftest import free_ports

REGISTERED = """
import json, logging
from sglang.srt.models.registry import ModelRegistry
print(json.dumps(sorted(ModelRegistry.models)))
"""


def refusal(*command: str) -> str:
    """The one line that the command prints."""
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    return line


def engine_refusal(model: Path, *more: str) -> str:
    return refusal("infra.serving.engine", f"--model={model}", *more)


def checkpoint_of(architecture: object, tiny_model: Path, directory: Path) -> Path:
    model = directory / "model"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "config.json").read_text()) | {"architectures": architecture}
    (model / "config.json").write_text(json.dumps(config))
    return model


def test_a_missing_model_directory_is_refused(tmp_path: Path) -> None:
    line = engine_refusal(tmp_path / "nowhere")
    assert line == (
        f"error: --model: {tmp_path / 'nowhere'}: there is no such directory; give the directory of a checkpoint"
    )


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "no config.json in it" in engine_refusal(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "said"),
    [
        (
            ["LamaForCausalLM"],
            "SGLang has no architecture LamaForCausalLM; the nearest is LlamaForCausalLM; ",
        ),
        (["T5ForConditionalGeneration"], "SGLang has no architecture T5ForConditionalGeneration; "),
        (["MambaForCausalLM"], "SGLang does not serve MambaForCausalLM on a CPU"),
        (None, "it names no architecture"),
        ([], "it names no architecture"),
    ],
)
def test_an_architecture_that_cannot_be_served_is_refused_before_the_slow_start(
    architecture: object, said: str, tiny_model: Path, tmp_path: Path
) -> None:
    line = engine_refusal(checkpoint_of(architecture, tiny_model, tmp_path))
    assert line.startswith("error: --model: ")
    assert said in line


def test_an_architecture_without_a_cpu_kernel_is_accepted_on_gpus(tiny_model: Path, tmp_path: Path) -> None:
    served_models.check_architecture(checkpoint_of(["MambaForCausalLM"], tiny_model, tmp_path), device="cuda")


def test_an_engine_of_weights_in_eight_bits_says_so_and_needs_a_gpu(tiny_model: Path, tmp_path: Path) -> None:
    model = checkpoint_of(["LlamaForCausalLM"], tiny_model, tmp_path)
    words = ["--model", str(model), "--device", "cuda"]
    assert "--quantization" not in engine.engine_command(engine.parse_arguments(words))
    config = json.loads((model / "config.json").read_bytes())
    packed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    command = engine.engine_command(engine.parse_arguments(words))
    assert command[command.index("--quantization") + 1] == "fp8"
    served_models.check_architecture(model, device="cuda")
    assert "its weights are in FP8, for which SGLang needs compiled kernels on a CPU" in engine_refusal(model)


def test_hugging_faces_implementation_may_be_asked_for(tiny_model: Path, tmp_path: Path) -> None:
    model = checkpoint_of(["NewForCausalLM"], tiny_model, tmp_path)
    (port,) = free_ports(1)
    words = ["--model", str(model), f"--port={port}"]
    with pytest.raises(ValueError, match="no architecture NewForCausalLM"):
        engine.check_start(engine.parse_arguments(words))
    engine.check_start(engine.parse_arguments([*words, "--", "--model-impl", "transformers"]))


@pytest.mark.slow
def test_the_architectures_read_from_source_are_those_that_sglang_registers() -> None:
    environment = engine.engine_environment(engine.parse_arguments(["--model", "unused"]), dict(os.environ))
    done = subprocess.run(
        [sys.executable, "-c", REGISTERED], env=environment, capture_output=True, text=True, check=True
    )
    registered = json.loads(done.stdout.splitlines()[-1])
    files = served_models.model_files()
    assert registered == sorted(name for name, file in files.items() if file not in served_models.NOT_ON_CPU)
    assert set(files.values()) >= served_models.NOT_ON_CPU


# Quick: the mistake of most who start an engine.
def test_cuda_without_a_gpu_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (port,) = free_ports(1)
    line = engine_refusal(tiny_model, "--device=cuda", f"--port={port}")
    assert "sees 0 GPUs" in line
    assert "--device cpu" in line


def test_an_engines_port_in_use_is_refused(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        line = engine_refusal(tiny_model, f"--port={port}")
    assert line.startswith(f"error: engine: port {port} is in use by process {os.getpid()} (")
    assert line.endswith("; stop it or give another --port")


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_a_routers_port_in_use_is_refused(flag: str) -> None:
    port, metrics_port = free_ports(2)
    given = {"--port": port, "--metrics-port": metrics_port}
    with socket.create_server(("127.0.0.1", given[flag])):
        line = refusal("infra.serving.router", *(f"{name}={value}" for name, value in given.items()))
    assert line.startswith(f"error: router: port {given[flag]} is in use by process {os.getpid()} (")
    assert line.endswith(f"; stop it or give another {flag}")
