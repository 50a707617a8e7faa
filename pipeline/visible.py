"""Text that somebody else wrote, as it may be printed: what a terminal would obey, or show as nothing, is made visible.

Policies, commands and data sets wrote much of what our commands print. A control character could move the cursor, set the title or hide a
line; a bidirectional override shows text in another order than it has; characters without width hide in names.
"""

import functools
import re
import unicodedata

_PICTURES = 0x2400  # of the control characters 0 to 31, in their order
_PICTURE_OF_DELETE = "\u2421"
_EXTRAORDINARY = re.compile(r"[^\n\t -~]")
# Letters and marks that show as nothing although their category does not say so: fillers and joiners.
_BLANKS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0")
_SPACES = "Zs"


def visible(text: str) -> str:
    """The text with pictures or numbers of its invisible characters. Line ends and tabs stay."""
    return _EXTRAORDINARY.sub(lambda found: _shown(found[0]), text)


def visible_line(text: str) -> str:
    """The same as one line: a name with a line end in it cannot look like two rows."""
    return visible(text).replace("\n", _shown("\n")).replace("\t", _shown("\t"))


@functools.lru_cache(maxsize=4096)
def _shown(character: str) -> str:
    code = ord(character)
    if code < 32:
        return chr(_PICTURES + code)
    if code == 127:
        return _PICTURE_OF_DELETE
    is_space = unicodedata.category(character) == _SPACES
    if (character.isprintable() or is_space) and character not in _BLANKS:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
