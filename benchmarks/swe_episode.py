"""A request and a trajectory as large as those of a real episode that is graded with a repository's own tests.

The request is as large as the median of twelve real bug fixes in SWE-bench's form: 38 kB, most of it names of tests that
must still pass. The trajectory has 20 turns, 16,384 tokens and 76 kB of text, which is Python's own source, so that it
compresses as code does. The claim is real; everything else is the same for all.
"""

import argparse
import inspect
import random
import re
import zlib
from functools import cache
from typing import TypeVar

from msgspec.structs import replace

from benchmarks import scripted_fleet
from pipeline.message import pack_float32s, pack_int32s, unpack_int32s
from pipeline.request import Claim
from pipeline.task import SwebenchLog, Task
from pipeline.trajectory import Action, Observation, Submitted, Trajectory, Turn, VersionSpan

S = TypeVar("S", str, list[int])

VOCAB_SIZE = 32_768
NUM_TURNS, NUM_TOKENS, TEXT_CHARS = 20, 16_384, 76_000
SAMPLED_PART = 0.3  # of a turn's tokens and text; the rest is output of the sandbox
NUM_TESTS = 400  # 80 characters each
SCRIPT_CHARS, PROBLEM_CHARS, PATCH_CHARS = 4_000, 2_000, 1_500


def task(name: str) -> Task:
    return Task(
        id=name,
        repo="owner/repository",
        base_commit="0" * 40,
        image="none",
        workdir="/testbed",
        problem=_source()[:PROBLEM_CHARS],
        verdict=SwebenchLog(
            eval_script=_source()[:SCRIPT_CHARS],
            log_parser="parse_log_pytest",
            fail_to_pass=(_test_name(NUM_TESTS),),
            pass_to_pass=tuple(_test_name(number) for number in range(NUM_TESTS)),
        ),
    )


def played(claim: Claim) -> Trajectory:
    return replace(
        scripted_fleet.typical(claim),
        turns=_turns(claim.request.version_at_enqueue),
        outcome=Submitted(patch=_source()[:PATCH_CHARS].encode() + b"%d" % claim.request.member),
    )


def _test_name(number: int) -> str:
    return f"tests/part_{number % 20:02d}/test_{number:04d}.py::TestSomething::test_that_it_behaves_as_before[utf8]"


@cache
def _source() -> str:
    return inspect.getsource(argparse)[:TEXT_CHARS]


def _turns(version: int) -> tuple[Turn, ...]:
    return tuple(
        replace(turn, versions=(VersionSpan(version, 0, len(unpack_int32s(turn.sampled))),))
        for turn in _versionless()
    )


@cache
def _versionless() -> tuple[Turn, ...]:
    rng = random.Random(7)
    tokens, made, num_kept = _tokens(), list[Turn](), 0
    for number in range(NUM_TURNS):
        seen, text = _part(tokens, number), _part(_source(), number)
        num_fed, num_text = int(len(seen) * (1 - SAMPLED_PART)), int(len(text) * SAMPLED_PART)
        made.append(
            Turn(
                kept_tokens=num_kept,
                fed=pack_int32s(seen[:num_fed]),
                sampled=pack_int32s(seen[num_fed:]),
                logprobs=pack_float32s([-rng.random() for _ in seen[num_fed:]]),
                versions=(),
                stop="stop",
                text=text[:num_text],
                actions=(_action(text[: num_text // 2], text[num_text:]),),
            )
        )
        num_kept += len(seen)
    return scripted_fleet.with_digests(made)


def _action(command: str, output: str) -> Action:
    seen = Observation(exit_code=0, output=output, dropped_chars=0, wall_s=0.01)
    return Action(command=command, observation=seen)


def _part(whole: S, number: int) -> S:
    """The part of this turn."""
    size = len(whole)
    return whole[number * size // NUM_TURNS : (number + 1) * size // NUM_TURNS]


def _tokens() -> list[int]:
    """One token for each word, always the same for the same word."""
    words = re.findall(r"\w+|\s+|[^\w\s]", _source())
    return [zlib.crc32(word.encode()) % VOCAB_SIZE for word in words][:NUM_TOKENS]
