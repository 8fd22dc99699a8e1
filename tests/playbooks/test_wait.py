"""Reasons found in logs. The log lines are what vLLM 0.32 prints."""

import re

import pytest
from exl3_host import hints, wait

ENGINE_LOG = """\
[exl3 2026-01-01 10:00:00] start 1: ["vllm"]
(APIServer pid=11) INFO 01-01 10:00:09 [utils.py:253] non-default args: {}
(Core pid=12) ERROR 01-01 10:00:20 [core.py:9] EngineCore failed to start.
(Core pid=12) ERROR 01-01 10:00:20 [core.py:9] Traceback (most recent call last):
(Core pid=12) ERROR 01-01 10:00:20 [core.py:9]   File "core.py", line 1, in run
(Core pid=12) ERROR 01-01 10:00:20 [core.py:9] ValueError: No available memory for the cache blocks.
(APIServer pid=11) Traceback (most recent call last):
(APIServer pid=11) RuntimeError: Engine core initialization failed. See root cause above.
"""
CONFIG_LOG = """\
(APIServer pid=11) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=11)   Value error, Unknown quantization method: exl3. Must be one of ['awq'].
"""


def test_first_exception_is_the_root_cause():
    found = hints.first_exception(ENGINE_LOG.splitlines())
    assert found == "ValueError: No available memory for the cache blocks."
    assert hints.match(ENGINE_LOG.splitlines())[0].id == "no-cache-blocks"


def test_exception_whose_message_comes_on_the_next_line():
    found = hints.first_exception(CONFIG_LOG.splitlines())
    assert found.endswith("Unknown quantization method: exl3. Must be one of ['awq'].")
    assert hints.match(CONFIG_LOG.splitlines())[0].id == "plugin-missing"


def test_usage_message_without_exception_is_a_reason(tmp_path):
    lines = ["usage: vllm serve [model_tag]", "vllm: error: unrecognized arguments: --wings 2"]
    (tmp_path / "x.log").write_text("\n".join(lines))
    log = wait.FileLog(str(tmp_path / "x.log"))
    failure = wait.NotReady("port", "the server ended with exit status 2", log)
    assert "unrecognized arguments: --wings 2" in str(failure)
    assert "does not have an option" in str(failure) and failure.tail == lines


def test_only_the_last_start_counts():
    again = ENGINE_LOG + '[exl3 2026-01-01 10:05:00] start 2: ["vllm"]\nfine\n'
    lines = hints.last_start(again.splitlines())
    assert len(lines) == 2 and hints.first_exception(lines) is None


def test_prose_about_errors_is_no_exception():
    lines = ["INFO 01-01 10:00:09 [a.py:1] Error handling is on", "No error", "  raise ValueError"]
    assert hints.first_exception(lines) is None


def test_every_hint_is_in_the_documentation(checkout):
    text = (checkout / "docs" / "troubleshooting.md").read_text()
    plain = " ".join(text.split())
    for hint in hints.HINTS:
        assert hint.cause in plain and hint.fix in plain, hint.id


@pytest.mark.parametrize("hint", hints.HINTS, ids=lambda hint: hint.id)
def test_hints_compile_and_are_sentences(hint):
    re.compile(hint.pattern)
    assert hint.cause.endswith(".") and hint.fix.endswith(".")


def test_hint_ids_are_unique():
    names = [hint.id for hint in hints.HINTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("set_mempolicy: Operation not permitted", "mempolicy"),
        ("ncclUnhandled ... Bus error (core dumped)", "shared-memory"),
        ("Error 804: forward compatibility was attempted on non supported HW", "driver-too-old"),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system",
            "driver-too-old",
        ),
        ("Failed to initialize NVML: Unknown Error", "nvml-lost"),
        ("CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=0", "cdi-missing"),
        ('could not select device driver "" with capabilities: [[gpu]]', "cdi-missing"),
        ("ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'", "ptxas-too-old"),
        ("CUDA error: no kernel image is available for execution on the device", "no-kernel-image"),
        ("RuntimeError: No CUDA GPUs are available", "no-gpu"),
        ("ValueError: No available memory for the cache blocks. Try increasing", "no-cache-blocks"),
        ("OSError: [Errno 98] Address already in use", "address-in-use"),
        ("vllm: error: unrecognized arguments: --wings", "unknown-argument"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out-of-memory"),
    ],
)
def test_what_people_report_has_a_hint(line, hint):
    assert hints.match(["loading", line])[0].id == hint
