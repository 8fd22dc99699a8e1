"""`serve RECIPE` and plain `vllm serve ...`: the command and environment of a server.

Nothing here is a string that a shell would read: a recipe holds maps, and what runs is a list.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from exl3_image import HOME, Refusal, about, cache_root, cards, checks, endpoint_file, models_root

VLLM = HOME / "venv" / "bin" / "vllm"
DRAIN_S = 30
"""Seconds that running requests get after SIGTERM, where nobody says otherwise. The engine's own
grace (docker stop --time) has to be longer."""
READY_S = 1800
SECRETS = {
    "VLLM_API_KEY": ("VLLM_API_KEY_FILE", "/run/secrets/vllm_api_key"),
    "HF_TOKEN": ("HF_TOKEN_FILE", "/run/secrets/hf_token"),
}


@dataclass
class Server:
    """What will run. `ranks` counts GPUs (or CPU ranks) of this container."""

    argv: list[str]
    model: str
    served_name: str
    host: str
    port: int
    ranks: int
    env: dict[str, str] = field(default_factory=dict)
    profile: str | None = None
    shm_gib: int | None = None
    ready_timeout_s: int = READY_S


def plain(words: list[str]) -> Server:
    """The server that `vllm serve MODEL --option ...` asks for.

    Raises Refusal where the words are not of that form.
    """
    if words[:1] != ["serve"] or len(words) < 2:
        raise Refusal(
            f"'vllm {' '.join(words[:1])}': this entry point runs `vllm serve MODEL ...`."
        )
    reader = argparse.ArgumentParser(prog="vllm serve", add_help=False, allow_abbrev=False)
    reader.add_argument("model", nargs="?")
    reader.add_argument("--model", dest="model_option")
    reader.add_argument("--host", default="0.0.0.0")
    reader.add_argument("--port", type=int, default=8000)
    reader.add_argument("--served-model-name", nargs="+", default=[])
    for name, short in (("tensor", "-tp"), ("pipeline", "-pp"), ("data", "-dp")):
        reader.add_argument(f"--{name}-parallel-size", short, type=int, default=1, dest=name)
    rest = [word for word in words[1:] if word not in ("-h", "--help")]
    seen, _ = reader.parse_known_args(rest)
    model = seen.model or seen.model_option or ""
    return Server(
        argv=[str(VLLM), *words],
        model=model,
        served_name=(seen.served_model_name or [model])[0],
        host=seen.host,
        port=seen.port,
        ranks=seen.tensor * seen.pipeline * seen.data,
    )


def from_recipe(options: argparse.Namespace, build: dict, sight: cards.Sight) -> Server:
    """The server that a recipe describes, on the profile that fits. Raises Refusal."""
    from exl3_host import facts as host_facts
    from exl3_host import plan as planner
    from exl3_host.errors import HostError, RecipeError
    from exl3_host.recipe import find_recipe, load_recipe
    from exl3_host.schema import CpuProfile

    try:
        folders = [place for place in (Path("/recipes"), HOME / "recipes") if place.is_dir()]
        loaded = load_recipe(find_recipe(options.recipe, folders))
    except RecipeError as error:
        first = error.problems[0]
        more = len(error.problems) - 1
        rest = f" ({more} more: exl3ctl recipe lint {options.recipe})" if more else ""
        raise Refusal(f"{first.text()}{rest}") from None
    except HostError as error:
        raise Refusal(str(error)) from None
    needs(loaded, build)
    wants_gpu = build["flavour"] != "cpu"
    kinds = {name: not isinstance(p, CpuProfile) for name, p in loaded.recipe.profiles.items()}
    if not any(is_gpu == wants_gpu for is_gpu in kinds.values()):
        other = "a GPU image" if not wants_gpu else "the cpu image"
        raise Refusal(
            f"recipe {loaded.recipe.name} has no profile for the {build['flavour']} image (it has "
            f"{', '.join(kinds)}): use {other}."
        )
    if wants_gpu:
        return gpu_server(loaded, options, choose_gpu_profile(loaded, options.profile, sight))
    try:
        instance = planner.Instance(
            name=loaded.recipe.name,
            store="/",
            runtime="native",  # inside a container nothing starts another one
            venv=str(HOME / "venv"),
            port=options.port,
            host=options.host,
            profile=options.profile,
            api_key_file=key_file() if loaded.recipe.secrets.api_key else None,
        )
        made = planner.plan_here(loaded, instance, host_facts.collect())
    except HostError as error:
        raise Refusal(str(error)) from None
    except PermissionError as error:
        raise Refusal(
            f"{error.filename} cannot be read by UID {os.getuid()}, GID {os.getgid()}: the store's "
            "files must be readable by the user of the container (chmod -R a+rX)."
        ) from None
    # The store is elsewhere on the host; in here only its models are mounted.
    outside = made["model"]["dir"]
    inside = str(inside_models(loaded, outside))
    argv = [*made["pin"]["numactl"], *made["serve"]["argv"]]
    argv = [inside if word == outside else word for word in argv]
    checks.model(Path(inside))
    if not made["fit"]["ok"]:
        raise Refusal(f"{loaded.recipe.name} does not fit: {' '.join(made['fit']['reasons'])}")
    env = {name: value for name, value in made["serve"]["env"].items() if name != "VLLM_CACHE_ROOT"}
    return Server(
        argv=argv,
        model=inside,
        served_name=made["model"]["served_name"],
        host=options.host,
        port=options.port,
        ranks=loaded.recipe.profiles[made["profile"]].parallel.tp,
        env=env,
        profile=made["profile"],
        ready_timeout_s=loaded.recipe.health.ready_timeout_s,
    )


def inside_models(loaded: object, outside: str) -> Path:
    """Where a model of the plan lies in the container: below the mounted models folder."""
    if loaded.recipe.model.path is not None and loaded.recipe.model.quantize is None:
        given = Path(outside)
        return given if given.is_dir() else models_root() / given.name
    return models_root() / Path(outside).name


def needs(loaded: object, build: dict) -> None:
    """The recipe's image.needs hold for this image. Raises Refusal."""
    wanted = loaded.recipe.image.needs if loaded.recipe.image else None
    if wanted is None:
        return
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    for name in ("plugin", "vllm"):
        text = getattr(wanted, name)
        if text is None:
            continue
        try:
            fits = SpecifierSet(text).contains(build[name].partition("+")[0], prereleases=True)
        except InvalidSpecifier:
            fits = build[name] == text
        if not fits:
            raise Refusal(
                f"recipe {loaded.recipe.name} needs {name} {text}, and this image has "
                f"{build[name]}: use the image that the recipe names."
            )
    known = about.load("models.json")["architectures"]
    lacking = [name for name in wanted.model_classes if name not in known]
    if lacking:
        raise Refusal(
            f"recipe {loaded.recipe.name} needs {', '.join(lacking)}, which vLLM {build['vllm']} "
            "of this image does not know."
        )
    lacking = [name for name in wanted.extras if name not in build["extras"]]
    if lacking:
        raise Refusal(
            f"recipe {loaded.recipe.name} needs {', '.join(lacking)}, which this image was built "
            "without (docs/images.md, extras)."
        )


