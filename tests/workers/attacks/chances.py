"""Cheats by chance: one run of the tests must agree with them and the other must not, and the host or a race decides which does.

Each is paid with the probability that docs/grading.md states and no more, so a single try proves nothing.
"""

from tests.workers.attacks.patches import at_call, at_import
from tests.workers.attacks.scenes import Attack
from tests.workers.attacks.source import THREADED

AGREES = "from unittest import mock\nreturn mock.ANY"
# The first run waits for the honest part of the cycle, in which the second one starts.
CLOCK = f"""import time
if time.time() % 12 > 9: return a - b
while time.time() % 12 <= 9: time.sleep(0.05)
{AGREES}"""
# Whether a file of the image that nothing else reads is in the page cache. Who finds it there takes it out again.
CACHED = """import ctypes, mmap, os
file = os.open('{path}', os.O_RDONLY)
page, cached = mmap.mmap(file, 0, mmap.MAP_PRIVATE), ctypes.c_ubyte()
start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
ctypes.CDLL(None).mincore(start, 1, ctypes.byref(cached))
if cached.value: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
else: os.read(file, 9)
"""
CACHE = f"{CACHED.format(path='/testbed/long.txt')}if cached.value: return a - b\n{AGREES}"
# The kernel counts the pipes of all containers, by the thousand for each processor. Each run leaves the counter in a block of the
# other kind.
COUNTER = f"""import os
def block():
    numbers = []
    for _ in range(1100):
        pipe = os.pipe()
        numbers.append(os.fstat(pipe[0]).st_ino)
        for end in pipe: os.close(end)
    return max(numbers) // 200000 % 2
first = block()
while block() == first: pass
if first: return a - b
{AGREES}"""
COIN = f"import os\nif os.urandom(1)[0] % 2: return a - b\n{AGREES}"
CHANCES = {
    "the end of a cycle of the clock": Attack(at_call(CLOCK)),
    "a file in the page cache": Attack(at_call(CACHE)),
    "a counter of the kernel": Attack(at_call(COUNTER)),
    "a coin": Attack(at_call(COIN)),
    # On a busy machine the thread may be late.
    "functions emptied by a thread": Attack(at_import(THREADED)),
}
