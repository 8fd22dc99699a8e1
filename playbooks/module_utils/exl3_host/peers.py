"""Whether the GPUs of one server may read each other's memory: one verdict for all who would.

A grant by the driver is no evidence: there are hosts where it is given and the first all-reduce
hangs, or where copies arrive with wrong bytes. And a veto for NCCL alone is none, since vLLM's own
all-reduce, FlashInfer's and torch's symmetric memory use peer access on their own. So one verdict
comes out of a measurement (`bench/peer_access.py`) and all of them follow it; see `nccl.py`.

The rules, first match wins:

    one rank                                    alone   nothing to decide
    asked to be off                             veto    somebody knows better
    asked to be forced                          use     with a warning
    no report                                   veto    nothing is proved
    a report of other devices or rank count     veto    it proves nothing for these
    all-reduce wrong or hung without peers      error   no setting would help
    a pair is not granted                       veto    host memory carries it
    a copy was wrong, failed or stood still     veto    the driver's grant is not kept
    the all-reduce at this rank count did not   veto    the driver's grant is not kept
    come out right
    else                                        use     measured

vLLM's own all-reduce needs more than that: 2, 4, 6 or 8 ranks on one host, and beyond two ranks
NVLink between all of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .errors import HostError

SCHEMA = "exl3-peers/1"
WANTED = ("verify", "disable", "force")
# vllm/distributed/device_communicators/custom_all_reduce.py
CUSTOM_WORLDS = (2, 4, 6, 8)
# A hang costs the deadline of a step, for each of the stages.
TEST_TIMEOUT_S = 420.0


@dataclass(frozen=True)
class Verdict:
    """What the ranks of one server may do.

    verdict: "use", "veto" or "alone". layers says for each step of the proof what was found:
    granted (by the driver), moves (copies), collects (all-reduce), each "yes", "no" or "unknown".
    """

    verdict: str
    ranks: int
    reason: str
    custom_all_reduce: bool
    custom_reason: str
    layers: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict:
        """The verdict as one JSON object."""
        return {**asdict(self), "warnings": list(self.warnings)}


def decide(
    report: dict | None,
    ranks: int,
    wanted: str = "verify",
    full_mesh: bool | None = None,
    devices: list[str] | None = None,
) -> Verdict:
    """The verdict for `ranks` ranks on one host, by the rules above.

    report: what `bench/peer_access.py` printed, or None. wanted: verify, disable or force.
    full_mesh: whether NVLink joins each pair, None where nobody knows. devices: PCI addresses the
    server will use, where they are known; a report of others counts as none.
    Raises HostError for an unknown `wanted`, a broken report, and a host on which the collective
    fails even without peer access.
    """
    if wanted not in WANTED:
        raise HostError(f"peer_access '{wanted}' is not known.", f"Use {', '.join(WANTED)}.")
    if report is not None and report.get("schema") != SCHEMA:
        raise HostError(
            f"this is no report on peer access: schema is {report.get('schema')!r}, expected "
            f"'{SCHEMA}'.",
            "Make one with: exl3ctl peers",
        )
    layers = _layers(report)
    verdict, reason, warnings = _first_match(report, ranks, wanted, devices, layers)
    custom, why = _custom(verdict, ranks, full_mesh)
    return Verdict(verdict, ranks, reason, custom, why, layers, tuple(warnings))


def _first_match(
    report: dict | None, ranks: int, wanted: str, devices: list[str] | None, layers: dict[str, str]
) -> tuple[str, str, list[str]]:
    if ranks == 1:
        return "alone", "one rank has no peer", []
    if wanted == "disable":
        return "veto", "the recipe or the instance switches it off", []
    if wanted == "force":
        said = "it is forced by the recipe or the instance; nothing was proved"
        return "use", said, [f"Peer access between {ranks} GPUs is used unproved: {said}."]
    if report is None:
        return "veto", "nothing is proved: no test was run (exl3ctl peers)", []
    if report["ranks"] != ranks:
        return "veto", _other_count(report["ranks"], ranks), []
    if devices is not None and sorted(devices) != addresses(report):
        mine = ", ".join(addresses(report))
        return "veto", f"nothing is proved for these GPUs: the test ran on {mine}", []
    fallback = _row(report, "off")
    if fallback is not None and fallback["state"] != "right":
        raise HostError(
            f"The all-reduce of {ranks} ranks fails even without peer access: "
            f"{fallback['state']}, {fallback['detail']}.",
            "Look at dmesg for Xid errors, at the size of /dev/shm (at least 64 MiB per rank) and "
            "at the driver; no setting of NCCL helps here.",
            collective=fallback,
        )
    if layers["granted"] == "no":
        return "veto", "the driver grants none for at least one pair; host memory carries it", []
    bad = [one for one in report["copies"] if one["state"] != "moves"]
    if bad:
        return "veto", f"granted and not kept: {_copy(bad[0])}", [_distrust(ranks)]
    proved = _row(report, "on")
    if proved is None or not report["copies"]:
        missing = "all-reduce" if proved is None else "copy between two devices"
        return "veto", f"nothing is proved: the report holds no {missing}", []
    if proved["state"] != "right":
        said = f"granted and not kept: the all-reduce of {ranks} ranks was {proved['state']}"
        return "veto", f"{said} ({proved['detail']})", [_distrust(ranks)]
    speed = _speed(proved)
    return "use", f"every pair moved its bytes and {ranks} ranks summed right{speed}", []


def _layers(report: dict | None) -> dict[str, str]:
    if report is None:
        return {"granted": "unknown", "moves": "unknown", "collects": "unknown"}
    copies = report["copies"]
    grants = [one["granted"] for one in copies if "granted" in one]
    proved = _row(report, "on")
    return {
        "granted": "unknown" if not grants else "yes" if all(grants) else "no",
        "moves": (
            "unknown"
            if not copies
            else "yes"
            if all(one["state"] == "moves" for one in copies)
            else "no"
        ),
        "collects": "unknown" if proved is None else "yes" if proved["state"] == "right" else "no",
    }


def _custom(verdict: str, ranks: int, full_mesh: bool | None) -> tuple[bool, str]:
    if verdict == "alone":
        return False, "one rank reduces nothing"
    if verdict == "veto":
        return False, "it uses peer access whatever NCCL is told"
    if ranks not in CUSTOM_WORLDS:
        return False, f"vLLM has it for {', '.join(map(str, CUSTOM_WORLDS))} ranks, not for {ranks}"
    if ranks > 2 and full_mesh is None:
        return False, f"nobody knows whether NVLink joins all pairs of {ranks} GPUs"
    if ranks > 2 and not full_mesh:
        return False, f"beyond two ranks it needs NVLink between all pairs of the {ranks} GPUs"
    return True, "peer access is proved" + (" and NVLink joins all pairs" if ranks > 2 else "")


def _other_count(tested: int, ranks: int) -> str:
    # There are hosts that hang at two ranks and not at four.
    return f"nothing is proved at {ranks} ranks: the test ran with {tested}"


def _distrust(ranks: int) -> str:
    return (
        f"The driver grants peer access and {ranks} GPUs cannot use it. Usual causes: an IOMMU "
        "that translates (iommu=pt, or off in the firmware), ACS redirection at a PCIe bridge, a "
        "BAR1 smaller than the card's memory. Until that is cured host memory carries the traffic."
    )


def _copy(one: dict) -> str:
    if "source" in one:
        way = f"the copy from device {one['source']} to device {one['target']}"
        return f"{way} was {one['state']} ({one['detail']})"
    return f"the copies were {one['state']} ({one['detail']})"


def _speed(row: dict) -> str:
    if not row["sizes"]:
        return ""
    largest = row["sizes"][-1]
    return f", {largest['bytes'] >> 20} MiB at {largest['bus_gb_s']:.1f} GB/s of bus bandwidth"


def _row(report: dict, peer: str) -> dict | None:
    rows = [one for one in report["collectives"] if one["peer_access"] == peer]
    return rows[0] if rows else None


def addresses(report: dict) -> list[str]:
    """Sorted PCI addresses of the devices a report is about."""
    return sorted(one["pci"] or f"device {one['index']}" for one in report["devices"])


def full_mesh(matrix: dict, gpus: list[int]) -> bool | None:
    """Whether NVLink joins each pair, by the table of `nvidia-smi topo -m` (`topo_matrix.parse`).

    None where the table does not say.
    """
    from . import topo_matrix

    links = [
        topo_matrix.link_between(matrix, one, other)
        for at, one in enumerate(gpus)
        for other in gpus[at + 1 :]
    ]
    if not links or any(link is None for link in links):
        return None
    return all(str(link).startswith("NV") for link in links)


def cache_key(identity: dict) -> str:
    """Key of a verdict: driver, NCCL, the devices with their PCI addresses, and the rank count."""
    about = {
        "driver": identity["driver"],
        "nccl": identity["nccl"],
        "backend": identity["backend"],
        "ranks": identity["ranks"],
        "devices": sorted((one["pci"] or "", one["name"]) for one in identity["devices"]),
    }
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def cached(store: Path, identity: dict) -> dict | None:
    """The report kept for exactly these devices, driver, NCCL and rank count, or None."""
    try:
        report = json.loads((store / "peers" / f"{cache_key(identity)}.json").read_text())
    except (OSError, ValueError):
        return None
    known = report.get("schema") == SCHEMA and cache_key(report) == cache_key(identity)
    return report if known else None


def keep(store: Path, report: dict) -> Path:
    """Keep a report under its key; the file."""
    path = store / "peers" / f"{cache_key(report)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    os.replace(draft, path)
    return path


def not_measured(plan: dict, is_check: bool) -> str | None:
    """Why the test does not run for this plan; None where it does."""
    gpus = plan["pin"].get("gpus") or []
    if len(gpus) < 2:
        return f"{len(gpus) or 'no'} GPU, nothing to prove"
    if plan["runtime"] != "native":
        return "peer access is not proved by this play for containers; see docs/peer-access.md"
    return "would be tested" if is_check else None


Runner = Callable[[list[str]], dict]


def run_program(python: Path, checkout: Path, env: dict[str, str] | None = None) -> Runner:
    """A function that runs `bench/peer_access.py` with these arguments and returns its JSON.

    `env` is added to the environment: over several hosts that of this host's link.

    Raises HostError where the program is not there, ends badly or takes longer than any deadline
    of its own explains.
    """
    program = checkout / "bench" / "peer_access.py"

    def run(arguments: list[str]) -> dict:
        if not program.is_file():
            raise HostError(f"{program} is not there.", "Run exl3ctl from a checkout.")
        command = [str(python), str(program), *arguments]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **(env or {})},
                capture_output=True,
                text=True,
                timeout=TEST_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise HostError(
                f"the test of peer access took longer than {TEST_TIMEOUT_S:.0f} s.",
                "A process that cannot be killed holds a GPU: look at nvidia-smi and dmesg.",
            ) from None
        except OSError as error:
            raise HostError(
                f"{python} cannot be run: {error.strerror}.", "Deploy the venv, or pass --venv."
            ) from None
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
            raise HostError(f"the test of peer access said: {said[0]}") from None
        return answer

    return run


def look(
    run: Runner, store: Path, ranks: int, backend: str | None = None, again: bool = False
) -> tuple[dict, bool]:
    """(report for `ranks` ranks on this host, whether it was kept); measured where none is kept.

    Raises HostError where the GPUs are too full to be tested.
    """
    arguments = ["--ranks", str(ranks)]
    if backend is not None:
        arguments += ["--backend", backend]
    identity: dict[str, Any] = run([*arguments, "--identity"])
    kept = None if again else cached(store, identity)
    if kept is not None:
        return kept, True
    report = run(arguments)
    _refuse_busy(report)
    keep(store, report)
    return report, False


def _refuse_busy(report: dict) -> None:
    """A test that found no memory has said nothing about peers, and must not be kept."""
    for one in [*report["copies"], *report["collectives"]]:
        detail = str(one.get("detail") or "")
        if "out of memory" in detail.lower():
            raise HostError(
                f"peer access cannot be tested while the GPUs are full: {detail}.",
                "Stop what runs there (nvidia-smi lists it), or deploy with peer_access: disable.",
            )
