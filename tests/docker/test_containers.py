"""Containers on a real engine: what they may do, how they are replaced, what comes back."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import small_image
from exl3_host import containers, procs, service, spec, status
from exl3_host.errors import HostError


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"still not so after {seconds} s")


def look(store):
    return status.look(spec.Paths(store, "small"))


def names(client, state=None):
    found = containers.of_instance(client, "small")
    return [one["Names"][0].lstrip("/") for one in found if state in (None, one["State"])]


def test_first_start_second_run_removal(store, make_plan, options, client):
    plan = make_plan()
    first = service.ensure(plan, store, options)
    assert first.changed and first.answer == "Paris." and look(store).state == "serving"
    (name,) = names(client)
    assert name == containers.name_of("small", look(store).config_hash)
    pid = look(store).pid
    second = service.ensure(plan, store, options)
    assert not second.changed and look(store).pid == pid
    paths = spec.Paths(store, "small")
    assert pid in spec.own_pids(paths)
    assert service.remove(paths) and names(client) == [] and procs.start_ticks(pid) is None
    assert not service.remove(paths)


def test_the_container_is_closed_to_all_sides(store, make_plan, options, client, docker):
    service.ensure(make_plan(), store, options)
    (name,) = names(client)
    found = client.container(name)
    host = found["HostConfig"]
    assert host["ReadonlyRootfs"] and host["CapDrop"] == ["ALL"] and host["Init"]
    assert host["IpcMode"] == "private" and host["ShmSize"] == 1 << 30
    assert host["LogConfig"] == {
        "Type": "json-file",
        "Config": {"max-file": "5", "max-size": "50m"},
    }
    assert host["RestartPolicy"]["Name"] in ("no", "")
    with open(f"/proc/{found['State']['Pid']}/status") as text:
        fields = dict(line.split(":\t") for line in text.read().splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["2000"] * 4 and fields["CapEff"] == "0" * 16
    assert fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
    python = found["Config"]["Entrypoint"][0]
    code = "import os; open('/tmp/x','w'); open('/cache/x','w'); print(os.getuid())"

    def inside(code):
        command = [*docker, "exec", name, python, "-I", "-c", code]
        return subprocess.run(command, capture_output=True, text=True)

    done = inside(code)
    assert done.stdout == "2000\n", done.stderr
    for place in ("/x", "/models/model/x", "/small_server.py"):
        done = inside(f"open({place!r}, 'w')")
        assert "Read-only file system" in done.stderr or "Permission denied" in done.stderr, place
    with open(f"/proc/{found['State']['Pid']}/environ") as text:
        assert "GREETING=hello world $HOME" in text.read().split("\0")


def test_memory_policy_is_allowed_and_what_reaches_further_is_not(
    store, make_plan, options, client, docker
):
    """numactl's four calls pass; under the engine's own profile they do not."""
    service.ensure(make_plan(), store, options)
    (name,) = names(client)
    python = client.container(name)["Config"]["Entrypoint"][0]
    numbers = {
        "x86_64": {"get_mempolicy": 239, "set_mempolicy": 238, "mbind": 237, "move_pages": 279},
        "aarch64": {"get_mempolicy": 236, "set_mempolicy": 237, "mbind": 235, "move_pages": 239},
    }[os.uname().machine]
    refused = {
        "x86_64": {"mount": 165, "unshare": 272, "bpf": 321, "keyctl": 250, "reboot": 169,
                   "init_module": 175, "userfaultfd": 323, "io_uring_setup": 425,
                   "perf_event_open": 298, "setns": 308, "pivot_root": 155},
        "aarch64": {"mount": 40, "unshare": 97, "bpf": 280, "keyctl": 219, "reboot": 142,
                    "init_module": 105, "userfaultfd": 282, "io_uring_setup": 425,
                    "perf_event_open": 241, "setns": 268, "pivot_root": 41},
    }[os.uname().machine]  # fmt: skip
    code = (
        "import ctypes, json, errno\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "out = {}\n"
        f"for name, number in { ({**numbers, **refused})!r}.items():\n"
        "    ctypes.set_errno(0)\n"
        "    result = libc.syscall(number, 0, 0, 0, 0, 0, 0)\n"
        "    out[name] = errno.errorcode.get(ctypes.get_errno(), 'ok') if result else 'ok'\n"
        "print(json.dumps(out))\n"
    )

    def ask(*command):
        done = subprocess.run([*docker, *command, python, "-I", "-c", code], capture_output=True)
        return json.loads(done.stdout)

    found = ask("exec", name)
    # A call that is let through complains about its empty arguments, or does nothing.
    assert {call for call in numbers if found[call] in ("EPERM", "ENOSYS")} == set()
    assert {call: found[call] for call in refused} == dict.fromkeys(refused, "EPERM")
    image = client.container(name)["Image"]
    default = ask(
        "run", "--rm", "--network", "none", "--cap-drop", "ALL", "--entrypoint", "", image
    )
    assert default["set_mempolicy"] == "EPERM"


def test_the_pin_is_applied_and_proved(store, make_plan, options, client):
    plan = make_plan(
        container={**make_plan()["container"], "cpuset_cpus": "0", "cpuset_mems": "0"},
        pin={"mode": "container", "cpus": "0", "mems": "0"},
    )
    outcome = service.ensure(plan, store, options)
    for pid in client.pids(names(client)[0]):
        with open(f"/proc/{pid}/status") as text:
            said = text.read()
        assert "Cpus_allowed_list:\t0\n" in said and "Mems_allowed_list:\t0\n" in said
    assert "cpuset ok (CPUs 0)" in outcome.attempts[-1]
    assert look(store).pin == "proved: CPUs 0, nodes 0" and look(store).pin_ok


def test_a_wrong_pin_is_found_at_the_start_and_by_status(store, make_plan, options, client):
    """The plan says CPU 0, and the container was given both: a limit that was reset, say."""
    plan = make_plan(pin={"mode": "container", "cpus": "0", "mems": "0"})
    with pytest.raises(HostError) as caught:
        service.ensure(plan, store, options)
    assert "serves, but not where it was pinned to" in str(caught.value)
    assert "may run on 1" in str(caught.value) and "Restart" in caught.value.fix
    found = look(store)
    assert found.state == "serving" and not found.pin_ok and found.pin.startswith("WRONG")


def test_impossible_cpus_are_refused_while_the_old_one_serves(
    store, make_plan, options, client, requests_every_100_ms
):
    service.ensure(make_plan(), store, options)
    (old,) = names(client, "running")
    wrong = {**make_plan()["container"], "cpuset_cpus": "0-4095"}
    with requests_every_100_ms as requests, pytest.raises(HostError) as caught:
        service.ensure(make_plan(container=wrong), store, options)
    assert "CPUs are not available" in str(caught.value)
    assert "comes from another host" in caught.value.fix
    assert names(client) == [old] and look(store).state == "serving" and requests.lost == []


def test_upgrade_keeps_the_old_container_and_rolls_back(store, make_plan, options, client):
    service.ensure(make_plan(), store, options)
    (first,) = names(client)
    outcome = service.ensure(make_plan(image="b"), store, options)
    assert outcome.message == "replaced" and outcome.attempts[0].startswith("rehearsal passed")
    (second,) = names(client, "running")
    assert sorted(names(client)) == sorted([first, second]) and first != second
    paths = spec.Paths(store, "small")
    back = service.rollback(paths, options=options)
    assert back.changed and names(client, "running") == [first]
    assert back.message.startswith("back at release 1")
    assert not service.ensure(make_plan(), store, options).changed
    # What served before is what one goes back to: now the second.
    service.rollback(paths, options=options)
    assert names(client, "running") == [second]
    with pytest.raises(HostError, match="no release '77' to go back to"):
        service.rollback(paths, "77", options)


def test_only_the_wanted_number_of_releases_stays(store, make_plan, options, client, docker_host):
    few = service.Options(manager="supervisor", docker_host=docker_host, keep_releases=1)
    for answer in ("Paris", "Paris!", "Paris?"):
        service.ensure(make_plan("--answer", answer), store, few)
    assert len(names(client)) == 2
    service.ensure(make_plan("--answer", "Paris.", image="b"), store, few)
    assert len(list((store / "jit").iterdir())) == 2, "one folder per image that is kept"
    service.ensure(make_plan("--answer", "Paris", image="b"), store, few)
    assert len(list((store / "jit").iterdir())) == 1, "the other image is in no release any more"
    assert len(list(spec.Paths(store, "small").releases.iterdir())) == 2


def test_an_instance_moves_to_a_venv_and_back(store, make_plan, client, docker_host):
    few = service.Options(manager="supervisor", docker_host=docker_host, keep_releases=1)
    boxed = make_plan()
    argv = [sys.executable, str(small_image.SMALL_SERVER), *boxed["serve"]["argv"][1:]]
    native = {**boxed, "container": None, "serve": {**boxed["serve"], "argv": argv}}
    service.ensure(boxed, store, few)
    assert service.ensure(native, store, few).message == "replaced"
    assert names(client, "running") == [] and look(store).state == "serving"
    service.rollback(spec.Paths(store, "small"), options=few)
    assert len(names(client, "running")) == 1
    service.ensure(native, store, few)
    again = {**native, "serve": {**native["serve"], "argv": [*argv, "--answer", "Paris!"]}}
    service.ensure(again, store, few)
    assert names(client) == [], "no release needs the container any more"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (("--raise", "the trellis is 17 wide"), "ValueError: the trellis is 17 wide"),
        (("--answer", "Rome"), "it says 'Rome', expected /Paris/"),
        (("--silent",), "stalled: nothing in the log for 2 s"),
    ],
    ids=["dies", "wrong answer", "hangs"],
)
def test_broken_upgrade_loses_not_one_request(
    store, make_plan, options, client, requests_every_100_ms, fault, reason
):
    service.ensure(make_plan(), store, options)
    (old,) = names(client)
    pid = look(store).pid
    with requests_every_100_ms as requests:
        with pytest.raises(HostError) as caught:
            patience = {"stall_timeout_s": 2 if "--silent" in fault else 20}
            plan = make_plan(*fault, image="b", health=patience)
            service.ensure(plan, store, options)
        asked = requests.asked
        until(lambda: requests.asked > asked + 5)  # it goes on answering
    assert reason in str(caught.value) and "was not touched" in caught.value.fix
    assert requests.lost == []
    assert names(client) == [old] and look(store).pid == pid
    assert client.containers(f"{containers.LABEL_INSTANCE}=small-rehearsal") == []
    if reason.startswith("ValueError"):
        assert reason in (store / "logs" / "small" / "failed.log").read_text()


def test_without_rehearsal_the_old_one_comes_back(store, make_plan, client, docker_host):
    options = service.Options("supervisor", "never", docker_host=docker_host)
    service.ensure(make_plan(), store, options)
    (old,) = names(client)
    with pytest.raises(HostError) as caught:
        service.ensure(make_plan("--raise", "no luck", image="b"), store, options)
    assert "ValueError: no luck" in str(caught.value)
    assert "previous server was started again and serves" in caught.value.fix
    assert names(client, "running") == [old] == names(client)


def interrupted(store, make_plan, options):
    """A replacement that was killed when the new server, which answers nonsense, had begun."""
    service.ensure(make_plan(), store, options)
    paths = spec.Paths(store, "small")
    spec.write_json(paths.pending, spec.read_json(paths.spec))
    service.halt(paths)
    nonsense = make_plan("--answer", "Rome", image="b")
    service.launch(spec.make_spec(nonsense, store, "supervisor", options.docker_host), paths)
    until(lambda: look(store).state == "serving")
    return nonsense


def test_an_interrupted_upgrade_that_turns_out_broken_is_taken_back(
    store, make_plan, options, client
):
    nonsense = interrupted(store, make_plan, options)
    with pytest.raises(HostError, match="it says 'Rome'") as caught:
        service.ensure(nonsense, store, options)
    assert "previous server was started again and serves" in caught.value.fix
    assert len(names(client)) == 1 and not service.ensure(make_plan(), store, options).changed


def test_another_broken_one_after_an_interrupted_upgrade_goes_back_too(
    store, make_plan, options, client
):
    interrupted(store, make_plan, options)
    with pytest.raises(HostError, match="did not pass its rehearsal") as caught:
        service.ensure(make_plan("--answer", "Oslo", image="b"), store, options)
    assert "previous server was started again and serves" in caught.value.fix
    assert not service.ensure(make_plan(), store, options).changed


def test_no_rehearsal_where_there_is_no_room(store, make_plan, options):
    service.ensure(make_plan(), store, options)
    full = {"ok": True, "needed_gib": 4.0, "available_gib": 4.0, "lines": []}
    outcome = service.ensure(make_plan(image="b", fit=full), store, options)
    assert outcome.attempts[0].startswith("no rehearsal: 4.00 GiB needed, 3.9")


def test_a_key_comes_from_a_file_and_stands_in_no_list(
    store, make_plan, options, client, docker, tmp_path
):
    key = tmp_path / "key"
    key.write_text("canary-77ab\n")
    key.chmod(0o600)
    outcome = service.ensure(make_plan(serve={"api_key_file": str(key)}), store, options)
    assert outcome.answer == "Paris."
    (name,) = names(client)
    shown = subprocess.run([*docker, "inspect", name], capture_output=True, text=True).stdout
    assert "VLLM_API_KEY_FILE" in shown and "canary-77ab" not in shown
    listed = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
    assert "canary-77ab" not in listed
    holding = [p for p in store.rglob("*") if p.is_file() and b"canary-77ab" in p.read_bytes()]
    assert [p.name for p in holding] == ["vllm_api_key"]
    assert oct(holding[0].stat().st_mode)[-3:] == "400" and holding[0].stat().st_uid == 2000
    assert oct(holding[0].parent.stat().st_mode)[-3:] == "500"
    key.write_text("canary-9999\n")
    assert service.ensure(
        make_plan(serve={"api_key_file": str(key)}), store, options
    ).message == "replaced"  # fmt: skip


def test_a_killed_server_is_started_again_a_bounded_number_of_times(
    store, make_plan, options, client
):
    service.ensure(make_plan(), store, options)
    (name,) = names(client)
    inner = client.pids(name)[1]
    os.kill(inner, signal.SIGKILL)
    paths = spec.Paths(store, "small")
    seen = until(lambda: (spec.read_json(paths.state) or {}).get("exits"))
    assert seen[-1]["code"] == 137 and look(store).restarts <= 1
    assert (spec.read_json(paths.spec)["burst"], spec.read_json(paths.spec)["interval_s"]) == (
        3,
        3600,
    )
    assert service.ensure(make_plan(), store, options).answer == "Paris."


def test_a_stop_lets_the_server_drain_and_keeps_its_last_words(store, make_plan, options, client):
    """Whoever stops the supervisor (systemd, say) stops the container, and gently."""
    service.ensure(make_plan("--drain", "1"), store, options)
    paths = spec.Paths(store, "small")
    (name,) = names(client)
    supervisor = spec.read_json(paths.state)["supervisor"]
    os.kill(supervisor["pid"], signal.SIGTERM)
    until(lambda: not procs.same_process(supervisor))
    assert client.pids(name) == [] and look(store).state == "stopped"
    assert "drained" in paths.log.read_text()
    assert client.container(name)["State"]["ExitCode"] == 0


def test_a_server_that_ignores_sigterm_is_killed_inside(store, make_plan, options, client):
    service.ensure(make_plan("--deaf"), store, options)
    paths = spec.Paths(store, "small")
    short = {**spec.read_json(paths.spec), "grace_s": 1}
    spec.write_json(paths.spec, short)
    state = spec.read_json(paths.state)
    (name,) = names(client)
    pids = client.pids(name)
    os.kill(state["supervisor"]["pid"], signal.SIGKILL)  # its container is an orphan now
    service.halt(paths)
    assert client.pids(name) == [] and [p for p in pids if procs.start_ticks(p)] == []


def test_what_is_missing_is_said_before_anything_is_made(store, make_plan, options, client):
    box = make_plan()["container"]
    absent = {**box, "image": {**box["image"], "digest": "sha256:" + "0" * 64}}
    with pytest.raises(HostError, match=r"image small@sha256:0+ is not on this host"):
        service.ensure(make_plan(container=absent), store, options)
    with pytest.raises(HostError, match=r"CDI devices, which Docker 20\.10"):
        gpus = {**box, "gpus": ["GPU-00000000-0000-0000-0000-000000000001"]}
        service.ensure(make_plan(container=gpus), store, options)
    other = {**box, "image": {**box["image"], "platform": "linux/arm64"}}
    if os.uname().machine == "x86_64":
        with pytest.raises(HostError, match="is for linux/amd64, this host is linux/arm64"):
            service.ensure(make_plan(container=other), store, options)
    assert names(client) == []


def test_a_model_that_the_container_cannot_read_is_named(store, make_plan, options, tmp_path):
    (tmp_path / "model" / "config.json").chmod(0o600)
    with pytest.raises(HostError, match=r"config\.json cannot be read by user 2000:0"):
        service.ensure(make_plan(), store, options)
