"""Starts the router: one address in front of all engines, and one control plane over them.

    python -m infra.serving.router [--engine URL ...] [--port 30000] [-- SMG FLAGS]

The process becomes `smg`. What it does:

- `POST /generate` goes to one engine; requests with the same `X-SMG-Routing-Key` header go to the same engine while it
  lives, and others where their prefix is cached;
- `/v1/rl/engine/PATH?selector=engine=sglang` reaches every engine (pause, update weights, continue);
- `POST /workers {"url": ...}` adds an engine, `GET /workers` lists them, `DELETE /workers/ID` removes one;
- `GET /readiness` is 200 once an engine can be used, and 503 before;
- it retries nothing: the caller sees each failed try, counts it and repeats it.

An engine that is paused for new weights, or busy with long generations, does not answer for a while. The router's
detection of overloaded, stalled and wedged engines would take it out of routing, so that detection is off: an engine is
out only after `/health` has failed five times, and back in when it answers once.

A port that is in use is one line, with exit status 2.
"""

import argparse
import importlib.util
import os
import sys
from typing import NoReturn

from infra import ports
from infra.commandline import parse_own_part, refuse

EPILOG = "Flags after -- go to smg unchanged."
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
        prog="python -m infra.serving.router", description="Start the router.", epilog=EPILOG
    )
    parser.add_argument("--engine", action="append", default=[], metavar="URL", help="repeat for each engine")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument(
        "--metrics-port", type=int, default=29000, help="Prometheus metrics, on the same host"
    )
    parser.add_argument("--log-level", default="warn", choices=("debug", "info", "warn", "error"))
    return parse_own_part(parser, argv)


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
    except ValueError as error:
        refuse(error)
    command = router_command(arguments)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
