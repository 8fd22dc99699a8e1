"""A process to be pinned: takes private and shared memory, starts a thread, says so and waits.

    guest_worker.py [--shm FILE [--open]] [--ranks 0,1 | --ranks -,-] [--stray]

--open maps a segment that somebody else has filled. --ranks starts one child per entry as vLLM
does, through numactl on that node, or unbound for `-`. --stray lets one thread run everywhere. It
imports little, since every module costs a guest without hardware help a tenth of a second.
"""

import mmap
import os
import subprocess
import sys
import threading

SIZE = 16 << 20


def value(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


def main() -> None:
    private = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for offset in range(0, SIZE, mmap.PAGESIZE):
        private[offset] = 1
    if "--shm" in sys.argv:
        fresh = "--open" not in sys.argv
        with open(value("--shm"), "w+b" if fresh else "r+b") as file:
            file.truncate(SIZE)
            shared = mmap.mmap(file.fileno(), SIZE)
        for offset in range(0, SIZE, mmap.PAGESIZE):
            if fresh:
                shared[offset] = 1
            else:
                shared[offset]
    children = []
    for node in value("--ranks").split(",") if "--ranks" in sys.argv else []:
        bound = ["numactl", f"--cpunodebind={node}", f"--membind={node}"]
        command = [*([] if node == "-" else bound), sys.executable, "-S", sys.argv[0]]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        children.append(child)
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    stay = threading.Event()
    thread = threading.Thread(target=stay.wait, daemon=True)
    thread.start()
    if "--stray" in sys.argv:
        os.sched_setaffinity(thread.native_id or 0, range(os.cpu_count() or 1))
    print("ready", flush=True)
    sys.stdin.read()
    for child in children:
        child.kill()
        child.wait()


main()
