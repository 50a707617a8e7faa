"""Which judge the recipe wants, and the processes of it: judges, and an engine and a router of their own for a model."""

import argparse
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra import ports
from infra.local import commands
from infra.local.arguments import METRICS_PORT_OFFSET
from infra.serving.architectures import architectures
from infra.serving.checkpoint import check
from infra.supervisor import SupervisedProcess

MODELS = ("votes", "reward_model")  # methods whose judge is a model
# Architectures with a scalar output in place of a language model's; SGLang serves them with --is-embedding.
SCALAR = re.compile(r"Reward|SequenceClassification")


@dataclass(frozen=True, slots=True)
class LocalJudge:
    """The judge of a run on this machine. `model` is what its engine starts from; None: it needs no engine of ours."""

    num_processes: int
    model: Path | None
    has_scalar_output: bool = False  # the model writes no text

    @property
    def description(self) -> str:
        processes = "1 judge" if self.num_processes == 1 else f"{self.num_processes} judges"
        return f"{processes} with an engine and a router of their own" if self.model else processes


def wanted_judge(arguments: argparse.Namespace) -> LocalJudge | None:
    """The judge that the recipe names, with the overrides for the trainer on top; None if it names none.

    Raises ValueError if the judge's model is missing or damaged, or cannot do what its method needs. The trainer checks everything else.
    """
    table = _judge_table(arguments.recipe, arguments.passed_on)
    method = table.get("method", "none")
    if method == "none":
        return None
    if method not in MODELS or _in_table(table, "endpoint").get("api_base"):
        return LocalJudge(arguments.judges, None)
    model = (arguments.recipe.resolve().parent / str(table.get("tokenizer", ""))).resolve()
    try:
        check(model)
        named = architectures(model)
    except ValueError as error:
        raise ValueError(f"judge.tokenizer in {arguments.recipe}: {error}") from error
    has_scalar_output = any(SCALAR.search(name) for name in named)
    if has_scalar_output and method == "votes":
        raise ValueError(
            f"judge.tokenizer in {arguments.recipe}: {model} is a {named[0]}, which writes no text and so cannot vote; "
            'set judge.method = "reward_model", or name a language model'
        )
    return LocalJudge(arguments.judges, model, has_scalar_output)


def serving(arguments: argparse.Namespace, judge: LocalJudge) -> Iterator[SupervisedProcess]:
    """The judge's engine and its router, if it is a model of ours."""
    if judge.model is not None:
        engine_port, router_port = arguments.judge_engine_port, arguments.judge_router_port
        flags = ("--", "--is-embedding") if judge.has_scalar_output else ()
        yield commands.engine(arguments, "judge-engine", judge.model, engine_port, *flags)
        yield commands.router(arguments, "judge-router", router_port, engine_port)


def judges(arguments: argparse.Namespace, judge: LocalJudge) -> Iterator[SupervisedProcess]:
    """The judge processes. Without a model of ours they keep the router that our own environment names, if any."""
    router = {"SWERVE_JUDGE_ROUTER_URL": f"http://127.0.0.1:{arguments.judge_router_port}"}
    for number in range(1, judge.num_processes + 1):
        process = commands.worker(arguments, f"judge-{number}", "workers.judge")
        yield replace(process, environment={**process.environment, **(router if judge.model else {})})


def check_ports(arguments: argparse.Namespace, judge: LocalJudge) -> None:
    """Raises ValueError if the judge's engine or router cannot listen."""
    if judge.model is None:
        return
    metrics_port = arguments.judge_router_port + METRICS_PORT_OFFSET
    for who, port, flag in (
        ("judge's engine", arguments.judge_engine_port, "--judge-engine-port"),
        ("judge's router", arguments.judge_router_port, "--judge-router-port"),
        (
            "judge's router's metrics",
            metrics_port,
            f"--judge-router-port (metrics: {METRICS_PORT_OFFSET} above it)",
        ),
    ):
        ports.check_free(port, needed_by=who, fix=f"stop it or give another {flag}")


def _judge_table(recipe: Path, flags: Sequence[str]) -> dict[str, Any]:
    """The recipe's [judge], with `--set judge.KEY=VALUE` of the trainer's flags on top."""
    try:
        table = _in_table(tomllib.loads(recipe.read_text()), "judge")
    except (OSError, ValueError) as error:
        raise ValueError(f"{recipe}: not a readable TOML file: {error}") from error
    known, _ = _overrides.parse_known_args(flags)
    for override in known.set:
        key, _, value = override.partition("=")
        *path, name = key.strip().split(".")
        if path == ["judge"]:
            table[name] = value.strip("\"'")
        elif path == ["judge", "endpoint"]:
            table["endpoint"] = {**_in_table(table, "endpoint"), name: value.strip("\"'")}
    return table


def _in_table(table: dict[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name, {})
    return dict(found) if isinstance(found, dict) else {}


_overrides = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
_overrides.add_argument("--set", action="append", default=[])
