"""SGLang's server with forked children and batched attention: `python -m forked_server FLAGS`, with the flags of
`sglang.launch_server`.

SGLang spawns its scheduler and detokenizer because CUDA cannot cross a fork. Without CUDA a fork is safe here (the parent
has started no thread yet) and much cheaper: the children share the parent's imports instead of repeating them, which halves
the start-up time and saves over half a gigabyte.
"""

import importlib
import multiprocessing
import runpy
import sys

set_start_method = multiprocessing.set_start_method


def always_fork(method: str | None, force: bool = False) -> None:
    set_start_method("fork", force=force)


if __name__ == "__main__":
    multiprocessing.set_start_method = always_fork
    importlib.import_module("batched_attention")  # it registers itself
    importlib.import_module("unpinned_memory").install()
    sys.argv[0] = "sglang.launch_server"
    runpy.run_module("sglang.launch_server", run_name="__main__")
