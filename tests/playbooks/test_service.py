"""The service logic with real processes: start, crash, kill, replace, roll back, stop."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from exl3_host import procs, service, spec, status
from exl3_host.errors import HostError
from supervised import run_supervisor

SMALL_SERVER = Path(__file__).with_name("small_server.py")


def until(condition, seconds=15):
    """Wait until `condition()` is true and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"still not so after {seconds} s")


def deploy(plan, store, **options):
    return service.ensure(plan, store, service.Options(manager="supervisor"), **options)


def look(store, instance="small"):
    return status.look(spec.Paths(store, instance))


def state(store, instance="small"):
    return spec.read_json(spec.Paths(store, instance).state)


def test_first_start_then_nothing_to_do(store, make_plan):
    plan = make_plan()
    first = deploy(plan, store)
    assert first.changed and first.answer == "Paris."
    assert list(first.reached) == ["process", "port", "health", "models", "completion"]
    pid = look(store).pid
    second = deploy(plan, store)
    assert not second.changed and second.answer == "Paris." and second.before == second.after
    assert look(store).pid == pid and look(store).state == "serving"


def test_environment_arrives_literally(store, make_plan):
    deploy(make_plan(), store)
    with open(f"/proc/{look(store).pid}/environ") as text:
        assert "GREETING=hello world $HOME" in text.read().split("\0")


def test_check_mode_starts_nothing(store, make_plan):
    outcome = deploy(make_plan(), store, is_check=True)
    assert outcome.changed and outcome.before == "" and '"port"' in outcome.after
    assert look(store).state == "absent" and list(store.iterdir()) == []


def test_changed_plan_replaces_the_server(store, make_plan):
    deploy(make_plan(), store)
    before = look(store)
    outcome = deploy(make_plan("--answer", "It is Paris."), store)
    after = look(store)
    assert outcome.changed and outcome.message == "replaced" and outcome.answer == "It is Paris."
    assert after.pid != before.pid and procs.start_ticks(before.pid) is None


def test_failing_replacement_brings_the_old_one_back(store, make_plan):
    deploy(make_plan(), store)
    with pytest.raises(HostError) as caught:
        deploy(make_plan("--raise", "the trellis is 17 wide"), store)
    assert "ValueError: the trellis is 17 wide" in str(caught.value)
    assert "previous server was started again and serves" in caught.value.fix
    assert look(store).state == "serving"
    assert not deploy(make_plan(), store).changed
    failed = store / "logs" / "small" / "failed.log"
    assert "the trellis is 17 wide" in failed.read_text()


def test_wrong_answer_is_no_service(store, make_plan):
    with pytest.raises(HostError, match=r"it says 'Rome', expected /Paris/"):
        deploy(make_plan("--answer", "Rome"), store)
    assert look(store).state == "absent"


def test_an_engine_that_hangs_behind_its_health_is_found(store, make_plan):
    """production-stack#619: /health proves the process that answers it, and nothing else."""
    paths = spec.Paths(store, "small")
    deploy(make_plan("--answers", "2"), store)
    assert look(store).state == "serving"
    assert "it says 'Paris.'" in status.smoke(paths, timeout_s=10)
    with pytest.raises(HostError, match=r"healthy and does not answer: .* timed out") as caught:
        status.smoke(paths, timeout_s=0.5)
    assert "Its engine hangs" in str(caught.value) and look(store).state == "serving"
    with pytest.raises(HostError, match="other is not deployed here"):
        status.smoke(spec.Paths(store, "other"), timeout_s=1)


def test_wrong_name_is_told_at_once(store, make_plan):
    with pytest.raises(HostError, match=r"lists \['other'\], expected 'small'"):
        deploy(make_plan("--served-model-name", "other"), store)


def test_silent_server_is_given_up_as_stalled(store, make_plan):
    plan = make_plan("--silent", health={"stall_timeout_s": 2})
    with pytest.raises(HostError, match="stalled: nothing in the log for 2 s, waiting for port"):
        deploy(plan, store)


