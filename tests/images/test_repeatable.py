"""Two builds of one image, compared by the engine's own export: what differs is found and named.

The comparison is tried on small images here. `scripts/build-images cpu --twice` builds the CPU
image two times without cache, which takes minutes.
"""

import os
import re
import subprocess

import pytest

import images

NAME = "exl3-test:twice"
ONE_WAY = """\
touch -d @1 /opt/touched; echo always > /opt/same; echo 1 > /opt/content; touch /opt/first;
touch /opt/mode /opt/owner /opt/kind; ln -s one /opt/link
"""
OTHER_WAY = """\
touch -d @2 /opt/touched; echo always > /opt/same; echo 2 > /opt/content; touch /opt/second;
touch /opt/mode /opt/owner; chmod 600 /opt/mode; chown 7 /opt/owner; mkdir /opt/kind;
ln -s other /opt/link
"""


@pytest.fixture
def build_twice(docker_host, tmp_path):
    """A function that runs --twice's own comparison on an image with one more line."""
    docker = images.client()
    env = {**os.environ, "DOCKER_HOST": docker_host, "DOCKER_BUILDKIT": "1"}
    base = images.debootstrap(docker, env, images.HERE.partition("/")[2])

    def run(first: str, second: str) -> None:
        """What the two builds run instead of the same thing."""
        (tmp_path / "Dockerfile").write_text(f'FROM {base}\nARG SCRIPT\nRUN eval "$SCRIPT"\n')
        command = [*docker, "build", "--no-cache", "--network", "none", "--tag", NAME]
        try:
            images.run([*command, "--build-arg", f"SCRIPT={first}", str(tmp_path)], env)
            words = [*command, "--build-arg", f"SCRIPT={second}", str(tmp_path)]
            images.again(docker, words, NAME, env)
        finally:
            for name in (NAME, f"{NAME}-first"):
                subprocess.run([*docker, "image", "rm", name], env=env, capture_output=True)

    return run


def test_times_may_differ(build_twice, capfd):
    build_twice(ONE_WAY, ONE_WAY.replace("@1", "@2"))
    assert re.search(r"^\d{4,} files, 0 differ$", capfd.readouterr().out, re.MULTILINE)


def test_nothing_else_may(build_twice, capfd):
    with pytest.raises(images.BuildError, match="hold different files"):
        build_twice(ONE_WAY, OTHER_WAY)
    found = re.findall(r"^differs  opt/(.+)$", capfd.readouterr().out, re.MULTILINE)
    assert found == [
        "content: content",
        "first: only in the first",
        "kind: kind, mode, content",
        "link: content",
        "mode: mode",
        "owner: owner",
        "second: only in the second",
    ]
