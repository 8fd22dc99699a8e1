"""Asks NVML for the memory node of each GPU and prints one JSON list; run as a program.

It stands alone (no import from this package), because commands.py runs its text in a process of its
own: a driver in trouble blocks whoever asks. Only libnvidia-ml.so.1 is needed, no Python package.

Each entry: {"uuid", "nodes", "memory_node"}. `nodes` are the NUMA nodes nearest to the GPU
(nvmlDeviceGetMemoryAffinity, scope node); `memory_node` is the node that the GPU's own memory forms
on coherent parts (nvmlDeviceGetNumaNodeId) and must never be taken for the first. Both are null
where NVML does not tell.
"""

import ctypes
import json
import sys

SCOPE_NODE = 0
WORDS = 16  # 1024 nodes, the kernel's largest MAX_NUMNODES
SUCCESS = 0


def text(lib: ctypes.CDLL, device: ctypes.c_void_p) -> "str | None":
    buffer = ctypes.create_string_buffer(96)
    if lib.nvmlDeviceGetUUID(device, buffer, 96) != SUCCESS:
        return None
    return buffer.value.decode(errors="replace")


def nodes(lib: ctypes.CDLL, device: ctypes.c_void_p) -> "list[int] | None":
    ask = getattr(lib, "nvmlDeviceGetMemoryAffinity", None)
    words = (ctypes.c_ulong * WORDS)()
    if ask is None or ask(device, WORDS, words, SCOPE_NODE) != SUCCESS:
        return None
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    return [i for i in range(WORDS * width) if words[i // width] >> (i % width) & 1]


def memory_node(lib: ctypes.CDLL, device: ctypes.c_void_p) -> "int | None":
    ask = getattr(lib, "nvmlDeviceGetNumaNodeId", None)
    value = ctypes.c_uint()
    if ask is None or ask(device, ctypes.byref(value)) != SUCCESS:
        return None
    # A GPU without a node of its own answers with all bits set.
    return None if value.value >= 1 << 16 else value.value


def main(library: str = "libnvidia-ml.so.1") -> int:
    try:
        lib = ctypes.CDLL(library)
    except OSError as error:
        print(error, file=sys.stderr)
        return 3
    if lib.nvmlInit_v2() != SUCCESS:
        print("nvmlInit failed", file=sys.stderr)
        return 9
    count = ctypes.c_uint()
    found = []
    if lib.nvmlDeviceGetCount_v2(ctypes.byref(count)) == SUCCESS:
        for index in range(count.value):
            device = ctypes.c_void_p()
            if lib.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == SUCCESS:
                found.append(
                    {
                        "uuid": text(lib, device),
                        "nodes": nodes(lib, device),
                        "memory_node": memory_node(lib, device),
                    }
                )
    lib.nvmlShutdown()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