def test_slow_server_runs_into_the_deadline(store, make_plan):
    plan = make_plan("--ready-after", "60", health={"ready_timeout_s": 2, "stall_timeout_s": None})
    with pytest.raises(HostError, match="not ready after 2 s, waiting for port"):
        deploy(plan, store)


def test_known_failure_is_tried_again_and_an_unknown_one_is_not(store, make_plan, tmp_path):
    fault = ["--raise", "flaky warm-up", "--raise-until", str(tmp_path / "died-once")]
    retry = {"attempts": 3, "backoff_s": 0}
    with pytest.raises(HostError) as caught:
        deploy(
            make_plan(*fault, start={**retry, "retry_on": [{"id": "o", "pattern": "other"}]}), store
        )
    assert len(caught.value.details["attempts"]) == 1
    (tmp_path / "died-once").unlink()
    known = [{"id": "warm-up", "pattern": "flaky", "why": "half of all starts die"}]
    outcome = deploy(make_plan(*fault, start={**retry, "retry_on": known}), store)
    assert "warm-up (known, half of all starts die)" in outcome.attempts[0]
    assert outcome.attempts[1].startswith("attempt 2 ready")


def test_port_of_somebody_else_is_named_before_anything_stops(store, make_plan, port):
    deploy(make_plan(), store)
    old = look(store).pid
    other = make_plan("--port", "0", port=port + 1)["serve"]["port"]
    stranger = subprocess.Popen([sys.executable, "-m", "http.server", str(other)])
    try:
        until(lambda: procs.listeners(other))
        with pytest.raises(HostError) as caught:
            deploy(make_plan(port=other), store)
        assert f"port {other} is in use" in str(caught.value)
        assert f"pid {stranger.pid}" in str(caught.value) and "http.server" in str(caught.value)
        assert look(store).pid == old and look(store).state == "serving"
    finally:
        stranger.kill()
        stranger.wait()


def test_two_instances_cannot_share_a_port(store, make_plan):
    deploy(make_plan(), store)
    with pytest.raises(HostError, match="is in use"):
        deploy(make_plan(instance="second"), store)


def test_too_little_memory_is_refused_while_the_old_one_serves(store, make_plan):
    deploy(make_plan(), store)
    fit = {"ok": False, "needed_gib": 900.0, "available_gib": 3.0, "lines": ["weights 890 GiB"]}
    with pytest.raises(HostError) as caught:
        deploy(make_plan("--answer", "Paris!", fit=fit), store)
    assert "900.0 GiB needed" in str(caught.value) and "weights 890 GiB" in str(caught.value)
    assert look(store).state == "serving"
    # What runs already is not judged again.
    assert not deploy(make_plan(fit=fit), store).changed


def test_missing_model_folder_is_refused(store, make_plan):
    deploy(make_plan(), store)
    with pytest.raises(HostError, match="model folder /nowhere is not there"):
        deploy(make_plan(model={"dir": "/nowhere"}), store)
    assert look(store).state == "serving"


def test_killed_server_is_noticed_and_comes_back(store, make_plan):
    deploy(make_plan("--worker"), store)
    pid = look(store).pid
    os.kill(pid, signal.SIGKILL)
    seen = until(lambda: (s := look(store)).state != "serving" and s)
    assert seen.state in ("dead", "restarting")
    until(lambda: state(store)["exits"])
    assert "SIGKILL" in look(store).last_exit


def test_workers_of_a_killed_server_do_not_stay(store, make_plan):
    deploy(make_plan("--worker"), store)
    members = spec.own_pids(spec.Paths(store, "small"))
    assert len(members) == 3
    os.kill(look(store).pid, signal.SIGKILL)
    until(lambda: state(store)["phase"] == "waiting to restart")
    assert [pid for pid in members if procs.start_ticks(pid) is not None] == members[:1]


def test_killed_supervisor_takes_its_server_along(store, make_plan):
    deploy(make_plan(), store)
    pid = look(store).pid
    os.kill(state(store)["supervisor"]["pid"], signal.SIGKILL)
    seen = until(lambda: (s := look(store)).state == "dead" and s)
    assert "supervisor" in seen.reason
    until(lambda: procs.start_ticks(pid) is None)
    assert deploy(make_plan(), store).message == "started again"


