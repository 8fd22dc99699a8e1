"""What identifies a GPU: the facts that a measurement depends on, asked of torch and of NVML."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceFacts:
    """One GPU as it stands now. Numbers that the driver does not tell are None."""

    name: str
    compute_capability: str
    sms: int
    l2_bytes: int
    shared_bytes: int
    """Largest shared memory of one block."""
    memory_bytes: int
    power_limit_w: int | None
    driver: str | None
    cuda_runtime: str | None
    torch: str

    @property
    def driver_major(self) -> int | None:
        """First number of the driver version."""
        return int(self.driver.split(".")[0]) if self.driver else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Monitor:
    """Clocks, power and limits of one GPU, read through NVML; never changed.

    Without the package nvidia-ml-py the power limit and driver version come from nvidia-smi, and
    `sample()` has nothing to say.
    """

    def __init__(self, uuid: str | None = None):
        """Opens NVML. `uuid` as torch prints it, with or without "GPU-"; None is the first GPU."""
        self._nvml: Any = None
        self._handle: Any = None
        self._uuid = uuid if uuid is None or uuid.startswith("GPU-") else f"GPU-{uuid}"
        try:
            import pynvml

            pynvml.nvmlInit()
            if self._uuid is None:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            else:
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            self._nvml = pynvml
        except Exception:  # absent package, absent library, or a device that NVML does not list
            self._nvml = None

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Result of one NVML call; None where this device does not support it."""
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except self._nvml.NVMLError:
            return None

    def _smi(self, field: str) -> str | None:
        program = shutil.which("nvidia-smi")
        if program is None:
            return None
        command = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
        if self._uuid is not None:
            command += ["-i", self._uuid]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            return None
        lines = result.stdout.strip().splitlines() if result.returncode == 0 else []
        text = lines[0].strip() if lines else ""
        return text if text and not text.startswith("[") and text != "N/A" else None

    def power_limit_w(self) -> int | None:
        """Power limit in watts; None on devices without one (integrated GPUs)."""
        milliwatts = self._ask("nvmlDeviceGetPowerManagementLimit")
        if milliwatts is not None:
            return round(milliwatts / 1000)
        text = self._smi("power.limit")
        return round(float(text)) if text is not None else None

    def driver(self) -> str | None:
        """Driver version such as "580.159.04"."""
        if self._nvml is None:
            return self._smi("driver_version")
        version = self._nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else version

    def sample(self) -> dict[str, float]:
        """Clocks in MHz, power in watts and temperature in degrees, at this moment."""
        if self._nvml is None:
            return {}
        milliwatts = self._ask("nvmlDeviceGetPowerUsage")
        values = {
            "sm_mhz": self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            "memory_mhz": self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "temperature_c": self._ask("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
        }
        return {name: value for name, value in values.items() if value is not None}


def require_device() -> None:
    """Raises RuntimeError where torch has no CUDA device to work with."""
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} finds no CUDA device: this needs a GPU, its driver and a "
            "torch built for CUDA"
        )


def monitor(index: int = 0) -> Monitor:
    """NVML's view of a torch device, matched by UUID since the two count differently.

    Raises:
        RuntimeError: no CUDA device.
    """
    require_device()
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    return Monitor(None if uuid is None else str(uuid))


def device_facts(index: int = 0, nvml: Monitor | None = None) -> DeviceFacts:
    """The facts of torch's device `index`.

    Raises:
        RuntimeError: no CUDA device, or a torch without CUDA.
    """
    require_device()
    properties = torch.cuda.get_device_properties(index)
    nvml = monitor(index) if nvml is None else nvml
    return DeviceFacts(
        name=properties.name,
        compute_capability=f"{properties.major}.{properties.minor}",
        sms=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        shared_bytes=properties.shared_memory_per_block_optin,
        memory_bytes=properties.total_memory,
        power_limit_w=nvml.power_limit_w(),
        driver=nvml.driver(),
        cuda_runtime=torch.version.cuda,
        torch=torch.__version__,
    )