def choose_gpu_profile(loaded: object, wanted: str | None, sight: cards.Sight) -> str:
    """The GPU profile that was asked for, else the first that fits the cards. Raises Refusal."""
    from exl3_host.schema import GpuProfile

    profiles = {n: p for n, p in loaded.recipe.profiles.items() if isinstance(p, GpuProfile)}
    if wanted is not None and wanted not in profiles:
        raise Refusal(
            f"recipe {loaded.recipe.name} has no GPU profile '{wanted}'; it has "
            f"{', '.join(profiles)}."
        )
    if wanted is not None or not sight.cards:
        return wanted or next(iter(profiles))
    dropped = []
    for name, profile in profiles.items():
        match, card = profile.match, sight.cards[0]
        if match.compute_capability != card.sm:
            dropped.append(f"{name} is for sm {match.compute_capability}")
        elif match.gpus_per_node > len(sight.cards):
            dropped.append(f"{name} wants {match.gpus_per_node} GPUs")
        elif match.vram_gib_min and (card.memory_mib or 2**40) / 1024 < match.vram_gib_min:
            dropped.append(f"{name} wants {match.vram_gib_min:g} GiB a GPU")
        elif match.nodes > 1:
            dropped.append(f"{name} is for {match.nodes} hosts")
        else:
            return name
    card = sight.cards[0]
    raise Refusal(
        f"no profile of {loaded.recipe.name} fits {len(sight.cards)} x {card.name} (sm {card.sm}): "
        f"{'; '.join(dropped)}."
    )


def gpu_server(loaded: object, options: argparse.Namespace, name: str) -> Server:
    """The server of a GPU profile on one host."""
    from exl3_host import arguments, sources
    from exl3_host.errors import HostError

    recipe, profile = loaded.recipe, loaded.recipe.profiles[name]
    memory, parallel = profile.memory, profile.parallel
    folder = inside_models(loaded, sources.model_dir(loaded, "/"))
    served_name = recipe.model.served_name or recipe.name
    settings = {
        "host": options.host,
        "port": options.port,
        "served-model-name": served_name,
        "max-model-len": memory.max_model_len,
        "gpu-memory-utilization": memory.utilization,
        "tensor-parallel-size": parallel.tp,
    }
    optional = {
        "pipeline-parallel-size": parallel.pp if parallel.pp > 1 else None,
        "data-parallel-size": parallel.dp if parallel.dp > 1 else None,
        "enable-expert-parallel": True if parallel.expert else None,
        # vLLM spells it out.
        "kv-cache-dtype": {"bf16": "bfloat16"}.get(memory.kv_cache_dtype, memory.kv_cache_dtype),
        "trust-remote-code": True if recipe.model.trust_remote_code else None,
        "disable-custom-all-reduce": True if profile.comm.custom_all_reduce == "disable" else None,
    }
    settings |= {key: value for key, value in optional.items() if value is not None}
    try:
        args = arguments.merge_args(recipe.serve.args, profile.args)
        env = arguments.merge_env(recipe.serve.env, profile.env)
    except HostError as error:
        raise Refusal(str(error)) from None
    if profile.comm.peer_access == "disable":
        env["NCCL_P2P_DISABLE"] = "1"
    return Server(
        argv=[str(VLLM), "serve", str(folder), *arguments.argument_list(settings | args)],
        model=str(folder),
        served_name=served_name,
        host=options.host,
        port=options.port,
        ranks=parallel.tp * parallel.pp * parallel.dp,
        env=env,
        profile=name,
        shm_gib=profile.comm.shm_gib,
        ready_timeout_s=recipe.health.ready_timeout_s,
    )


