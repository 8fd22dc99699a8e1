"""What a host has of Docker, whether we may change it, and its daemon.json.

Nothing here replaces a file whole: our keys are merged into daemon.json, what they replaced is
written down beside it, and taking them out restores exactly that. Systems whose vendor manages
Docker (DGX OS) are looked at and left alone.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

from .errors import HostError

OLDEST, OLDEST_FOR_GPUS = (20, 10), (25, 0)
# Engines before this one know CDI devices and have them switched off (moby#49963).
CDI_BY_DEFAULT = (28, 2)
RECORD = ".exl3.json"
_VERSION = re.compile(r"(\d+)\.(\d+)")
_MISSING = {"was": "missing"}


def look(root: str = "/", has_gpus: bool = False, manage: str = "auto") -> dict:
    """{installed, version, good, vendor, snap, toolkit, action, reason, ...}.

    action is `none`, `install` or `refuse`; with `refuse`, reason says what to do by hand.
    toolkit_action is `none` or `install`. The rest is what a package repository is written with,
    and whether one is there already: two entries of one repository make apt refuse both.
    """
    base = Path(root)
    found = {
        "version": _version(["dockerd", "--version"], root),
        "toolkit": _version(["nvidia-ctk", "--version"], root),
        "vendor": vendor(base),
        "snap": (base / "snap/bin/docker").exists() or (base / "var/snap/docker").exists(),
    }
    oldest = OLDEST_FOR_GPUS if has_gpus else OLDEST
    names = _os_release(base)
    found |= {
        "distribution": names.get("ID", "debian"),
        "codename": names.get("VERSION_CODENAME", "stable"),
        "deb_arch": {"aarch64": "arm64"}.get(platform.machine(), "amd64"),
        "has_repository": _has_repository(base, "download.docker.com"),
        "has_toolkit_repository": _has_repository(base, "libnvidia-container"),
        "has_record": (base / f"etc/docker/daemon.json{RECORD}").exists(),
    }
    found["installed"] = found["version"] is not None
    found["good"] = found["installed"] and _numbers(found["version"]) >= oldest
    action, reason = _decide(found, oldest, has_gpus, manage)
    missing = found["toolkit"] is None and has_gpus
    may = manage == "true" or (manage == "auto" and not found["vendor"])
    toolkit = "install" if missing and may else "none"
    return {**found, "action": action, "reason": reason, "toolkit_action": toolkit}


def _decide(found: dict, oldest: tuple, has_gpus: bool, manage: str) -> tuple[str, str]:
    wanted = ".".join(map(str, oldest)) + (" for GPUs" if has_gpus else "")
    if found["snap"]:
        return "refuse", (
            "Docker is a snap here, which sees neither GPUs nor the store. "
            "Remove it (snap remove docker) and deploy again."
        )
    if found["good"]:
        return "none", f"Docker {found['version']} is there, and {wanted} or newer is needed"
    have = f"Docker {found['version']} is there" if found["installed"] else "Docker is not there"
    if found["vendor"] and manage != "true":
        return "refuse", (
            f"{have}, {wanted} or newer is needed, and {found['vendor']} is managed by its vendor. "
            "Update it with the vendor's own means."
        )
    if manage == "false":
        return (
            "refuse",
            f"{have}, {wanted} or newer is needed. Install it, or set exl3_engine_manage.",
        )
    if found["installed"]:
        return "refuse", (
            f"{have}, and {wanted} or newer is needed. An engine that runs is not replaced by us: "
            "upgrade it, or add a newer repository and remove the old package."
        )
    return "install", f"{have}, {wanted} or newer is needed"


def _os_release(base: Path) -> dict[str, str]:
    try:
        text = (base / "etc/os-release").read_text()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name: value.strip("\"'") for name, _, value in pairs}


def _has_repository(base: Path, word: str) -> bool:
    lists = base / "etc/apt/sources.list.d"
    files = [base / "etc/apt/sources.list", *lists.glob("*.list"), *lists.glob("*.sources")]
    return any(word in one.read_text(errors="replace") for one in files if one.is_file())


def vendor(base: Path) -> str | None:
    """The name of a system whose Docker belongs to its vendor, else None."""
    if (base / "etc/dgx-release").exists():
        text = (base / "etc/dgx-release").read_text()
        name = re.search(r'DGX_NAME="?([^"\n]+)', text)
        return name[1] if name else "DGX OS"
    try:
        text = (base / "etc/os-release").read_text()
    except OSError:
        return None
    return "DGX OS" if re.search(r"(?i)\bdgx\b", text) else None


def _version(command: list[str], root: str) -> str | None:
    if (
        root != "/"
        or shutil.which(command[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin") is None
    ):
        return None
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"},
    )
    found = re.search(r"\d+\.\d+(\.\d+)?", done.stdout)
    return found[0] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    found = _VERSION.match(version)
    return tuple(int(part) for part in found.groups()) if found else (0, 0)


def wanted_settings(found: dict, ours: dict, has_gpus: bool, manage: str = "auto") -> dict:
    """Our keys of daemon.json: those asked for, and the switch for CDI devices where it is needed.

    `found` is the answer of `look`. A system whose vendor manages Docker gets what was asked for
    and nothing else. Raises HostError where the engine that the system's packages brought is too
    old for GPUs.
    """
    if has_gpus and found["action"] == "refuse":
        raise HostError(
            found["reason"],
            "Docker's own packages are new enough: exl3_engine_repository: true with "
            "exl3_engine_packages: [docker-ce, docker-ce-cli, containerd.io].",
        )
    theirs = found["vendor"] is not None and manage != "true"
    if not has_gpus or theirs or _numbers(found["version"] or "") >= CDI_BY_DEFAULT:
        return ours
    return merged({"features": {"cdi": True}}, ours)


def merged(current: dict, ours: dict) -> dict:
    """`current` with our keys in it, nested maps merged; its own keys and their order stay."""
    out = dict(current)
    for key, value in ours.items():
        old = out.get(key)
        out[key] = (
            merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else value
        )
    return out


def before(current: dict, ours: dict) -> dict:
    """What our keys replace, so that `restored` can put it back."""
    out = {}
    for key, value in ours.items():
        if key not in current:
            out[key] = dict(_MISSING)
        elif isinstance(value, dict) and isinstance(current[key], dict):
            out[key] = {"was": "map", "keys": before(current[key], value)}
        else:
            out[key] = {"was": "value", "value": current[key]}
    return out


def restored(current: dict, record: dict) -> dict:
    """`current` without our keys, with what they replaced."""
    out = dict(current)
    for key, old in record.items():
        if old["was"] == "missing":
            out.pop(key, None)
        elif old["was"] == "map":
            if isinstance(out.get(key), dict):
                out[key] = restored(out[key], old["keys"])
        else:
            out[key] = old["value"]
    return out


def read_settings(path: Path) -> dict:
    """daemon.json as it is. Raises HostError where it is no JSON object."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError as error:
        raise HostError(
            f"{path} is no JSON ({error}), so the engine would not start with it either.",
            "Correct it by hand; nothing was changed.",
        ) from None
    if not isinstance(value, dict):
        raise HostError(f"{path} holds no JSON object.", "Correct it by hand.")
    return value