def test_stop_drains(store, make_plan):
    deploy(make_plan("--drain", "1"), store)
    log = spec.Paths(store, "small").log
    service.halt(spec.Paths(store, "small"))
    assert "drained" in log.read_text()
    assert look(store).state == "stopped"


def test_remove_leaves_no_process_no_port_no_files(store, make_plan, port):
    deploy(make_plan("--worker"), store)
    paths = spec.Paths(store, "small")
    members = spec.own_pids(paths)
    assert service.remove(paths, is_check=True) and look(store).state == "serving"
    assert service.remove(paths) and not service.remove(paths)
    assert [pid for pid in members if procs.start_ticks(pid) is not None] == []
    assert procs.listeners(port) == [] and not paths.run.exists()


def test_api_key_comes_from_its_file_and_stands_nowhere_else(store, make_plan, tmp_path):
    key = tmp_path / "key"
    key.write_text("canary-5f3a\n")
    plan = make_plan(serve={"api_key_file": str(key)})
    outcome = deploy(plan, store)
    assert outcome.answer == "Paris."
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(outcome.status.url + "/v1/models")
    written = [path for path in store.rglob("*") if path.is_file()]
    assert written and not [path for path in written if b"canary-5f3a" in path.read_bytes()]
    key.write_text("canary-9999\n")
    assert deploy(plan, store).message == "replaced"


def test_new_model_files_are_a_reason_to_restart(store, make_plan):
    plan = make_plan()
    deploy(plan, store)
    with open(plan["model"]["dir"] + "/.exl3-manifest.json", "w") as manifest:
        manifest.write("{}")
    assert deploy(plan, store).message == "replaced"


def test_interrupted_replacement_is_finished_by_the_next_run(store, make_plan):
    deploy(make_plan(), store)
    service.halt(spec.Paths(store, "small"))
    outcome = deploy(make_plan("--answer", "Paris again"), store)
    assert outcome.answer == "Paris again" and look(store).state == "serving"


@pytest.mark.parametrize("status", [7, 0])
def test_restarts_are_bounded(tmp_path, status):
    """Status 0 is no exception: vLLM ends with it when its engine is killed."""
    program, state_file, logs = run_supervisor(tmp_path, [sys.executable, "-c", f"exit({status})"])
    assert program.wait(20) == 1
    found = json.loads(state_file.read_text())
    assert found["phase"] == "failed" and [one["code"] for one in found["exits"]] == [status] * 3
    assert (logs / "log").read_text().count("] start ") == 3


def test_under_systemd_the_exit_status_is_handed_on(tmp_path):
    program, state_file, _ = run_supervisor(tmp_path, [sys.executable, "-c", "exit(7)"], "--once")
    assert program.wait(20) == 7
    assert len(json.loads(state_file.read_text())["exits"]) == 1


def test_log_is_rotated_and_bounded(tmp_path):
    noisy = "print('x' * 30_000); exit(1)"
    program, _, logs = run_supervisor(tmp_path, [sys.executable, "-c", noisy], burst=4)
    assert program.wait(20) == 1
    assert sorted(path.name for path in logs.iterdir()) == ["log", "log.1", "log.2"]
    assert (logs / "log").stat().st_size < 10_000 < (logs / "log.2").stat().st_size


def test_deaf_server_is_killed_after_its_grace(tmp_path, port):
    argv = [sys.executable, str(SMALL_SERVER), "--port", str(port), "--deaf"]
    program, state_file, _ = run_supervisor(tmp_path, argv)
    until(lambda: procs.listeners(port))
    program.send_signal(signal.SIGTERM)
    assert program.wait(20) == 0
    found = json.loads(state_file.read_text())
    assert found["phase"] == "stopped" and found["exits"][-1]["signal"] == "SIGKILL"
    assert procs.listeners(port) == []


def test_program_that_is_not_there(tmp_path):
    program, state_file, _ = run_supervisor(tmp_path, ["/nowhere/vllm"])
    assert program.wait(20) == 1
    assert "/nowhere/vllm" in json.loads(state_file.read_text())["reason"]
