"""Tool calls written as a list of Python calls: `<|tool_call_start|>[bash(command="ls")]<|tool_call_end|>` (LFM2)."""

import ast

from pipeline.chat import ToolCall
from workers.policy.formats.reading import ReadCalls, arguments_text, malformed

_BEGIN, _END = "<|tool_call_start|>", "<|tool_call_end|>"


def python_calls(text: str) -> ReadCalls:
    """Only keyword arguments with literal values are read; anything else is a malformed call."""
    words, found, rest = text.partition(_BEGIN)
    if not found:
        return ReadCalls(text, ())
    source, _, trailing = rest.partition(_END)
    content = "\n".join(piece for piece in (words.strip(), trailing.strip()) if piece)
    try:
        tree = ast.parse(source.strip(), mode="eval").body
        elements = tree.elts if isinstance(tree, ast.List) else [tree]
        return ReadCalls(content, tuple(_call(element) for element in elements))
    except (SyntaxError, ValueError):
        return ReadCalls(content, (malformed(source),))


def _call(element: ast.expr) -> ToolCall:
    """Raises ValueError for anything but a call of a name with literal keyword arguments."""
    if not isinstance(element, ast.Call) or not isinstance(element.func, ast.Name) or element.args:
        raise ValueError("not a call with keyword arguments")
    arguments = {one.arg: ast.literal_eval(one.value) for one in element.keywords if one.arg is not None}
    try:
        return ToolCall(name=element.func.id, arguments=arguments_text(arguments))
    except TypeError as error:  # a literal that JSON has no form for, such as bytes
        raise ValueError(str(error)) from error
