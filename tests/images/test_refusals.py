"""What cannot work is refused before anything loads: one clear line, exit status 1."""

import json
import re

import pytest
from entry_home import RTX, Home, card

GB10 = ("GPU-bb", "NVIDIA GB10", "12.1", "580.142", "[N/A]")
H200 = ("GPU-cc", "NVIDIA H200", "9.0", "580.126.09", "143771")
A100 = ("GPU-dd", "NVIDIA A100-SXM4-80GB", "8.0", "580.126.09", "81920")
RTX5090 = ("GPU-ee", "NVIDIA GeForce RTX 5090", "12.0", "580.126.09", "32607")

RECIPE = """\
schema: exl3-recipe/1
name: little
model: {{path: {model}, served_name: tiny}}
{more}
profiles:
  pair:
    match: {{compute_capability: "12.0", gpus_per_node: 2, nodes: 1}}
    parallel: {{tp: 2}}
    memory: {{utilization: 0.9, max_model_len: 4096, kv_cache_dtype: bf16}}
    comm: {{peer_access: disable, custom_all_reduce: disable}}
  single:
    match: {{compute_capability: "12.0", gpus_per_node: 1, nodes: 1}}
    parallel: {{tp: 1}}
    memory: {{utilization: 0.9, max_model_len: 4096}}
health:
  ready_timeout_s: 900
  smoke: {{endpoint: completion, prompt: Hello, max_tokens: 4}}
"""


@pytest.fixture
def home(tmp_path):
    home = Home(tmp_path / "container")
    home.cards(card(0), card(1))
    return home


def recipe(home, model, more=""):
    path = home.root / "little.yaml"
    path.write_text(RECIPE.format(model=model, more=more))
    return str(path)


def test_wrong_card_names_the_right_image(home):
    for kind, flavour in ((GB10, "sm121"), (H200, "hopper")):
        home.build(architectures="89")
        home.cards(card(0, kind))
        said = home.refusal("vllm", "serve", str(home.root / "models" / "absent"))
        assert said.startswith("wrong image: ") and kind[1] in said
        assert said.endswith(f"use the {flavour} image.")
    home.cards(card(0, A100))
    assert home.refusal("vllm", "serve", "/x").endswith("there is no image for it.")


def test_code_for_an_earlier_minor_and_ptx_run(home):
    """sm_120 code runs on 12.1, PTX of 12.0 on anything later, neither on 9.0."""
    from exl3_image import about

    code = about.architectures
    assert about.runs_on(code("120"), 121)
    assert about.runs_on(code("120+PTX"), 130)
    assert not about.runs_on(code("120"), 130)
    assert not about.runs_on(code("121"), 120)
    assert not about.runs_on(code("120+PTX"), 90)
    assert not about.runs_on(code("none"), 90)


def test_driver_too_old(home):
    home.cards(card(0, driver="570.211.01"))
    said = home.refusal("vllm", "serve", "/models/m")
    assert "the driver is 570.211.01" in said and "580.65.06 or newer" in said


@pytest.mark.parametrize(
    "lines,says",
    [
        (None, "no nvidia-smi in the container"),
        ((), "nvidia-smi says: No devices were found"),
    ],
)
def test_no_gpu_says_which_flag(home, lines, says):
    if lines is None:
        (home.root / "bin" / "nvidia-smi").unlink()
    else:
        home.cards(*lines, says="No devices were found", status=6)
    said = home.refusal("vllm", "serve", "/models/m")
    assert said.startswith("no GPU: ") and says in said
    assert "--gpus all" in said and "--device nvidia.com/gpu=all" in said
    done = home.run("doctor")
    assert done.returncode == 1
    assert re.search(r"^bad +gpu +no GPU", done.stdout, re.MULTILINE), done.stdout


def test_two_gpus_of_different_kinds(home):
    home.cards(card(0), card(1, RTX5090))
    said = home.refusal("vllm", "serve", "/models/m", "--tensor-parallel-size", "2")
    assert said.startswith("GPUs of different kinds cannot share a model")
    assert "RTX PRO 6000" in said and "RTX 5090" in said and "GPU-" in said
    # One rank uses the first card alone.
    assert "not in the store" in home.refusal("vllm", "serve", "/models/m")


def test_fewer_gpus_than_ranks(home):
    said = home.refusal("vllm", "serve", "/models/m", "-tp", "4")
    assert said.startswith("4 GPUs are needed and the container sees 2")


