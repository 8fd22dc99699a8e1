"""What vLLM's own `/metrics` cannot say: whether it runs at all, how often it was restarted.

`python3 -m exl3_host.metrics --store STORE --out FILE.prom` writes the text format of Prometheus
for node_exporter's textfile collector; a timer runs it once a minute. It looks at the instances as
`status.yml` does, so a server that is dead or only half alive has a line too. Standard library
only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from . import peers, spec, status
from .errors import HostError

STATES = ("serving", "starting", "restarting", "unhealthy", "dead", "stopped", "absent")

# name -> (type, help). Every line that is written has its entry here; docs and tests read it too.
METRICS = {
    "exl3_status_time_seconds": ("gauge", "When these lines were written, in Unix time."),
    "exl3_instance_info": ("gauge", "Always 1; says what the instance serves and how."),
    "exl3_instance_serving": ("gauge", "1 while the instance answers for its model."),
    "exl3_instance_state": ("gauge", "1 for the state that the instance is in, else 0."),
    "exl3_instance_restarts": ("gauge", "Restarts since the last deploy."),
    "exl3_instance_uptime_seconds": ("gauge", "Age of the server's process."),
    "exl3_instance_resident_bytes": ("gauge", "Memory of all processes of the instance."),
    "exl3_peer_access_proved": ("gauge", "1 where a kept test proved peer access, else 0."),
}


def render(found: list[status.Status], reports: list[dict], now: float) -> str:
    """The lines for these instances and kept reports on peer access."""
    samples: dict[str, list[str]] = {name: [] for name in METRICS}
    samples["exl3_status_time_seconds"].append(_line("exl3_status_time_seconds", {}, now))

    def add(name: str, one: status.Status, value: float | None, **labels: str) -> None:
        if value is not None:
            samples[name].append(_line(name, {"instance_name": one.instance, **labels}, value))

    for one in found:
        add(
            "exl3_instance_info",
            one,
            1,
            model_name=one.model,
            url=one.url,
            manager=one.manager,
            config_hash=one.config_hash[:12],
        )
        add("exl3_instance_serving", one, int(one.state == "serving"))
        for state in STATES:
            add("exl3_instance_state", one, int(one.state == state), state=state)
        add("exl3_instance_restarts", one, one.restarts)
        add("exl3_instance_uptime_seconds", one, one.uptime_s)
        gib = one.memory_gib
        add("exl3_instance_resident_bytes", one, None if gib is None else round(gib * 2**30))
    for report in reports:
        labels = {"ranks": str(report["ranks"]), "key": peers.cache_key(report)}
        samples["exl3_peer_access_proved"].append(
            _line("exl3_peer_access_proved", labels, int(_proved(report)))
        )
    out = []
    for name, lines in samples.items():
        if lines:
            kind, text = METRICS[name]
            out += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *lines]
    return "\n".join(out) + "\n"


def _proved(report: dict) -> bool:
    try:
        return peers.decide(report, report["ranks"]).verdict == "use"
    except HostError:
        return False


def _line(name: str, labels: dict[str, str], value: float) -> str:
    inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    number = repr(round(value, 3)) if isinstance(value, float) else str(value)
    return f"{name}{{{inner}}} {number}" if inner else f"{name} {number}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def collect(store: Path) -> str:
    """`render` of everything that lies in a store."""
    names = [path.name for path in sorted((store / "run").glob("*")) if path.is_dir()]
    found = [status.look(spec.Paths(store, name)) for name in names]
    reports = []
    for path in sorted((store / "peers").glob("*.json")):
        report = spec.read_json(path)
        if report and report.get("schema") == peers.SCHEMA and not path.name.startswith("links-"):
            reports.append(report)
    return render(found, reports, time.time())


def write(text: str, out: Path) -> None:
    """Replace the file at once, as the collector may read it at any moment. Readable by all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(draft, 0o644)
        os.replace(draft, out)
    except OSError:
        Path(draft).unlink(missing_ok=True)
        raise


def main(arguments: list[str] | None = None) -> int:
    """Entry point: 0 written, 1 not."""
    parser = argparse.ArgumentParser(prog="exl3_host.metrics", description=__doc__.split("\n")[0])
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="file ending in .prom; default: standard output")
    options = parser.parse_args(arguments)
    text = collect(options.store)
    if options.out is None:
        sys.stdout.write(text)
        return 0
    try:
        write(text, options.out)
    except OSError as error:
        said = {"error": f"{options.out} cannot be written: {error.strerror}."}
        print(json.dumps(said), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
