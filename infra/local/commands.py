"""The command line of `python -m infra.local`, and the processes that it starts under supervision.

The recipe's judge decides what is started for it: judge processes and, if the judge is a model, an engine and a router for it.
"""

import argparse
import os
import re
import signal
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from infra import ports, services
from infra.processes import SupervisedProcess
from infra.serving.served_models import architectures, check_weights
from pipeline.commandline import parse_own_part, program
from pipeline.journal.reading import RUN_FILE

LOCAL_REDIS = f"redis://127.0.0.1:{services.REDIS_PORT}/0"
METRICS_PORT_OFFSET = 9  # distance from the router's own port to that of its metrics


def parse_arguments(description: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("infra.local"),
        description=description,
        epilog="Flags after -- go to the trainer unchanged.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="what the engine starts from; default: the recipe's model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=6, help="concurrent episodes per worker")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device of the engine")
    parser.add_argument("--dtype", help="type of the engine's weights")
    parser.add_argument(
        "--engine-threads", type=int, default=1, help="threads of one forward pass of the engine on the CPU"
    )
    parser.add_argument("--max-total-tokens", type=int, help="size of the engine's KV cache")
    parser.add_argument("--router-port", type=int, default=30000)
    parser.add_argument("--engine-port", type=int, default=30001)
    parser.add_argument(
        "--judges", type=int, default=1, help="judge processes, if the recipe has a [judge]; default: 1"
    )
    parser.add_argument(
        "--judge-router-port", type=int, default=30020, help="router's port of a judge that is a model"
    )
    parser.add_argument(
        "--judge-engine-port", type=int, default=30021, help="engine's port of a judge that is a model"
    )
    parser.add_argument(
        "--web-port",
        type=int,
        default=8090,
        help="port of the pages for a browser; default 8090, or the next free one",
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
        help="run this when services and base image are there, before the workers start; '-m MODULE ...' is a Python module",
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
        check_weights(model)
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


# The longest times that a SIGTERM may take: the trainer writes a checkpoint, a worker returns its episodes to the queue.
# The trainer ends its optimizer step first, minutes for a pretrained model. A second Ctrl-C does not wait.
TRAINER_GRACE_S = 600.0
WORKER_GRACE_S = 20.0
SERVING_GRACE_S = 2.0
PAGES_GRACE_S = 5.0


def serving(arguments: argparse.Namespace, model: Path) -> Iterator[SupervisedProcess]:
    """The engine, then the router in front of it."""
    flags = [f"--max-total-tokens={arguments.max_total_tokens}"] if arguments.max_total_tokens else []
    flags += adapter_flags(_recipe_table(arguments.recipe, arguments.passed_on))
    yield engine(arguments, "engine", model, arguments.engine_port, *flags)
    yield router(arguments, "router", arguments.router_port, arguments.engine_port)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The default of learner.lora.targets in a recipe."""


def adapter_flags(recipe: dict[str, Any]) -> list[str]:
    """The flags with which an engine takes the adapters of this recipe; none if its versions are whole weights."""
    lora = _in_table(_in_table(recipe, "learner"), "lora")
    if _in_table(recipe, "weights").get("adapters") != "alone" or "rank" not in lora:
        return []
    targets = lora.get("targets", PROJECTIONS)
    return ["--", "--enable-lora", f"--max-lora-rank={lora['rank']}", "--lora-target-modules", *targets]


def engine(
    arguments: argparse.Namespace, name: str, model: Path, port: int, *flags: str
) -> SupervisedProcess:
    command = [sys.executable, "-m", "infra.serving.engine", f"--model={model}"]
    command += [f"--port={port}", f"--device={arguments.device}", f"--num-threads={arguments.engine_threads}"]
    command += [f"--dtype={arguments.dtype}"] if arguments.dtype else []
    return supervised(arguments, name, partial(list, [*command, *flags]), SERVING_GRACE_S, signal.SIGKILL)


def router(arguments: argparse.Namespace, name: str, port: int, engine_port: int) -> SupervisedProcess:
    command = [sys.executable, "-m", "infra.serving.router", f"--port={port}"]
    command += [f"--engine=http://127.0.0.1:{engine_port}", f"--metrics-port={port + METRICS_PORT_OFFSET}"]
    return supervised(arguments, name, partial(list, command), SERVING_GRACE_S, signal.SIGKILL)


def workers(arguments: argparse.Namespace) -> Iterator[SupervisedProcess]:
    for number in range(1, arguments.workers + 1):
        yield worker(arguments, f"worker-{number}", "workers.run")


def worker(arguments: argparse.Namespace, name: str, module: str) -> SupervisedProcess:
    """A process that claims requests from the queue, and drains at SIGTERM."""
    command = [sys.executable, "-m", module]
    return supervised(arguments, name, partial(list, command), WORKER_GRACE_S, signal.SIGTERM)


def pages(arguments: argparse.Namespace, say: Callable[[str], None]) -> SupervisedProcess:
    """The web pages of the run. They stop with it; `swerve web --run-dir` shows the run afterwards."""
    return supervised(arguments, "web", partial(pages_command, arguments, say), PAGES_GRACE_S, signal.SIGTERM)


def pages_command(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    """The command for the pages.

    They listen on the wanted port or, because a port in use is no reason not to train, on the next free one, which a line reports.
    """
    port = ports.next_free(arguments.web_port)
    taken = "" if port == arguments.web_port else f" (port {arguments.web_port} is in use)"
    say(f"the run in a browser: http://127.0.0.1:{port}/{taken}")
    command = [sys.executable, "-m", "infra.web", f"--port={port}", f"--run-dir={arguments.run_dir}"]
    return [*command, f"--redis={arguments.redis_url}"]


def trainer(arguments: argparse.Namespace, say: Callable[[str], None]) -> SupervisedProcess:
    """The trainer, which writes to our own output."""
    command = partial(trainer_command, arguments, say)
    process = supervised(arguments, "trainer", command, TRAINER_GRACE_S, signal.SIGTERM)
    return replace(process, log=None, finishes=True)


def trainer_command(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[str]:
    """The command for the trainer, which resumes the run in the run directory if there is one."""
    command = [sys.executable, "-m", "trainer.run", str(arguments.recipe)]
    command += ["--run-dir", str(arguments.run_dir)]
    if (arguments.run_dir / RUN_FILE).exists():
        say(f"resuming the run in {arguments.run_dir}")
        command.append("--resume")
    return [*command, *arguments.passed_on]


def supervised(
    arguments: argparse.Namespace,
    name: str,
    command: Callable[[], Sequence[str]],
    grace_s: float,
    death_signal: signal.Signals,
) -> SupervisedProcess:
    """A process that writes to the run's logs."""
    return SupervisedProcess(
        name,
        command,
        environment(arguments, name),
        log=arguments.run_dir / "logs" / f"{name}.log",
        grace_s=grace_s,
        death_signal=death_signal,
        scratch=Path(tempfile.gettempdir(), f"swerve-{arguments.router_port}-{name}"),
    )


def environment(arguments: argparse.Namespace, name: str) -> dict[str, str]:
    """The variables that each of our processes reads from its environment. A worker's or judge's own name must differ from the others'."""
    names = ("SWERVE_WORKER_NAME", "SWERVE_JUDGE_NAME")
    inherited = {key: value for key, value in os.environ.items() if key not in names}
    return inherited | {
        "SWERVE_REDIS_URL": arguments.redis_url,
        "SWERVE_ROUTER_URL": f"http://127.0.0.1:{arguments.router_port}",
        "SWERVE_SLOTS": str(arguments.slots),
        "SWERVE_TRACE_FILE": str(arguments.run_dir / "traces" / f"{name}.jsonl"),
        "OMP_NUM_THREADS": "1",
    }


MODELS = ("votes", "reward_model", "teacher")  # methods whose judge is a model
# Architectures with a scalar output in place of a language model's; SGLang serves them with --is-embedding.
SCALAR = re.compile(r"Reward|SequenceClassification")


@dataclass(frozen=True, slots=True)
class LocalJudge:
    """The judge of a run on this machine. `model` is the checkpoint that its engine loads; None: it needs no engine of ours."""

    num_processes: int
    model: Path | None
    has_scalar_output: bool = False  # whether the model returns a number and no text

    @property
    def description(self) -> str:
        processes = "1 judge" if self.num_processes == 1 else f"{self.num_processes} judges"
        return f"{processes} with an engine and a router of their own" if self.model else processes


def wanted_judge(arguments: argparse.Namespace) -> LocalJudge | None:
    """The judge that the recipe names, with the overrides for the trainer on top; None if it names none.

    Raises ValueError if the judge's model is missing or damaged, or cannot do what its method needs. The trainer checks everything else.
    """
    table = _in_table(_recipe_table(arguments.recipe, arguments.passed_on), "judge")
    method = table.get("method", "none")
    if method == "none":
        return None
    if method not in MODELS or _in_table(table, "endpoint").get("api_base"):
        return LocalJudge(arguments.judges, None)
    model = (arguments.recipe.resolve().parent / str(table.get("tokenizer", ""))).resolve()
    try:
        check_weights(model)
        named = architectures(model)
    except ValueError as error:
        raise ValueError(f"judge.tokenizer in {arguments.recipe}: {error}") from error
    has_scalar_output = any(SCALAR.search(name) for name in named)
    if has_scalar_output and method != "reward_model":
        raise ValueError(
            f"judge.tokenizer in {arguments.recipe}: {model} is a {named[0]}, which writes no text and so cannot "
            f'{"vote" if method == "votes" else "teach"}; set judge.method = "reward_model", or name a language model'
        )
    return LocalJudge(arguments.judges, model, has_scalar_output)


def judge_serving(arguments: argparse.Namespace, judge: LocalJudge) -> Iterator[SupervisedProcess]:
    """The judge's engine and its router, if the judge is a model of ours."""
    if judge.model is not None:
        engine_port, router_port = arguments.judge_engine_port, arguments.judge_router_port
        flags = ("--", "--is-embedding") if judge.has_scalar_output else ()
        yield engine(arguments, "judge-engine", judge.model, engine_port, *flags)
        yield router(arguments, "judge-router", router_port, engine_port)


def judges(arguments: argparse.Namespace, judge: LocalJudge) -> Iterator[SupervisedProcess]:
    """The judge processes. Without a model of ours they use the router that our own environment names, if any."""
    router = {"SWERVE_JUDGE_ROUTER_URL": f"http://127.0.0.1:{arguments.judge_router_port}"}
    for number in range(1, judge.num_processes + 1):
        process = worker(arguments, f"judge-{number}", "workers.judge")
        yield replace(process, environment={**process.environment, **(router if judge.model else {})})


def check_judge_ports(arguments: argparse.Namespace, judge: LocalJudge) -> None:
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


def _recipe_table(recipe: Path, flags: Sequence[str]) -> dict[str, Any]:
    """The recipe, with `--set KEY=VALUE` of the trainer's flags on top. Raises ValueError for a file that is no TOML."""
    try:
        table = tomllib.loads(recipe.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{recipe}: not a readable TOML file: {error}") from error
    known, _ = _overrides.parse_known_args(flags)
    for override in known.set:
        key, _, text = override.partition("=")
        *path, name = key.strip().split(".")
        inner = table
        for part in path:
            inner[part] = inner = _in_table(inner, part)
        inner[name] = _value(text.strip())
    return table


def _value(text: str) -> Any:
    """The TOML value, or the text itself where it is none: the trainer reports what it does not understand."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        return text.strip("\"'")


def _in_table(table: dict[str, Any], name: str) -> dict[str, Any]:
    found = table.get(name, {})
    return dict(found) if isinstance(found, dict) else {}


_overrides = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
_overrides.add_argument("--set", action="append", default=[])
