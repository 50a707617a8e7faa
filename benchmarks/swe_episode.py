"""A request and an answer as large as those of a real episode over a repository's own tests.

The request is as large as the median of twelve real bug fixes in SWE-bench's form (38 kB, most of it names of tests that
must go on passing), the answer as the trajectory that message formats are usually compared with: 20 turns, 16,384 tokens
and 76 kB of text. The text is Python's own source, so it packs as code does. The claim is real; the rest is the same for all.
"""

import argparse
import inspect
import random
import re
import time
import zlib
from collections.abc import Sequence
from functools import cache

from msgspec.structs import replace

from pipeline.message import pack_float32s, pack_int32s
from pipeline.request import Claim
from pipeline.task import SwebenchLog, Task
from pipeline.trajectory import Observation, Reward, Submitted, Trajectory, Turn, VersionSpan

VOCAB_SIZE = 32_768
NUM_TURNS, NUM_TOKENS, TEXT_CHARS = 20, 16_384, 76_000
SAMPLED_PART = 0.3  # of a turn's tokens and text; the rest is what the sandbox said
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
    """Rewards alternate within a group, so that every group has something to teach."""
    reward = float(claim.request.member % 2)
    return Trajectory(
        claim=claim,
        turns=_turns(claim.request.version_at_enqueue),
        outcome=Submitted(patch=_source()[:PATCH_CHARS].encode() + b"%d" % claim.request.member),
        reward=Reward(value=reward, resolved=reward == 1.0, decided_by="swebench"),
        started_at=claim.claimed_at,
        finished_at=time.time(),
    )


def _test_name(number: int) -> str:
    return f"tests/part_{number % 20:02d}/test_{number:04d}.py::TestSomething::test_that_it_behaves_as_before[utf8]"


@cache
def _source() -> str:
    return inspect.getsource(argparse)[:TEXT_CHARS]


def _turns(version: int) -> tuple[Turn, ...]:
    return tuple(replace(turn, versions=(VersionSpan(version, 0, _num_sampled(turn)),)) for turn in _drawn())


def _num_sampled(turn: Turn) -> int:
    return len(turn.sampled) // 4


@cache
def _drawn() -> tuple[Turn, ...]:
    drawn = random.Random(7)
    tokens = _tokens()
    per_turn, text_per_turn = len(tokens) // NUM_TURNS, len(_source()) // NUM_TURNS
    made: list[Turn] = []
    for number in range(NUM_TURNS):
        seen = tokens[number * per_turn : (number + 1) * per_turn]
        text = _source()[number * text_per_turn : (number + 1) * text_per_turn]
        num_fed, said = int(per_turn * (1 - SAMPLED_PART)), int(text_per_turn * SAMPLED_PART)
        made.append(
            Turn(
                kept_tokens=number * per_turn,
                fed=pack_int32s(seen[:num_fed]),
                sampled=pack_int32s(seen[num_fed:]),
                logprobs=pack_float32s([-drawn.random() for _ in seen[num_fed:]]),
                versions=(),
                stop="stop",
                text=text[:said],
                command=text[: said // 2],
                observation=Observation(exit_code=0, output=text[said:], dropped_chars=0, wall_s=0.01),
            )
        )
    return tuple(made)


def _tokens() -> Sequence[int]:
    """A word is a token, always the same."""
    words = re.findall(r"\w+|\s+|[^\w\s]", _source())
    return [zlib.crc32(word.encode()) % VOCAB_SIZE for word in words][:NUM_TOKENS]
