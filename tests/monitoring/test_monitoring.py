"""Prometheus and Grafana: what the role writes, and that every query finds a metric that is there.

Prometheus, its node exporter and vLLM are the real ones.
"""

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from exl3_host import metrics, status
from live_server import CANARY, free_port, play, program, write_inventory

DATA = Path(__file__).with_name("data")
ROLE = Path(__file__).resolve().parents[2] / "playbooks" / "roles" / "exl3_monitoring"
VARIABLES = {"$__rate_interval": "10s", "$host": ".*", "$instance_name": ".*"}
# Names of functions and words of the query language, which look like metrics.
WORDS = {"sum", "by", "rate", "le", "max", "and", "time", "increase", "histogram_quantile"}


def queries() -> list[tuple[str, str]]:
    """(panel, query) of the dashboard, its variables filled in."""
    found = []
    for panel in json.loads((ROLE / "files" / "exl3-dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            assert "$" not in query, query
            found.append((panel["title"], query))
    return found


def rules() -> list[dict]:
    text = yaml.safe_load((ROLE / "files" / "exl3.rules.yml").read_text())
    return [rule for group in text["groups"] for rule in group["rules"]]


def metrics_in(query: str) -> set[str]:
    """The metrics that a query reads: names that stand before a selector or alone."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|by \([^)]*\)", " ", query)
    names = set(re.findall(r"[a-z_][a-z0-9_:]*", bare))
    return {name for name in names if "_" in name or name == "up"} - WORDS - {"min_over_time"}


def test_alerts_come_when_they_should(tmp_path):
    text = (DATA / "rules_test.yml").read_text()
    (tmp_path / "test.yml").write_text(
        text.replace("RULES", str(ROLE / "files" / "exl3.rules.yml"))
    )
    command = [program("promtool"), "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_role(checkout, tmp_path):
    promtool = program("promtool")
    store, units = tmp_path / "store", tmp_path / "units"
    store.mkdir()
    units.mkdir()
    instances = [
        {"name": "one", "recipe": "a", "port": 8000},
        {"name": "two", "recipe": "b", "port": 8001, "host": "0.0.0.0"},
    ]
    inventory = write_inventory(
        tmp_path, checkout, store, exl3_instances=instances, exl3_monitoring_unit_dir=str(units),
        exl3_monitoring_textfile=str(tmp_path / "exl3.prom"),
    )  # fmt: skip
    done = play(checkout, "monitoring", inventory, "--check", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(store.iterdir()) == [] and list(units.iterdir()) == []
    done = play(checkout, "monitoring", inventory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "changed=0" in play(checkout, "monitoring", inventory).stdout

    folder = store / "monitoring"
    command = [promtool, "check", "config", str(folder / "prometheus.yml")]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0 and "11 rules found" in checked.stdout, checked.stderr
    assert json.loads((folder / "targets.json").read_text()) == [
        {"targets": ["127.0.0.1:8000"], "labels": {"host": "box1", "instance_name": "one"}},
        {"targets": ["127.0.0.1:8001"], "labels": {"host": "box1", "instance_name": "two"}},
    ]
    provider = yaml.safe_load((folder / "grafana/provisioning/dashboards/exl3.yml").read_text())
    (dashboard,) = Path(provider["providers"][0]["options"]["path"]).glob("*.json")
    assert json.loads(dashboard.read_text())["uid"] == "exl3-servers"
    source = yaml.safe_load((folder / "grafana/provisioning/datasources/exl3.yml").read_text())
    assert source["datasources"][0]["type"] == "prometheus"

    unit = (units / "exl3-metrics.service").read_text()
    words = re.search(r"ExecStart=(.*)", unit)[1].split()
    path = re.search(r"Environment=PYTHONPATH=(.*)", unit)[1]
    # The command of the unit itself, on a store that holds nothing yet.
    subprocess.run(words, check=True, env={"PYTHONPATH": path})
    assert "exl3_status_time_seconds " in (tmp_path / "exl3.prom").read_text()
    verify = [program("systemd-analyze"), "verify", str(units / "exl3-metrics.timer")]
    done = subprocess.run(verify, capture_output=True, text=True)
    assert done.returncode == 0 and "exl3-metrics" not in done.stderr, done.stderr


def test_the_dashboard_is_whole():
    """What Grafana refuses or draws over: doubled ids, overlaps, panels beyond the grid."""
    board = json.loads((ROLE / "files" / "exl3-dashboard.json").read_text())
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
    variables = {one["name"] for one in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels)))
    assert used - {"__rate_interval"} <= variables


class Watched:
    """A real Prometheus that scrapes the live server and the node exporter."""

    def __init__(self, live, folder: Path) -> None:
        prometheus, exporter = program("prometheus"), program("prometheus-node-exporter")
        self.port, node = free_port(), free_port()
        self.textfile = folder / "text" / "exl3.prom"
        inventory = write_inventory(
            folder, live.checkout, live.store, exl3_instances=[live.instance],
            exl3_monitoring_dir=str(folder / "monitoring"), exl3_monitoring_scrape_s=1,
            exl3_monitoring_node_exporter=f"127.0.0.1:{node}", exl3_monitoring_timer=False,
        )  # fmt: skip
        done = play(live.checkout, "monitoring", inventory)
        assert done.returncode == 0, done.stdout + done.stderr
        metrics.write(metrics.collect(live.store), self.textfile)
        log = open(folder / "prometheus.log", "w")  # noqa: SIM115, closed with the processes
        self.running = [
            subprocess.Popen(
                [exporter, "--collector.disable-defaults", "--collector.textfile",
                 f"--collector.textfile.directory={self.textfile.parent}",
                 f"--web.listen-address=127.0.0.1:{node}"], stdout=log, stderr=log),
            subprocess.Popen(
                [prometheus, f"--config.file={folder / 'monitoring' / 'prometheus.yml'}",
                 f"--storage.tsdb.path={folder / 'tsdb'}",
                 f"--web.listen-address=127.0.0.1:{self.port}"], stdout=log, stderr=log),
        ]  # fmt: skip

    def ask(self, path: str, **named: str) -> dict:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(named)}"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=10) as answer:
            return json.loads(answer.read())["data"]

    def wait(self, query: str, wanted: float) -> None:
        """Until one sample of a query has a value."""
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            try:
                result = self.ask("query", query=query)["result"]
                if result and float(result[0]["value"][1]) == wanted:
                    return
            except OSError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"{query} never became {wanted}")


@pytest.fixture(scope="module")
def watched(live, tmp_path_factory):
    made = Watched(live, tmp_path_factory.mktemp("watched"))
    try:
        made.wait('up{job="exl3"}', 1)
        made.wait('up{job="exl3-host"}', 1)
        # Two scrapes with a request between them, so that rates are rates of something.
        time.sleep(2)
        body = {"model": "tiny", "prompt": [1, 5, 9, 20], "max_tokens": 8, "ignore_eos": True}
        assert live.fetch("/v1/completions", body)[0] == 200
        time.sleep(3)
        yield made
    finally:
        for process in made.running:
            process.terminate()
            process.wait(10)


@pytest.mark.slow
def test_every_metric_is_exported_by_what_runs(watched):
    """Those of dashboard and alerts, by name, in what Prometheus scraped."""
    there = set(watched.ask("label/__name__/values"))
    # The rank guard has a test of its own (tests/nodes), and no peer access was tested here.
    elsewhere = {"exl3_rank_up", "exl3_peer_access_proved"}
    wanted = set()
    for query in [query for _, query in queries()] + [rule["expr"] for rule in rules()]:
        wanted |= metrics_in(query)
    assert len(wanted) > 20, "the queries were not understood"
    assert wanted - there <= elsewhere, wanted - there - elsewhere


@pytest.mark.slow
def test_every_panel_shows_something(watched):
    empty = [title for title, query in queries() if not watched.ask("query", query=query)["result"]]
    assert empty == ["Peer access proved"]
    (tokens,) = watched.ask("query", query="vllm:generation_tokens_total")["result"]
    # The smoke test's 2, three times 24, and 8.
    assert float(tokens["value"][1]) == 2 + 3 * 24 + 8
    assert tokens["metric"]["host"] == "box1" and tokens["metric"]["instance_name"] == "tiny"


@pytest.mark.slow
def test_alerts_are_loaded_and_quiet(watched):
    groups = watched.ask("rules")["groups"]
    loaded = [rule for group in groups for rule in group["rules"]]
    assert len(loaded) == len(rules())
    assert [rule["lastError"] for rule in loaded if rule.get("lastError")] == []
    assert [rule["name"] for rule in loaded if rule["state"] == "firing"] == []


@pytest.mark.slow
def test_no_key_in_what_is_collected(live, watched):
    assert CANARY not in watched.textfile.read_text()
    assert CANARY not in json.dumps(watched.ask("targets"))
    assert live.fetch("/metrics", key=None)[0] == 200, "vLLM guards /v1 alone"
    assert CANARY not in live.fetch("/metrics", key=None)[1]


def test_status_as_metrics(tmp_path):
    """Counted by hand from a status as `status.look` gives it."""
    dead = status.Status('odd "name"', "dead", model="m", url="http://127.0.0.1:1", restarts=2)
    text = metrics.render([dead], [], 1764500000.25)
    assert "exl3_status_time_seconds 1764500000.25\n" in text
    assert 'exl3_instance_serving{instance_name="odd \\"name\\""} 0\n' in text
    assert 'exl3_instance_state{instance_name="odd \\"name\\"",state="dead"} 1\n' in text
    assert 'exl3_instance_state{instance_name="odd \\"name\\"",state="serving"} 0\n' in text
    assert 'exl3_instance_restarts{instance_name="odd \\"name\\""} 2\n' in text
    assert "resident_bytes" not in text, "unknown is no number"
    names = set(re.findall(r"^(exl3_\w+)", text, re.M))
    assert names <= set(metrics.METRICS)
    promtool = program("promtool")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_disk_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "exl3.prom"
    assert metrics.main(["--store", str(tmp_path), "--out", str(out)]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == ""
