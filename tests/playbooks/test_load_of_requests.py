"""Load, comparison of ways to pin, and calibration keys: figures that are known beforehand."""

import json
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from exl3_host import ab_pin, calibration, load, service, spec
from exl3_host.errors import HostError
from exl3_host.wait import Endpoint


class Known(BaseHTTPRequestHandler):
    """Streams what it was asked for, keeps what it was asked, fails every third request."""

    asked: ClassVar[list] = []
    fail_every = 0

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({**body, "authorization": self.headers.get("Authorization")})
        if self.fail_every and len(self.asked) % self.fail_every == 0:
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        # Three chunks that hold more than one token each: only the usage tells how many.
        for text in ("", "one two ", "three "):
            chunk = {"choices": [{"text": text}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def known():
    handler = type("Fresh", (Known,), {"asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield handler, Endpoint("127.0.0.1", server.server_port, "known")
    server.shutdown()
    server.server_close()


def test_tokens_are_the_servers_count_and_prompts_differ(known):
    handler, endpoint = known
    figures = load.measure(endpoint, load.Shape(6, 3, input_words=20, output_tokens=9))
    assert (figures.requests, figures.failed, figures.output_tokens) == (6, 0, 54)
    prompts = {one["prompt"] for one in handler.asked}
    assert len(prompts) == 6 and all(len(prompt.split()) == 20 for prompt in prompts)
    for one in handler.asked:
        assert one["ignore_eos"] and one["stream_options"] == {"include_usage": True}
    again = {load._prompt(load.Shape(6, 3, 20, 9), n) for n in range(6)}
    assert again == prompts, "the same seed asks the same"


def test_failures_are_counted_and_named(known):
    handler, endpoint = known
    handler.fail_every = 3
    figures = load.measure(endpoint, load.Shape(6, 1))
    assert figures.failed == 2 and "status 503" in figures.errors[0]


def test_nobody_there_is_an_error():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", probe.getsockname()[1], "x")
    with pytest.raises(HostError, match="answered none of 2 requests"):
        load.measure(endpoint, load.Shape(2, 1))


def test_the_key_goes_along_and_into_no_figure(known, tmp_path):
    handler, endpoint = known
    key = tmp_path / "key"
    key.write_text("canary-ab12\n")
    keyed = Endpoint(endpoint.host, endpoint.port, "known", api_key_file=str(key))
    figures = load.measure(keyed, load.Shape(1, 1))
    assert handler.asked[0]["authorization"] == "Bearer canary-ab12"
    assert "canary-ab12" not in json.dumps(figures.as_dict())


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([], 50, 0.0), ([7.0], 99, 7.0), ([4.0, 1.0, 3.0, 2.0], 50, 2.0), ([1.0, 2.0], 99, 2.0)],
)
def test_percentiles_by_nearest_rank(values, percent, expected):
    assert load.percentile(values, percent) == expected


def test_the_mildest_of_equally_fast_ways_is_kept():
    assert ab_pin.pick({"none": 100.0, "container": 101.9})[0] == "none"
    assert ab_pin.pick({"none": 100.0, "container": 103.0})[0] == "container"
    assert ab_pin.pick({"container": 90.0, "per_rank": 140.0})[0] == "per_rank"


def test_the_faster_way_of_pinning_serves_in_the_end(store, make_plan):
    def planner(mode):
        if mode == "per_rank":
            raise HostError("per-rank pinning needs one node per GPU")
        bind = "nobind" if mode == "none" else "0"
        plan = make_plan("--slow-unless-bound", serve={"env": {"VLLM_CPU_OMP_THREADS_BIND": bind}})
        return {**plan, "config_hash": bind}

    options = service.Options(manager="supervisor")
    shape = load.Shape(4, 2, 10, 16)
    result = ab_pin.compare(planner, store, "small", options, 1, shape)
    assert result["mode"] == "container" == ab_pin.chosen(store, "small")
    assert result["skipped"] == {"per_rank": "per-rank pinning needs one node per GPU"}
    rows = {row["mode"]: row["tokens_per_s"] for row in result["rows"]}
    assert rows["container"] > 2 * rows["none"], "20 ms and 2 ms for each token"
    running = spec.read_json(spec.Paths(store, "small").spec)
    assert running["env"]["VLLM_CPU_OMP_THREADS_BIND"] == "0"


H200 = {
    "name": "NVIDIA H200",
    "compute_capability": "9.0",
    "memory_bytes": 150754820096,
    "driver": "580.95.05",
}


def test_a_profile_belongs_to_device_driver_and_release(tmp_path):
    key = calibration.key_of(H200, "sha256:aa")
    path = calibration.file_of(tmp_path, key)
    path.parent.mkdir()
    path.write_text("{}")
    facts = {"gpus": [H200, {**H200, "driver": "580.126.09"}]}
    assert calibration.find(tmp_path, facts, "sha256:aa", "auto") == path
    assert path.name.startswith("nvidia-h200-")
    for other in ({**H200, "driver": "590.10"}, {**H200, "memory_bytes": 85899345920}):
        assert calibration.find(tmp_path, {"gpus": [other]}, "sha256:aa", "auto") is None
    assert calibration.find(tmp_path, facts, "sha256:bb", "auto") is None
    with pytest.raises(
        HostError, match=r"(?s)requires a calibration of NVIDIA H200.*calibrate\.yml"
    ):
        calibration.find(tmp_path, facts, "sha256:bb", "require")
    assert calibration.find(tmp_path, facts, "sha256:aa", "skip") is None
    assert calibration.find(tmp_path, {"gpus": []}, "sha256:aa", "require") is None


def test_two_types_of_device_have_no_common_profile(tmp_path):
    facts = {"gpus": [H200, {**H200, "name": "NVIDIA H100"}]}
    assert calibration.find(tmp_path, facts, "x", "auto") is None
    with pytest.raises(HostError, match="several types of GPU"):
        calibration.find(tmp_path, facts, "x", "require")


def program(checkout, text: str):
    """A checkout whose calibration program is this text."""
    (checkout / "bench").mkdir(parents=True)
    (checkout / "bench" / "calibrate.py").write_text(text)
    return calibration.native_command(sys.executable, checkout)


WRITES = """\
import json, os, sys
out = sys.argv[sys.argv.index("--out") + 1]
json.dump([os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[3:]], open(out, "w"))
"""


def test_each_type_is_measured_once_and_found_by_plans(tmp_path):
    """The program is a stand-in: what is shown is who is measured, when, and where it is kept."""
    store = tmp_path / "store"
    facts = {"gpus": [{**H200, "index": 0}, {**H200, "index": 1}]}
    facts["gpus"].append({**H200, "name": "NVIDIA L4", "index": 2})
    command = program(tmp_path / "checkout", WRITES)
    assert calibration.measure(store, facts, "r1", command, is_check=True)[0]
    assert not (store / "calibration").exists()
    changed, told = calibration.measure(store, facts, "r1", command, arguments=("--bits", "4"))
    assert changed and [one.split(":")[0] for one in told] == ["NVIDIA H200", "NVIDIA L4"]
    alone = {"gpus": facts["gpus"][:2]}
    path = calibration.find(store, alone, "r1", "require")
    assert json.loads(path.read_text()) == ["0", ["--bits", "4"]]
    assert calibration.measure(store, facts, "r1", command)[0] is False
    assert calibration.measure(store, alone, "r2", command)[0] is True
    assert len(spec.read_json(store / "calibration" / calibration.INDEX)) == 3


ADDS = """\
import json, os, sys
out, words = sys.argv[2], sys.argv[3:]
held = json.load(open(out)) if "--extend" in words else []
json.dump([*held, words], open(out, "w"))
"""


def plan_of(folder: Path, *argv: str) -> dict:
    return {"model": {"dir": str(folder)}, "serve": {"argv": ["vllm", "serve", *argv]}}


def test_the_experts_of_each_model_are_measured_once(tmp_path):
    """A profile is extended by a model it does not cover, in the way the GPUs share it."""
    store, folder = tmp_path / "store", tmp_path / "qwen3"
    whole = ("--tensor-parallel-size", "2", "--data-parallel-size", "4", "--enable-expert-parallel")
    assert calibration.model_of(plan_of(folder, *whole)) is None, "not downloaded yet"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    models = [
        calibration.model_of(plan_of(folder, *argv))
        for argv in ((), ("--tensor-parallel-size", "2", "--data-parallel-size", "4"), whole)
    ]
    assert [model.name for model in models] == [
        "qwen3 on 1", "qwen3 on 2", "qwen3 on 8, whole experts",
    ]  # fmt: skip
    facts = {"gpus": [{**H200, "index": 0}]}
    (tmp_path / "checkout" / "bench").mkdir(parents=True)
    (tmp_path / "checkout" / "bench" / "calibrate.py").write_text(ADDS)

    def measure(model, **options):
        command = calibration.native_command(sys.executable, tmp_path / "checkout", model)
        changed, told = calibration.measure(store, facts, "r1", command, model=model, **options)
        return changed, told[0].partition(": ")[2].partition(" (")[0]

    shared = ["--model", str(folder), "--tensor-parallel-size"]
    add = ["--shapes", "none", "--extend"]
    assert measure(None) == (True, "measured")
    experts = "the experts of qwen3, if any, "
    assert measure(models[1], is_check=True) == (True, f"{experts}would be measured")
    for model in models[1:]:
        assert measure(model) == (True, f"{experts}measured")
        assert measure(model) == (False, "kept")
    assert measure(None) == (False, "kept")
    path = calibration.find(store, facts, "r1", "require")
    eight = [*shared, "8", "--enable-expert-parallel", *add]
    assert json.loads(path.read_text()) == [[], [*shared, "2", *add], eight]
    assert measure(models[0], force=True) == (True, "measured")
    assert json.loads(path.read_text()) == [[*shared, "1"]]
    assert measure(models[1]) == (True, f"{experts}measured"), "a new profile, a new list"


def test_a_measurement_that_fails_keeps_no_profile(tmp_path):
    command = program(tmp_path / "checkout", "raise SystemExit('the GPU is busy')")
    facts = {"gpus": [{**H200, "index": 0}]}
    with pytest.raises(HostError, match=r"(?s)exit status 1.*the GPU is busy"):
        calibration.measure(tmp_path / "store", facts, "r1", command)
    assert calibration.find(tmp_path / "store", facts, "r1", "auto") is None


def test_a_missing_package_is_named(tmp_path):
    command = program(tmp_path / "checkout", "import exl3_no_such_package.part")
    facts = {"gpus": [{**H200, "index": 0}]}
    with pytest.raises(HostError) as caught:
        calibration.measure(tmp_path / "store", facts, "r1", command)
    said = str(caught.value)
    assert said.startswith("calibrating NVIDIA H200 needs the Python package exl3_no_such_package")
    assert "-m pip install exl3_no_such_package" in said and "Traceback" not in said


def test_in_an_image_one_gpu_is_handed_over_and_nothing_else():
    box = {"image": {"name": "exl3", "digest": "sha256:aa"}, "user": "2000:0"}
    command = calibration.container_command(box, "unix:///x.sock")
    words = command(Path("/store/calibration/drafts/h200.json"), {"uuid": "GPU-1"})
    assert words[:4] == ["docker", "-H", "unix:///x.sock", "run"]
    assert words[-4:] == ["exl3@sha256:aa", "calibrate", "--out", "/out/h200.json"]
    assert words[words.index("--device") + 1] == "nvidia.com/gpu=GPU-1"
    assert words[words.index("--network") + 1] == "none"
    model = calibration.Model("/store/models/qwen3-4bpw", 2)
    command = calibration.container_command(box, "unix:///x.sock", model)
    words = command(Path("/store/calibration/drafts/h200.json"), {"uuid": "GPU-1"})
    mounts = [words[at + 1] for at, word in enumerate(words) if word == "--mount"]
    inside = "/models/qwen3-4bpw"
    assert f"type=bind,source=/store/models/qwen3-4bpw,target={inside},readonly" in mounts
    assert words[-4:] == ["--model", inside, "--tensor-parallel-size", "2"]
