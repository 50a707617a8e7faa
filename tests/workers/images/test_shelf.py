"""The host's record is written by several processes at once, and keeps the latest of what they say."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workers.images.conftest import ROOT
from workers.images.api import ImageError
from workers.images.eviction import Shelf

WRITER = """
import sys
from pathlib import Path
from workers.images.eviction import Shelf
shelf = Shelf(Path(sys.argv[1]), "ENGINE:ID")
for number in range(10):
    shelf.note_used("image:shared", at=float(number))
    shelf.hold(f"image:{sys.argv[2]}", str(number), until=9e9)
"""


def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    writers = [subprocess.Popen([*command, str(number)], cwd=ROOT) for number in range(4)]
    assert [writer.wait(240) for writer in writers] == [0, 0, 0, 0]
    shelf = Shelf(tmp_path, "ENGINE:ID")
    assert shelf.held() == {f"image:{number}" for number in range(4)}
    assert shelf.uses()["image:shared"] == 9.0


def test_an_older_use_does_not_hide_a_later_one(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, "id")
    shelf.note_used("image:1", at=20.0)
    shelf.note_used("image:1", at=10.0)
    assert shelf.uses() == {"image:1": 20.0}


def test_a_hold_ends_with_its_last_holder_or_its_time(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path, "id")
    for holder, until in (("one", time.time() + 60), ("two", time.time() + 60), ("late", time.time() - 1)):
        shelf.hold("image:1", holder, until=until)
    shelf.release("image:1", "one")
    assert shelf.held() == {"image:1"}
    shelf.release("image:1", "two")
    assert shelf.held() == set()


def test_another_docker_host_has_a_record_of_its_own(tmp_path: Path) -> None:
    Shelf(tmp_path, "one").expect("image:1", "pulled")
    assert Shelf(tmp_path, "two").entries() == {}


def test_a_directory_that_cannot_be_used_is_said_with_its_variable(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ImageError, match="SWERVE_STATE_DIR"):
        Shelf(file / "below", "id")
