"""Tasks whose test runs a witness watches."""

from pipeline.task import ExitCode, File, Task
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage


def task_of(image: RepoImage, script: str, tests: str, **changes: object) -> Task:
    """A task with these `tests` in tests/test_calc.py, decided by the exit status of `script`."""
    verdict = ExitCode(
        eval_script=f"set -e\n{script}\n", files=(File(path="tests/test_calc.py", content=tests.encode()),)
    )
    return make_task(image.tag, verdict=verdict, **changes)