def test_unwritable_cache(home):
    blocked = home.root / "file"
    blocked.write_text("")
    said = home.refusal("vllm", "serve", "/models/m", EXL3_CACHE=str(blocked / "cache"))
    assert said.startswith(f"the cache {blocked}/cache cannot be written by UID ")
    assert "-v exl3-cache:/cache" in said and "--tmpfs /cache" in said
    said = home.refusal("vllm", "serve", "/models/m", TMPDIR=str(blocked / "tmp"))
    assert said.startswith("the temporary folder") and "--tmpfs /tmp" in said


def test_store_without_the_model(home):
    said = home.refusal("vllm", "serve", f"{home.root}/models/glm")
    assert said.startswith(
        f"the model is not in the store: there is no folder {home.root}/models/glm"
    )
    assert ":ro" in said
    folder = home.model()
    (folder / "model.safetensors").unlink()
    assert "no *.safetensors" in home.refusal("vllm", "serve", str(folder))


def test_weights_that_the_user_may_not_read(home, monkeypatch):
    """Root may read everything, so the answer of the system is replaced."""
    import os

    from exl3_image import Refusal, checks

    folder = home.model()
    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(Refusal, match=r"model\.safetensors cannot be read by UID \d+.*a\+rX"):
        checks.model(folder)


def test_shared_memory_too_small_for_ranks(tmp_path, monkeypatch):
    """The size is the file system's; test_cpu_image.py has a container with a really small one."""
    import os

    from exl3_image import Refusal, checks

    class Small:
        f_blocks, f_frsize = 16384, 4096

    monkeypatch.setattr(os, "statvfs", lambda path: Small)
    checks.shared_memory(1)
    with pytest.raises(
        Refusal, match=r"/dev/shm has 64 MiB and 2 ranks need 512 MiB.*--shm-size 1g"
    ):
        checks.shared_memory(2)
    with pytest.raises(Refusal, match=r"need 16384 MiB.*--shm-size 16g"):
        checks.shared_memory(2, wanted_gib=16)


def test_recipe_that_the_image_cannot_serve(home):
    folder = home.model(architecture="Glm5NextForCausalLM")
    said = home.refusal("serve", recipe(home, folder))
    assert "it is a Glm5NextForCausalLM, which vLLM 0.33.0 does not know" in said

    digest = "sha256:" + "0" * 64
    image = 'image: {name: x, digests: {linux/amd64: "%s"}, needs: {%s}}'
    for needs, words in (
        ('vllm: ">=0.34"', "needs vllm >=0.34, and this image has 0.33.0"),
        ('plugin: "==9.9"', "needs plugin ==9.9, and this image has 0.1.0"),
        ("model_classes: [NoSuchModel]", "needs NoSuchModel"),
        ("extras: [ib]", "needs ib, which this image was built without"),
    ):
        assert words in home.refusal("serve", recipe(home, folder, image % (digest, needs)))

    home.build(flavour="cpu", architectures="none")
    said = home.refusal("serve", recipe(home, folder))
    assert "no profile for the cpu image" in said and "use a GPU image" in said


def test_recipe_for_other_cards(home):
    home.build(architectures="90", flavour="hopper")
    home.cards(card(0, H200))
    said = home.refusal("serve", recipe(home, home.model()))
    assert "no profile of little fits 1 x NVIDIA H200 (sm 9.0)" in said
    assert "pair is for sm 12.0" in said and "single is for sm 12.0" in said


def test_broken_recipe_and_unknown_name(home):
    path = home.root / "bad.yaml"
    path.write_text("schema: exl3-recipe/1\nname: bad\n")
    assert "bad.yaml" in home.refusal("serve", str(path))
    assert "There is no recipe 'nothing'" in home.refusal("serve", "nothing")


def test_unknown_option_and_secret_in_the_command(home):
    folder = str(home.model())
    said = home.refusal("vllm", "serve", folder, "--max-model-length", "9")
    assert said == (
        "vLLM 0.33.0 of this image has no --max-model-length; did you mean --max-model-len?"
    )
    said = home.refusal("vllm", "serve", folder, "--api-key", "hush-hush")
    assert "VLLM_API_KEY_FILE" in said and "hush" not in said


