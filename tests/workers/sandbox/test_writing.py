"""Files are written into a container byte by byte as they are, whichever way they are printed."""

import random
import subprocess
from pathlib import Path

import pytest

from workers.sandbox.shell import LONGEST_COMMAND_BYTES, fits, printing

CONTENTS = {
    "nothing": b"",
    "text": b'it\'s `a` $test\\n\n%s "quoted"\n\n',
    "an option": b"-n",
    "no last newline": b"x\r\ny",
    "a list": b"a b\0it's\0-c\0",
    "an empty entry": b"\0a\0\0",
    "a NUL within": b"a\0b",
    "UTF-8": "é\n".encode(),
    "bytes": bytes(range(256)),
    "quotes": b"'" * 3000,
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=[name.replace(" ", "-") for name in CONTENTS])
def test_what_is_printed_is_the_content(content: bytes) -> None:
    for locale in ("C", "C.UTF-8"):
        shown = subprocess.run(["bash", "-c", printing(content)], env={"LC_ALL": locale}, capture_output=True)
        assert (shown.returncode, shown.stdout, shown.stderr) == (0, content, b"")


def test_plain_text_takes_no_process(tmp_path: Path) -> None:
    for content in (b"", CONTENTS["text"], b"tests/test_a.py\0tests/test_b.py\0"):
        shown = subprocess.run(
            ["/bin/bash", "-c", printing(content)], env={"PATH": str(tmp_path)}, capture_output=True
        )
        assert shown.stdout == content


def test_a_command_is_hardly_longer_than_its_content_in_base64() -> None:
    content = random.Random(1).randbytes(30_000)
    for each in (content, b"'" * 30_000, b"a\0" * 15_000):
        assert len(printing(each)) < 41_000


def test_characters_count_by_their_bytes() -> None:
    assert fits("x" * LONGEST_COMMAND_BYTES)
    assert not fits("é" * LONGEST_COMMAND_BYTES)
