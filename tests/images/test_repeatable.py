"""Two builds of one image, compared by the engine's own export: what differs is found and named.

The comparison is tried on small images here. `scripts/build-images cpu --twice` builds the CPU
image two times without cache, which takes minutes.
"""

import json
import os
import re
import subprocess
import uuid

import pytest

import images

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
        """What the two builds run; the second knows itself by a file that the first left."""
        mount = f"--mount=type=cache,id={uuid.uuid4()},target=/seen"
        script = f"if [ -e /seen/it ]; then\n{second}else\ntouch /seen/it\n{first}fi"
        line = json.dumps(["/bin/sh", "-euc", script])
        (tmp_path / "Dockerfile").write_text(f"FROM {base}\nRUN {mount} {line}\n")
        command = [*docker, "build", "--no-cache", "--network", "none"]
        command += ["--tag", "exl3-test:twice", str(tmp_path)]
        images.run(command, env)
        try:
            images.again(docker, command, "exl3-test:twice", env)
        finally:
            for name in ("exl3-test:twice", "exl3-test:twice-first"):
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
