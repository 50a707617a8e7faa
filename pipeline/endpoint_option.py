"""`--key-env` and `--key-file`, the same for every command that has an OpenAI-compatible server reply."""

import argparse
import os
from pathlib import Path

from pipeline.request import Endpoint

DEFAULT_KEY_ENV = "OPENAI_API_KEY"


def add_key_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--key-env",
        metavar="NAME",
        help=f"environment variable with the server's key; default: {DEFAULT_KEY_ENV} if it is set",
    )
    parser.add_argument("--key-file", type=Path, metavar="FILE", help="file with the server's key")


def endpoint_of(options: argparse.Namespace) -> Endpoint:
    """The server of --api-base, --model and the key options. Raises ValueError for what cannot be one."""
    if not options.api_base.startswith(("http://", "https://")):
        raise ValueError(f"--api-base {options.api_base!r}: give a URL, as in http://127.0.0.1:30000/v1")
    if options.key_env and options.key_file:
        raise ValueError("--key-env and --key-file: give one of them")
    key_env = options.key_env or ""
    if not key_env and not options.key_file and os.environ.get(DEFAULT_KEY_ENV):
        key_env = DEFAULT_KEY_ENV
    key_file = str(options.key_file.resolve()) if options.key_file else ""
    return Endpoint(api_base=options.api_base, model=options.model, key_env=key_env, key_file=key_file)
