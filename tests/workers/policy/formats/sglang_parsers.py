"""SGLang's own parsers of tool calls, as the oracle of ours: reads [[parser, text], ...] from standard input, writes what each finds.

They need torch and all of SGLang, so they run in a process of their own, with the stand-ins of `infra/serving/cpu_shim`.
"""

import json
import sys

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from pipeline.agent.upstream import BASH_TOOL


def found(parser: str, text: str) -> dict[str, object]:
    content, calls = FunctionCallParser([Tool(**BASH_TOOL)], parser).parse_non_stream(text)
    return {"content": content, "calls": [[call.name, json.loads(call.parameters)] for call in calls]}


if __name__ == "__main__":
    print(json.dumps([found(parser, text) for parser, text in json.load(sys.stdin)]))
