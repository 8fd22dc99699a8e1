"""What NCCL, Gloo and vLLM are told about how ranks reach each other, with a reason for each.

Two sources: the verdict on peer access inside a host (`peers.py`) and the links between hosts
(`links.py`). Nothing is set that no measurement or look at the host asks for, and a variable that a
recipe sets itself is left alone and said so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import HostError
from .peers import Verdict

# vLLM 0.32 and 0.33 reduce through peer memory in five ways; --disable-custom-all-reduce ends one.
_VETO_ENV = (
    ("NCCL_P2P_DISABLE", "1", "NCCL would hang or move wrong bytes through peer memory"),
    ("VLLM_ALLREDUCE_USE_SYMM_MEM", "0", "torch's symmetric memory is peer memory"),
    ("VLLM_ALLREDUCE_USE_FLASHINFER", "0", "FlashInfer's all-reduce is peer memory"),
    ("VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC", "0", "and so is its way over PCIe"),
)
_VETO_ARGS: tuple[tuple[str, Any, str], ...] = (
    ("disable-custom-all-reduce", True, "vLLM's own all-reduce trusts the driver's grant"),
    (
        "compilation-config",
        {"pass_config": {"fuse_allreduce_rms": False}},
        "the fused all-reduce and norm is FlashInfer's, over peer memory",
    ),
)
# What would undo a decision made here or in pinning.py.
_REFUSED = {
    "NCCL_SHM_DISABLE": "shared memory is the way that works without peer access",
    "NCCL_IGNORE_CPU_AFFINITY": "it would undo the pinning",
}


@dataclass(frozen=True)
class Setting:
    """One variable (`kind` "env", a text) or argument ("arg", a JSON value) with its reason.

    What is binding may not be contradicted by a recipe or an instance; the rest gives way to it.
    """

    kind: str
    name: str
    value: Any
    reason: str
    binding: bool = False


def for_peers(verdict: Verdict) -> list[Setting]:
    """What follows from a verdict: all of the veto, or none of it.

    Where peer access is proved and only vLLM's own all-reduce cannot be had, that one is switched
    off alone, so that the log of a start says who decided.
    """
    if verdict.verdict == "alone":
        return []
    if verdict.verdict == "veto":
        rows = [("env", *row) for row in _VETO_ENV] + [("arg", *row) for row in _VETO_ARGS]
        return [
            Setting(kind, name, value, f"{said}; {verdict.reason}", binding=True)
            for kind, name, value, said in rows
        ]
    if not verdict.custom_all_reduce:
        return [Setting("arg", "disable-custom-all-reduce", True, verdict.custom_reason)]
    return []


def for_links(host: dict) -> list[Setting]:
    """The environment of one host of several; `host` is one entry of `links.choose`.

    Computed for each host from its own interfaces: the names of the head's interfaces on a worker
    are a known way to hang at the start.
    """
    name = host["interface"]
    settings = [
        Setting("env", "VLLM_HOST_IP", host["address"], f"the address of {name} on this host"),
        Setting("env", "GLOO_SOCKET_IFNAME", name, "Gloo takes the first interface otherwise"),
        Setting("env", "TP_SOCKET_IFNAME", name, "and so does TensorPipe"),
        Setting("env", "NCCL_SOCKET_IFNAME", f"={name}", "exactly this interface, no prefix"),
    ]
    if host["rdma"]:
        devices = ",".join(one["device"] for one in host["rdma"])
        both = " (both PCIe twins of the port)" if len(host["rdma"]) > 1 else ""
        settings.append(Setting("env", "NCCL_IB_HCA", f"={devices}", f"RDMA of this link{both}"))
        indices = {one["gid_index"] for one in host["rdma"]}
        if len(indices) == 1 and None not in indices:
            value = str(indices.pop())
            why = "RoCE v2 over IPv4 in gid_attrs of every device"
            settings.append(Setting("env", "NCCL_IB_GID_INDEX", value, why))
    else:
        settings.append(
            Setting("env", "NCCL_IB_DISABLE", "1", "no RDMA device belongs to this link")
        )
    return settings


def apply(
    env: dict[str, str], args: dict[str, Any], settings: list[Setting]
) -> tuple[dict[str, str], dict[str, Any], list[dict]]:
    """Merge settings below what a recipe or an instance set; (env, args, decisions).

    A map (`compilation-config`) is merged key by key, ours above. Raises HostError for a variable
    that would undo a decision, and for one that contradicts a veto.
    """
    for name, why in _REFUSED.items():
        if env.get(name, "0") not in ("0", ""):
            raise HostError(
                f"{name}={env[name]} is set by the recipe or the instance: {why}.",
                f"Take {name} out of env.",
            )
    env, args, decisions = dict(env), dict(args), []
    for one in settings:
        target: dict[str, Any] = env if one.kind == "env" else args
        given = target.get(one.name)
        if isinstance(one.value, dict):
            target[one.name] = _merged(given if isinstance(given, dict) else {}, one.value)
        elif given is None or _text(given) == _text(one.value):
            target[one.name] = one.value
        elif one.binding:
            raise HostError(
                f"{one.name} is set to {_text(given)} by the recipe or the instance, and has to "
                f"be {_text(one.value)}: {one.reason}.",
                f"Take {one.name} out, or write peer_access: force into the profile's comm.",
            )
        else:
            why = f"set by the recipe or the instance; {_text(one.value)} here: {one.reason}"
            decisions.append({"what": one.name, "value": given, "why": why})
            continue
        decisions.append({"what": one.name, "value": target[one.name], "why": one.reason})
    return env, args, decisions


def _merged(below: dict, above: dict) -> dict:
    """Both maps, key by key; `above` wins."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = _merged(out[key], value) if both else value
    return out


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
