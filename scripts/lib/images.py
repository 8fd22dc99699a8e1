"""Builds images with plain `docker build` (see scripts/build-images, which is how it is called).

The targets, their arguments and their tags are those of images/docker-bake.hcl; this adds what a
machine without buildx or a registry needs: a base from Debian's archive, a private engine, and the
machine's own pip settings as build secrets.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import tomllib

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bake
import image_diff
import pip_relay

CHECKOUT = Path(__file__).resolve().parents[2]
BAKE = CHECKOUT / "images" / "docker-bake.hcl"
VERSIONS = CHECKOUT / "images" / "versions.json"
HERE = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}[platform.machine()]


class BuildError(RuntimeError):
    """An image cannot be built; the message says what to do."""


def source_hash(checkout: Path = CHECKOUT) -> str:
    """SHA-256 over the kernels' sources, as csrc/source_hash.cmake compiles it in."""
    listed = (checkout / "csrc" / "source_hash.cmake").read_text()
    globs = re.findall(r"\$\{ROOT\}/(csrc/[\w*/.]+)", listed)
    files = sorted({str(path.relative_to(checkout)) for g in globs for path in checkout.glob(g)})
    lines = [
        f"{name} {hashlib.sha256((checkout / name).read_bytes()).hexdigest()}\n"
        for name in files
        if (checkout / name).is_file()
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def environment() -> dict[str, str]:
    """What versions.json cannot know, because it depends on the checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], capture_output=True)
        return done.stdout.decode().strip() if done.returncode == 0 else ""

    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    epoch = git("log", "-1", "--format=%ct") or "315532800"
    created = datetime.fromtimestamp(int(epoch), timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    changed = "+changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return {
        "PLUGIN": project["version"],
        "SOURCE_HASH": source_hash(),
        "REVISION": (git("rev-parse", "HEAD") or "unknown") + changed,
        "CREATED": created,
    }


def client() -> list[str]:
    """A docker client that builds with BuildKit. Raises BuildError where there is none.

    Clients from version 23 on need the buildx plugin for it; older ones, Debian's among them, do it
    alone.
    """
    candidates = dict.fromkeys(filter(None, (shutil.which("docker"), "/usr/bin/docker")))
    for program in candidates:
        if not Path(program).exists():
            continue
        buildx = subprocess.run([program, "buildx", "version"], capture_output=True)
        version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"version (\d+)", version)
        if buildx.returncode == 0 or (found and int(found[1]) < 23):
            return [program]
    raise BuildError(
        "no docker client here builds with BuildKit: install docker.io (Debian 12) or the buildx "
        f"plugin; looked at {', '.join(candidates) or 'PATH and /usr/bin/docker'}"
    )


def debootstrap(docker: list[str], env: dict[str, str], arch: str) -> str:
    """Import a base made of Debian's archive, unless it is there already; returns its name."""
    name = f"exl3-base:bookworm-{arch}"
    there = subprocess.run([*docker, "image", "inspect", name], capture_output=True, env=env)
    if there.returncode == 0:
        return name
    if not shutil.which("debootstrap") and not Path("/usr/sbin/debootstrap").exists():
        raise BuildError("--debootstrap needs debootstrap: apt-get install debootstrap")
    with tempfile.TemporaryDirectory(dir=CHECKOUT / "build" / "images") as scratch:
        root = Path(scratch) / "root"
        command = ["debootstrap", f"--arch={arch}", "--variant=minbase"]
        command += ["--include=ca-certificates", "bookworm", str(root)]
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        log = Path(scratch) / "log"
        with log.open("w") as file:
            done = subprocess.run(command, stdout=file, stderr=file, env={**env, "PATH": path})
        if done.returncode != 0:
            raise BuildError("debootstrap failed:\n" + log.read_text()[-2000:])
        for place in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / place, ignore_errors=True)
        # Not `docker import`: engines before 23 give what they import the processor of their own.
        (root.parent / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
        command = ["tar", "-C", str(root), "--numeric-owner", "-cf", f"{root}.tar", "."]
        subprocess.run(command, check=True)
        shutil.rmtree(root)
        command = [*docker, "build", "--quiet", "--platform", f"linux/{arch}", "--tag", name]
        done = subprocess.run([*command, scratch], capture_output=True, text=True, env=env)
        if done.returncode != 0:
            raise BuildError(f"the base cannot be packed: {done.stderr.strip()}")
    return name


def emulate(env: dict[str, str]) -> None:
    """Let this machine run the other processor's programs. Raises BuildError."""
    helper = CHECKOUT / "scripts" / "lib" / "emulate.sh"
    if HERE != "linux/amd64":
        raise BuildError("images for linux/amd64 are built on x86_64, or with buildx")
    if subprocess.run([helper], env=env).returncode != 0:
        raise BuildError("programs for linux/arm64 do not run here; the reason is above")


def build_command(
    docker: list[str], target: dict, options: argparse.Namespace, place: str, own: dict[str, str]
) -> list[str]:
    """`docker build` for one target and platform; arguments in `own` replace the target's."""
    command = [*docker, "build", "--network", "host", "--file", target["dockerfile"]]
    command += ["--target", options.stage or target["target"]]
    if place != HERE:
        command += ["--platform", place]
    arguments = target["args"] | own
    # Known to buildx by itself; an engine without it fills them in only for foreign platforms.
    arguments |= {"TARGETARCH": place.partition("/")[2], "BUILDPLATFORM": HERE}
    for name, value in sorted(arguments.items()):
        command += ["--build-arg", f"{name}={value}"]
    if options.stage == "wheel":
        command += ["--output", f"type=local,dest={options.out}"]
    else:
        for tag in target["tags"]:
            command += ["--tag", tag if not options.stage else f"{tag}-{options.stage}"]
    return [*command, *(["--no-cache"] if options.no_cache else []), target["context"]]


def build(options: argparse.Namespace) -> None:
    """Build everything asked for. Raises BuildError."""
    env = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    values = bake.variables(VERSIONS, {**environment(), **os.environ})
    known = bake.targets(BAKE, values)
    for name in options.targets:
        if name not in known:
            raise BuildError(f"there is no target {name}; there are {', '.join(known)}")
    docker = ["docker"] if options.print else client()
    if options.engine and not options.print:
        helper = CHECKOUT / "scripts" / "lib" / "dockerd.sh"
        done = subprocess.run(
            [helper, "start", options.engine], stdout=subprocess.PIPE, text=True, env=env
        )
        if done.returncode != 0:
            raise BuildError("the private Docker engine does not start; its words are above")
        env["DOCKER_HOST"] = done.stdout.strip()
    (CHECKOUT / "build" / "images").mkdir(parents=True, exist_ok=True)
    for name in options.targets:
        target = known[name]
        places = [options.platform] if options.platform else target["platforms"]
        if options.platform and options.platform not in target["platforms"]:
            raise BuildError(
                f"target {name} is for {' and '.join(target['platforms'])}, not {options.platform}"
            )
        if not options.platform and HERE in places:
            places = [HERE]
        for place in places:
            # A stage that only cross-compiles needs nothing of the other processor.
            arch = HERE if options.stage in ("wheel", "libraries", "packer") else place
            if arch != HERE and not options.print:
                emulate(env)
            own = {} if place == HERE else {"UNPACK_BY": "builder"}
            if options.base:
                own |= {"BASE_IMAGE": options.base, "BUILDER_IMAGE": options.base}
            elif options.debootstrap and not options.print:
                own["BUILDER_IMAGE"] = debootstrap(docker, env, HERE.partition("/")[2])
                own["BASE_IMAGE"] = debootstrap(docker, env, arch.partition("/")[2])
            command = build_command(docker, target, options, place, own)
            if options.print:
                print(shlex.join(command))
                continue
            run(command, env)
            if options.twice:
                again(docker, command, target["tags"][0], env)
            if options.out and not options.stage:
                archive = Path(options.out) / f"exl3-fleet-{name}.tar"
                archive.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(
                    [*docker, "save", "--output", str(archive), target["tags"][0]],
                    check=True,
                    env=env,
                )
                print(f"==> archive: {archive}")
            if not options.stage:
                print(f"==> image: {target['tags'][0]} ({place})", flush=True)


def again(docker: list[str], command: list[str], name: str, env: dict[str, str]) -> None:
    """Build an image once more and compare it with the one that is there, file by file.

    The older one stays as NAME-first. Raises BuildError where they differ.
    """
    subprocess.run([*docker, "tag", name, f"{name}-first"], check=True, env=env)
    run(command, env)
    host = ["--docker-host", env["DOCKER_HOST"]] if "DOCKER_HOST" in env else []
    if image_diff.main([f"{name}-first", name, *host]) != 0:
        raise BuildError(f"two builds of {name} hold different files; see above")


def run(command: list[str], env: dict[str, str]) -> None:
    """One build, with this machine's pip settings as secrets. Raises BuildError."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        secrets = stack.enter_context(pip_relay.relay(scratch))
        done = subprocess.run([*command[:-1], *secrets, command[-1]], cwd=CHECKOUT, env=env)
    if done.returncode != 0:
        raise BuildError(f"docker build ended with exit status {done.returncode}; see above")


def main(arguments: list[str] | None = None) -> int:
    """Command line: 0 built, 1 not."""
    parser = argparse.ArgumentParser(prog="scripts/build-images")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--platform", choices=sorted(HERE_AND_THERE))
    parser.add_argument("--stage")
    parser.add_argument("--base")
    parser.add_argument("--debootstrap", action="store_true")
    parser.add_argument("--engine")
    parser.add_argument("--out")
    parser.add_argument("--no-cache", action="store_true")
    parser.add_argument("--twice", action="store_true")
    parser.add_argument("--print", action="store_true")
    parser.add_argument("--environment", action="store_true")
    options = parser.parse_args(arguments)
    options.targets = options.targets or ["cpu"]
    if options.environment:
        for name, value in environment().items():
            print(f"export {name}={shlex.quote(value)}")
        return 0
    if options.stage == "wheel" and not options.out:
        options.out = "dist"
    if options.twice and options.stage:
        parser.error("--twice compares whole images, not a --stage")
    options.no_cache |= options.twice
    try:
        build(options)
    except (BuildError, bake.BakeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


HERE_AND_THERE = ("linux/amd64", "linux/arm64")

if __name__ == "__main__":
    sys.exit(main())
