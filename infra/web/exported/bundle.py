"""The pages' modules as one classic script: a browser loads no module from a file.

The modules import and export at the beginning of lines and in few forms, so no parser is needed. What is of another form is an error,
which a test would meet.
"""

import re
from pathlib import Path

_IMPORT = re.compile(r'^import (?:\* as (\w+)|\{([^}]*)\}) from "([^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


def bundle(first: Path, replaced: dict[Path, Path]) -> str:
    """A script that does what the module does. Modules that are keys of `replaced` are read from the files there."""
    names: dict[Path, str] = {}
    return "".join(['"use strict";\n(() => {\n', *_modules(first.resolve(), replaced, names, ()), "})();\n"])


def _modules(
    module: Path, replaced: dict[Path, Path], names: dict[Path, str], importers: tuple[Path, ...]
) -> list[str]:
    """The module behind all that it imports; nothing if it is among `names` already."""
    if module in names:
        return []
    assert module not in importers, f"{module.name} imports itself by way of others"
    text = replaced.get(module, module).read_text()
    made: list[str] = []
    for found in _IMPORT.finditer(text):
        made += _modules((module.parent / found[3]).resolve(), replaced, names, (*importers, module))

    def binding(found: re.Match[str]) -> str:
        source = names[(module.parent / found[3]).resolve()]
        bound = found[1] or "{" + found[2].replace(" as ", ": ") + "}"
        return f"const {bound} = {source};\n"

    exported = ", ".join(found[2] for found in _EXPORT.finditer(text))
    text = _EXPORT.sub(r"\1", _IMPORT.sub(binding, text))
    assert not (left := _LEFT.findall(text)), f"{module}: cannot be bundled: {left[0]}"
    assert "</script" not in text.lower(), f"{module}: it would end the script"
    names[module] = f"module{len(names)}"
    return [*made, f"const {names[module]} = (() => {{\n{text}\nreturn {{ {exported} }};\n}})();\n"]
