"""Starts the router: one address in front of all engines, and one control plane over them.

    python -m infra.serving.router [--engine URL ...] [--port 30000] [--log FILE] [-- SMG FLAGS]

The process becomes `smg`. On a terminal its banner and its warnings go into a file, which one line of ours names; elsewhere, as under
systemd and in containers, they are the output of the process. Its functions:

- `POST /generate` goes to one engine; requests with the same `X-SMG-Routing-Key` header go to the same engine while it
  lives, and others where their prefix is cached;
- `/v1/rl/engine/PATH?selector=engine=sglang` reaches every engine (pause, update weights, continue);
- `POST /workers {"url": ...}` adds an engine, `GET /workers` lists them, `DELETE /workers/ID` removes one;
- `GET /readiness` is 200 once an engine can be used, and 503 before;
- it retries nothing: the caller sees each failed try, counts it and repeats it.

An engine that is paused for new weights, or busy with long generations, does not answer for a while. The router's detection of overloaded,
stalled and wedged engines would take it out of routing, so that detection is off: an engine leaves routing only after `/health` has failed
five times, and returns when it answers once.

A port that is in use is one line, with exit status 2.
"""

import argparse
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from infra import ports
from pipeline.commandline import parse_own_part, program, refuse

EPILOG = "Flags after -- go to smg unchanged."
LOG = Path("runs/router.log")
ENGINE_SCHEMES = ("http", "https", "grpc", "grpcs", "ipc")
NEVER_S = "86400"
FLAGS = (
    *("--policy", "cache_aware", "--routing-key-override", "--enable-rl", "--disable-tokenizer-autoload"),
    *("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "5", "--health-success-threshold", "1"),
    *("--disable-retries", "--disable-circuit-breaker", "--disable-worker-overload-protection"),
    *("--worker-wedge-secs", NEVER_S, "--worker-stall-secs", NEVER_S, "--worker-stale-secs", "0"),
    *("--shutdown-grace-period-secs", "5", "--request-timeout-secs", "3600"),
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("infra.serving.router"), description="Start the router.", epilog=EPILOG
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        type=_engine_url,
        metavar="URL",
        help="URL of an engine, as in http://HOST:30001, or HOST:30001; repeat for each engine",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--metrics-port", type=int, default=29000, help="Prometheus metrics, on the same host"
    )
    parser.add_argument("--log-level", default="warn", choices=("debug", "info", "warn", "error"))
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        help=f"what the router itself says is added there; default {LOG} on a terminal, else standard output",
    )
    return parse_own_part(parser, argv)


def _engine_url(text: str) -> str:
    """Returns the URL of an engine; `http://` is added if it has no scheme. Raises ArgumentTypeError."""
    url = text if "://" in text else f"http://{text}"
    if not _is_engine(url):
        raise argparse.ArgumentTypeError(f"{text!r}: give a URL as in http://127.0.0.1:30001")
    return url


def _is_engine(url: str) -> bool:
    try:
        parts = urlsplit(url)
        leads_somewhere = parts.scheme == "ipc" or (bool(parts.hostname) and parts.port != 0)
    except ValueError:  # half of an IPv6 address, or a port that is not a number from 0 to 65535
        return False
    return leads_somewhere and parts.scheme in ENGINE_SCHEMES and not re.search(r"\s", url)


def router_command(arguments: argparse.Namespace) -> list[str]:
    """The command line that serves these arguments."""
    command = [sys.executable, "-m", "smg", "launch", "--host", arguments.host, "--port", str(arguments.port)]
    command += ["--prometheus-host", arguments.host, "--prometheus-port", str(arguments.metrics_port)]
    command += ["--log-level", arguments.log_level, *FLAGS]
    if arguments.engine:
        command += ["--worker-urls", *arguments.engine]
    return [*command, *arguments.passed_on]


def main(argv: list[str] | None = None) -> NoReturn:
    arguments = parse_arguments(argv)
    if importlib.util.find_spec("smg") is None:  # it is started, not imported
        raise ModuleNotFoundError("No module named 'smg'", name="smg")
    try:
        for port, flag in ((arguments.port, "--port"), (arguments.metrics_port, "--metrics-port")):
            fix = f"stop it or give another {flag}"
            ports.check_free(port, host=arguments.host, needed_by="router", fix=fix)
        _put_output_into(arguments)
    except ValueError as error:
        refuse(error)
    command = router_command(arguments)
    os.execv(command[0], command)


def _put_output_into(arguments: argparse.Namespace) -> None:
    """Redirects what this process prints from now on into the log, if there is one. Raises ValueError if it cannot be written."""
    log: Path | None = arguments.log or (LOG if sys.stdout.isatty() else None)
    if log is None:
        return
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise ValueError(f"--log {log}: {error.strerror}; give another file") from error
    print(f"router: http://{arguments.host}:{arguments.port}; what it says is in {log}", flush=True)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.close(descriptor)


if __name__ == "__main__":
    main()
