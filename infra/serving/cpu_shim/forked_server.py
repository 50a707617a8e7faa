"""SGLang's server with forked children: ``python -m forked_server FLAGS``, flags as of
``sglang.launch_server``.

SGLang spawns its scheduler and detokenizer because CUDA cannot cross a fork. Without CUDA a fork is safe
here (the parent has started no thread of its own yet) and much cheaper: the children share the parent's
imports instead of repeating them, which halves the start-up time and saves over half a gigabyte.
"""

import multiprocessing
import runpy
import sys

start_by = multiprocessing.set_start_method


def fork_whatever_is_asked(method: str | None, force: bool = False) -> None:
    start_by("fork", force=force)


if __name__ == "__main__":
    multiprocessing.set_start_method = fork_whatever_is_asked
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")
