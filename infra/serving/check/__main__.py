"""Certifies a build of SGLang and its router before a run depends on them.

    python -m infra.serving.check --router URL [--engine URL ...] [--model DIR] [--requests 1000] [--only CHECK ...]

Prints a table of checks. Exit status: 0 if all that could be checked is as a run needs it; 1 if something is not, or engine or router
do not answer; 2 misuse. The findings of each check name the engine's URL.

Use engines that serve no other requests: checks pause them, abort requests, and load their own weights again under another version,
which is put back at the end. --model is the directory of the served weights, by default the one that the engine reports;
log-probs are compared with those of transformers only where it is given.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec

from infra.serving.check.checks import CHECKS, NotChecked, reference_logprobs
from infra.serving.check.target import Nonconformity, ServerInfo, Target, TransformersReference, describe
from pipeline.commandline import NotAnswering, program, status_of

REFERENCE = "reference_logprobs"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check."""

    check: str
    result: Literal["ok", "FAILED", "not checked"]
    detail: str


async def certify(
    router_url: str,
    engine_urls: Sequence[str],
    model_dir: Path | None,
    *,
    num_burst_requests: int = 1000,
    only: Sequence[str] = (),
) -> list[CheckResult]:
    """The findings of all checks, or of those in `only`. Raises ValueError if there is nothing to check."""
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=600)) as http:
        engines = list(engine_urls) or await _routed(http, router_url)
        info = await _server_info(http, engines[0])
        directory = model_dir or Path(await _model_path(http, engines[0]))
        target = Target(http, engines, router_url, describe(directory, info), num_burst_requests)
        checks = dict(CHECKS)
        if model_dir is not None and (not only or REFERENCE in only):
            reference = await asyncio.to_thread(TransformersReference, model_dir)
            checks[REFERENCE] = lambda target: reference_logprobs(target, reference)
        findings = [
            await _finding(name, check, target) for name, check in checks.items() if not only or name in only
        ]
        if model_dir is None and not only:
            findings.append(
                CheckResult(REFERENCE, "not checked", "give --model the directory of the weights")
            )
        return findings


async def _finding(name: str, check: Callable[[Target], Awaitable[str]], target: Target) -> CheckResult:
    try:
        return CheckResult(name, "ok", await check(target))
    except NotChecked as reason:
        return CheckResult(name, "not checked", str(reason))
    except Nonconformity as found:
        return CheckResult(name, "FAILED", str(found))
    except (aiohttp.ClientError, TimeoutError) as error:
        return CheckResult(name, "FAILED", f"{type(error).__name__}: {error}")


async def _routed(http: aiohttp.ClientSession, router_url: str) -> list[str]:
    found = [str(worker["url"]) for worker in (await _get(http, f"{router_url}/workers"))["workers"]]
    if not found:
        raise ValueError(f"--router {router_url}: it has no engine; start one, or name it with --engine")
    return found


async def _server_info(http: aiohttp.ClientSession, engine_url: str) -> ServerInfo:
    return msgspec.convert(await _get(http, f"{engine_url}/server_info"), ServerInfo, strict=False)


async def _model_path(http: aiohttp.ClientSession, engine_url: str) -> str:
    return str((await _get(http, f"{engine_url}/model_info"))["model_path"])


async def _get(http: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    try:
        async with http.get(url) as response:
            answer = await response.json(content_type=None)
    except ValueError as error:
        raise ValueError(f"{url}: {error}; is it an SGLang engine, or its router?") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise NotAnswering(f"{url} does not answer ({why}): start the engine or the router") from error
    if response.status != 200 or not isinstance(answer, dict):
        raise ValueError(f"{url}: HTTP {response.status}; is it an SGLang engine, or its router?")
    return answer


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=program("infra.serving.check"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--router", default="", metavar="URL", help="the router, as in http://127.0.0.1:30000"
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="URL",
        help="repeat; by default those that the router has",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="the served weights, for the reference")
    parser.add_argument("--requests", type=int, default=1000, help="how many requests to send at once")
    parser.add_argument(
        "--only", action="append", default=[], choices=[*CHECKS, REFERENCE], help="repeat; by default all"
    )
    parser.add_argument("--json", action="store_true", help="one finding per line")
    arguments = parser.parse_args(argv)
    if not arguments.router and not arguments.engine:
        parser.error("give --router, or --engine, or both")
    if arguments.requests < 1:
        parser.error("--requests must be 1 or more")
    if REFERENCE in arguments.only and arguments.model is None:
        parser.error(f"--only {REFERENCE} needs --model")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        findings = asyncio.run(
            certify(
                arguments.router.rstrip("/"),
                [url.rstrip("/") for url in arguments.engine],
                arguments.model,
                num_burst_requests=arguments.requests,
                only=arguments.only,
            )
        )
    except (NotAnswering, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return status_of(error)
    for finding in findings:
        print(json.dumps(asdict(finding)) if arguments.json else _line(finding))
    return int(any(finding.result == "FAILED" for finding in findings))


def _line(finding: CheckResult) -> str:
    return f"{finding.check:20} {finding.result:12} {finding.detail}"


if __name__ == "__main__":
    sys.exit(main())
