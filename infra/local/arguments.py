"""The command line of `python -m infra.local`, and what it says about ports and the model."""

import argparse
import tomllib
from collections.abc import Sequence
from pathlib import Path

from infra import ports, services
from infra.commandline import parse_own_part
from infra.serving.checkpoint import check

LOCAL_REDIS = f"redis://127.0.0.1:{services.REDIS_PORT}/0"
METRICS_PORT_OFFSET = 9  # the router's metrics, from the router's own port


def parse_arguments(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m infra.local",
        description=description,
        epilog="Flags after -- go to the trainer unchanged.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="what the engine starts from; default: the recipe's model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=6, help="concurrent episodes per worker")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engine")
    parser.add_argument("--dtype", help="of the engine")
    parser.add_argument(
        "--engine-threads", type=int, default=1, help="of one forward pass of the engine, on the CPU"
    )
    parser.add_argument("--max-total-tokens", type=int, help="of the engine's KV cache")
    parser.add_argument("--router-port", type=int, default=30000)
    parser.add_argument("--engine-port", type=int, default=30001)
    parser.add_argument(
        "--judges", type=int, default=1, help="judge processes, if the recipe has a [judge]; default: 1"
    )
    parser.add_argument("--judge-router-port", type=int, default=30020, help="for a judge that is a model")
    parser.add_argument("--judge-engine-port", type=int, default=30021, help="for a judge that is a model")
    parser.add_argument(
        "--web-port",
        type=int,
        default=8090,
        help="of the pages for a browser; default 8090, or the next free one",
    )
    parser.add_argument("--redis-url", default=LOCAL_REDIS)
    parser.add_argument(
        "--fresh", action="store_true", help="delete the run in --run-dir and start a new one"
    )
    parser.add_argument(
        "--prepare",
        action="append",
        default=[],
        metavar="COMMAND",
        help="run this when services and base image are there; '-m MODULE ...' is a Python module",
    )
    return parse_own_part(parser, argv)


def check_ports(arguments: argparse.Namespace) -> None:
    """Raises ValueError if the engine or the router cannot listen."""
    metrics_port = arguments.router_port + METRICS_PORT_OFFSET
    for who, port, flag in (
        ("engine", arguments.engine_port, "--engine-port"),
        ("router", arguments.router_port, "--router-port"),
        ("router's metrics", metrics_port, f"--router-port (metrics: {METRICS_PORT_OFFSET} above it)"),
    ):
        ports.check_free(port, needed_by=who, fix=f"stop it or give another {flag}")


def starting_model(arguments: argparse.Namespace) -> Path:
    """The checkpoint that the engine starts from: --model, or the recipe's `model`, relative to the recipe as all its
    paths are. Raises ValueError if there is none, or if its weight files are damaged.
    """
    model, place = arguments.model, "--model"
    if model is None:
        model, place = _model_of_recipe(arguments.recipe), f"model in {arguments.recipe}"
    try:
        check(model)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    return model


def _model_of_recipe(recipe: Path) -> Path:
    try:
        model = tomllib.loads(recipe.read_text()).get("model")
    except (OSError, ValueError) as error:
        raise ValueError(f"{recipe}: not a readable TOML file: {error}") from error
    if not isinstance(model, str):
        raise ValueError(f'{recipe}: it names no model; add `model = "DIRECTORY"`, or give --model')
    return (recipe.resolve().parent / model).resolve()
