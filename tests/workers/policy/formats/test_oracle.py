"""Tool calls are read as SGLang's own parsers read them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infra.serving.engine import CPU_SHIM, HIDDEN, STAND_INS
from pipeline.chat import CallFormat, ReplyFormat
from workers.policy.formats import taken_apart

ROOT = Path(__file__).parents[4]
COMMANDS = (
    "ls",
    "cat > a.py <<'EOF'\ndef f(x):\n    return x < 1 and \"y\" != 'z'\nEOF",
    "grep -rn 'f\u00fcnf' . | head -5 && echo \U0001f600",
    "sed -i 's/a\\\\b/\\t/' x  # <b> & </b>",
    "cat <<'E'\n</think>\n[TOOL_CALLS] <|im_end|>\nE",
    'python -c "print({\\"a\\": [1, 2]})"',
)


def as_json(command: str, key: str = "arguments") -> str:
    return json.dumps({"name": "bash", key: {"command": command}}, ensure_ascii=False)


def arguments(command: str) -> str:
    return json.dumps({"command": command}, ensure_ascii=False)


def hermes(*commands: str) -> str:
    return "\n".join(f"<tool_call>\n{as_json(command)}\n</tool_call>" for command in commands)


def qwen_coder(*commands: str) -> str:
    call = "<tool_call>\n<function=bash>\n<parameter=command>\n{}\n</parameter>\n</function>\n</tool_call>"
    return "\n".join(call.format(command) for command in commands)


def glm(*commands: str) -> str:
    call = "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
    return "\n".join(call.format(command) for command in commands)


def glm_without_lines(*commands: str) -> str:
    call = "<tool_call>bash<arg_key>command</arg_key><arg_value>{}</arg_value></tool_call>"
    return "".join(call.format(command) for command in commands)


def llama(*commands: str) -> str:
    return "<|python_tag|>" + ";".join(as_json(command, "parameters") for command in commands)


def mistral_list(*commands: str) -> str:
    return f"[TOOL_CALLS] [{', '.join(as_json(command) for command in commands)}]"


def mistral_named(*commands: str) -> str:
    return "".join(f"[TOOL_CALLS]bash[ARGS]{arguments(command)}" for command in commands)


def deepseek_v3(*commands: str) -> str:
    call = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n```json\n{}\n```<｜tool▁call▁end｜>"  # noqa: RUF001
    calls = "\n".join(call.format(arguments(command)) for command in commands)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"  # noqa: RUF001


def deepseek_v31(*commands: str) -> str:
    call = "<｜tool▁call▁begin｜>bash<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # noqa: RUF001
    calls = "".join(call.format(arguments(command)) for command in commands)
    return f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"  # noqa: RUF001


def kimi(*commands: str) -> str:
    call = "<|tool_call_begin|>functions.bash:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
    calls = "".join(call.format(number, arguments(command)) for number, command in enumerate(commands))
    return f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def minimax(*commands: str) -> str:
    call = '<invoke name="bash">\n<parameter name="command">{}</parameter>\n</invoke>\n'
    calls = "".join(call.format(command) for command in commands)
    return f"<minimax:tool_call>\n{calls}</minimax:tool_call>"


def pythonic(*commands: str) -> str:
    calls = ", ".join(f"bash(command={command!r})" for command in commands)
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


def harmony(*commands: str) -> str:
    call = "<|start|>assistant<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{}<|call|>"
    return "".join(call.format(arguments(command)) for command in commands)


WRITERS: tuple[tuple[CallFormat, str, object], ...] = (
    ("hermes", "qwen25", hermes),
    ("hermes", "hermes", hermes),
    ("qwen3_coder", "qwen3_coder", qwen_coder),
    ("glm", "glm45", glm),
    ("glm", "glm47", glm_without_lines),
    ("llama3", "llama3", llama),
    ("mistral", "mistral", mistral_list),
    ("mistral", "mistral", mistral_named),
    ("deepseek", "deepseekv3", deepseek_v3),
    ("deepseek", "deepseekv31", deepseek_v31),
    ("kimi_k2", "kimi_k2", kimi),
    ("minimax", "minimax-m2", minimax),
    ("pythonic", "lfm2", pythonic),
    ("harmony", "gpt-oss", harmony),
)


def replies_of(writer) -> list[str]:
    """With one call each, with two calls, and with words before the call."""
    replies = [writer(command) for command in COMMANDS]
    replies.append(writer(COMMANDS[0], COMMANDS[1]))
    thought = "<|start|>assistant<|channel|>analysis<|message|>I look.<|end|>"
    before = thought if writer is harmony else "I look.\n"
    return [*replies, before + writer(COMMANDS[2])]


@pytest.fixture(scope="module")
def oracle() -> dict[tuple[str, str], dict]:
    """What SGLang's parsers find, by parser and text."""
    asked = [(parser, text) for _, parser, writer in WRITERS for text in replies_of(writer)]
    environment = os.environ | {
        "PYTHONPATH": f"{CPU_SHIM}:{ROOT}",
        "SWERVE_CPU_SHIM": ",".join((*STAND_INS, *(f"-{module}" for module in HIDDEN))),
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    program = Path(__file__).parent / "sglang_parsers.py"
    done = subprocess.run(
        [sys.executable, program], input=json.dumps(asked), env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(asked, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow_but_for("hermes-hermes-hermes", "qwen3_coder-qwen3_coder-qwen_coder")
@pytest.mark.parametrize(("form", "parser", "writer"), WRITERS, ids=lambda one: getattr(one, "__name__", one))
def test_calls_are_those_that_sglang_finds(form: CallFormat, parser: str, writer, oracle: dict) -> None:
    thoughts = "harmony" if form == "harmony" else "think"
    for text in replies_of(writer):
        reply = taken_apart(text, ReplyFormat(thoughts=thoughts, tool_calls=form), False, True)
        calls = [[call.name, json.loads(call.arguments)] for call in reply.tool_calls]
        expected = oracle[(parser, text)]
        assert calls == expected["calls"], text
        assert reply.content.strip() == expected["content"].strip(), text