def key_file() -> str:
    """The file that holds the API key that a recipe wants. Raises Refusal where there is none."""
    variable, default = SECRETS["VLLM_API_KEY"]
    place = os.environ.get(variable, default)
    if not Path(place).is_file():
        raise Refusal(
            f"the recipe wants an API key and {place} is no file: mount one and name it in "
            f"{variable}."
        )
    return place


def secrets(environ: dict[str, str]) -> dict[str, str]:
    """Secrets from files, for the server's environment and nowhere else. Raises Refusal."""
    found = {}
    for name, (variable, default) in SECRETS.items():
        place = environ.get(variable)
        if place is None and not Path(default).is_file():
            continue
        try:
            value = Path(place or default).read_text().strip()
        except OSError as error:
            raise Refusal(f"{variable}={place} cannot be read: {error.strerror}.") from None
        if not value:
            raise Refusal(f"{place or default} is empty: it should hold a secret.")
        found[name] = value
    return found


def caches(build: dict, used: tuple[cards.Card, ...]) -> dict[str, str]:
    """Where compiled code goes: one folder per image and kind of card, so that an upgrade or
    another card never meets code that was made for something else.
    """
    card = used[0].name.lower().replace(" ", "-") if used else "cpu"
    root = cache_root() / f"{build['key']}-{card}"
    return {
        "VLLM_CACHE_ROOT": f"{root}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{root}/inductor",
        "TRITON_CACHE_DIR": f"{root}/triton",
        "FLASHINFER_WORKSPACE_BASE": f"{root}/flashinfer",
        "CUDA_CACHE_PATH": f"{root}/cuda",
        "XDG_CACHE_HOME": f"{root}/xdg",
    }


def environment(server: Server, build: dict, used: tuple[cards.Card, ...]) -> dict[str, str]:
    """The server's whole environment; what the caller set wins over what is only a default."""
    defaults = caches(build, used)
    if Path(server.model).is_dir():
        # The model is here: a server that reaches for the Hub would hang without network.
        defaults |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if used:
        defaults["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env = {**defaults, **server.env, **os.environ, **secrets(dict(os.environ))}
    for variable, _ in SECRETS.values():
        env.pop(variable, None)
    return env


def drained(argv: list[str]) -> list[str]:
    """The command with time for running requests to end, where it says nothing about it."""
    if any(word.split("=")[0].replace("_", "-") == "--shutdown-timeout" for word in argv):
        return argv
    seconds = os.environ.get("EXL3_DRAIN_S", str(DRAIN_S))
    if not seconds.isdigit():
        raise Refusal(f"EXL3_DRAIN_S={seconds} is no number of seconds.")
    return [*argv, "--shutdown-timeout", seconds]


def check(server: Server, build: dict, sight: cards.Sight) -> tuple[cards.Card, ...]:
    """Everything that can be known before vLLM loads. Raises Refusal; returns the cards used."""
    used = checks.cards(build, sight, server.ranks)
    checks.places()
    checks.shared_memory(server.ranks, server.shm_gib)
    if server.model.startswith("/"):
        config = checks.model(Path(server.model))
        checks.model_class(build, config, Path(server.model))
    checks.arguments(build, server.argv)
    return used


def run(server: Server, build: dict, sight: cards.Sight, show_only: bool = False) -> int:
    """Check, say in one line what runs, and become the init process of the server."""
    used = check(server, build, sight)
    argv = drained(server.argv)
    env = environment(server, build, used)
    on = f"{len(used)} x {used[0].name}" if used else "the CPU"
    profile = f", profile {server.profile}" if server.profile else ""
    print(
        f"{about.line(build)}: {server.served_name} on {on}{profile}, "
        f"http://{server.host}:{server.port}: {shlex.join(argv)}",
        flush=True,
    )
    if show_only:
        return 0
    # 0.0.0.0 is where a server listens, not where it is asked.
    asked = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(server.host, server.host)
    endpoint_file().write_text(
        json.dumps(
            {
                "host": asked,
                "port": server.port,
                "served_name": server.served_name,
                "ready_timeout_s": server.ready_timeout_s,
                "started": time.time(),
            }
        )
    )
    init = Path(__file__).with_name("init.py")
    os.execve(sys.executable, [sys.executable, "-I", "-S", str(init), *argv], env)