def apply_settings(path: Path, ours: dict, is_check: bool = False) -> tuple[bool, str, str]:
    """Merge our keys into daemon.json; (changed, text before, text after). Raises HostError."""
    record_path = path.with_name(path.name + RECORD)
    current = read_settings(path)
    record = json.loads(record_path.read_text()) if record_path.exists() else {"keys": {}}
    base = restored(current, record["keys"])
    wanted = merged(base, ours)
    changed = wanted != current
    if not changed or is_check:
        return changed, _text(current), _text(wanted)
    refuse_flags(path, ours)
    check_file(path, wanted)
    if ours:
        keep = {"existed": record.get("existed", path.exists()), "keys": before(base, ours)}
        _write(record_path, _text(keep))
        _write(path, _text(wanted))
        return True, _text(current), _text(wanted)
    if wanted or record.get("existed", True):
        _write(path, _text(wanted))
    else:
        path.unlink(missing_ok=True)
    record_path.unlink(missing_ok=True)
    return True, _text(current), _text(wanted)


def refuse_flags(path: Path, ours: dict, units: Path = Path("/etc/systemd/system")) -> None:
    """Raise HostError where a unit's command line sets one of our keys: the engine refuses both."""
    for unit in sorted([*units.glob("docker.service"), *units.glob("docker.service.d/*.conf")]):
        text = unit.read_text()
        for key in ours:
            if re.search(rf"^ExecStart=.*--{re.escape(key)}\b", text, re.M):
                raise HostError(
                    f"{unit} sets --{key} on the command line, and {path} may not set it too.",
                    f"Remove it there, or leave {key} out of exl3_engine_daemon_json.",
                )


def check_file(path: Path, settings: dict) -> None:
    """Let the engine itself judge the settings, where its version can. Raises HostError."""
    program = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        return
    draft = path.with_name(path.name + ".draft")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(_text(settings))
    try:
        done = subprocess.run(
            [program, "--validate", "--config-file", str(draft)], capture_output=True, text=True
        )
    finally:
        draft.unlink()
    said = (done.stderr or done.stdout).strip()
    if done.returncode != 0 and "unknown flag: --validate" not in said:
        raise HostError(
            f"the engine refuses these settings for {path}: {said.splitlines()[-1]}",
            "Correct exl3_engine_daemon_json; nothing was changed.",
        )


def _text(value: dict) -> str:
    return json.dumps(value, indent=2) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text)
    os.replace(draft, path)