def test_a_profile_is_chosen_and_becomes_one_argument_list(home):
    folder = home.model()
    args = 'serve: {args: {compilation-config: {"mode": 3, "note": "a b"}, enforce-eager: true}}'
    done = home.run("serve", recipe(home, folder, args))
    assert done.returncode == 0, done.stderr
    first, called = done.stdout.splitlines()
    assert "tiny on 2 x NVIDIA RTX PRO 6000" in first and "profile pair" in first
    argv = json.loads(called)["argv"]
    assert argv[:2] == ["serve", str(folder)]
    options = dict(zip(argv[2::2], argv[3::2])) | {"last": argv[-1]}
    assert options["--tensor-parallel-size"] == "2"
    assert options["--kv-cache-dtype"] == "bfloat16"
    assert argv[argv.index("--compilation-config") + 1] == '{"mode":3,"note":"a b"}'
    assert "--disable-custom-all-reduce" in argv and "--enforce-eager" in argv
    assert argv[argv.index("--shutdown-timeout") + 1] == "30"
    env = json.loads(called)["env"]
    assert env["NCCL_P2P_DISABLE"] == "1" and env["HF_HUB_OFFLINE"] == "1"
    key = "0123456789ab-nvidia-rtx-pro-6000-blackwell-server-edition"
    assert env["VLLM_CACHE_ROOT"] == f"{home.root}/cache/{key}/vllm"
    endpoint = json.loads((home.root / "tmp" / "exl3-endpoint.json").read_text())
    assert (endpoint["host"], endpoint["port"], endpoint["ready_timeout_s"]) == (
        "127.0.0.1",
        8000,
        900,
    )
    single = home.run("serve", recipe(home, folder), "--profile", "single")
    assert "on 1 x NVIDIA" in single.stdout.splitlines()[0]
    said = home.refusal("serve", recipe(home, folder), "--profile", "quad")
    assert "has no GPU profile 'quad'; it has pair, single" in said


def test_printing_starts_nothing(home):
    done = home.run("serve", recipe(home, home.model()), "--print")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 1
    assert not (home.root / "tmp" / "exl3-endpoint.json").exists()


def test_secrets_come_from_files_and_reach_the_server_alone(home):
    folder, secret = str(home.model()), home.root / "key"
    secret.write_text("hush-hush\n")
    done = home.run("vllm", "serve", folder, VLLM_API_KEY_FILE=str(secret))
    first, called = done.stdout.splitlines()
    assert "hush" not in first + done.stderr
    called = json.loads(called)
    assert called["env"]["VLLM_API_KEY"] == "hush-hush"
    assert "VLLM_API_KEY_FILE" not in called["env"] and "hush" not in str(called["argv"])
    assert "hush" not in (home.root / "tmp" / "exl3-endpoint.json").read_text()
    said = home.refusal("vllm", "serve", folder, VLLM_API_KEY_FILE="/nowhere/key")
    assert "VLLM_API_KEY_FILE=/nowhere/key cannot be read" in said
    secret.write_text("\n")
    assert "is empty" in home.refusal("vllm", "serve", folder, VLLM_API_KEY_FILE=str(secret))


def test_what_the_caller_sets_wins_and_the_status_is_the_servers(home):
    folder = str(home.model())
    done = home.run("serve", folder)
    assert done.returncode == 1  # a folder is no recipe
    done = home.run(
        "vllm", "serve", folder, "--shutdown-timeout=5", VLLM_CACHE_ROOT="/c", FAKE_STATUS="42"
    )
    called = json.loads(done.stdout.splitlines()[1])
    assert done.returncode == 42 and called["env"]["VLLM_CACHE_ROOT"] == "/c"
    assert called["argv"].count("--shutdown-timeout=5") == 1 and "30" not in called["argv"]
    # Options alone are meant for vLLM; a name of the Hub may be looked up.
    done = home.run("--model", "org/name")
    called = json.loads(done.stdout.splitlines()[1])
    assert called["argv"][:3] == ["serve", "--model", "org/name"]
    assert "HF_HUB_OFFLINE" not in called["env"]


def test_usage(home):
    assert "serve RECIPE" in home.run("--help").stdout
    done = home.run("dance")
    assert done.returncode == 2 and "unknown command 'dance'" in done.stderr
    assert home.run("version").stdout.startswith("exl3-fleet 0.1.0 (sm120 image, vLLM 0.33.0")
    assert json.loads(home.run("version", "--json").stdout)["key"] == "0123456789ab"


def test_fake_cards_are_what_they_should_be():
    """The table above is only as good as the reader of nvidia-smi's lines."""
    from exl3_image import cards

    card_ = cards._card(card(3, GB10))
    assert (card_.index, card_.capability, card_.memory_mib) == (3, 121, None)
    assert cards._card(card(0, RTX)).kind == cards._card(card(7, RTX)).kind
    assert cards._card("garbage") is None
    assert cards.version("580.126.09") > cards.version("580.65.06")
