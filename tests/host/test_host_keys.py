"""API keys: made once, for the owner alone, and refused where others have seen them."""

import re
import stat

import pytest
from exl3_host import keys, preflight
from exl3_host.errors import HostError


def test_made_once_for_the_owner_alone(tmp_path):
    path = keys.default_file(tmp_path, "chat")
    assert path == tmp_path / "secrets" / "chat.api_key"
    assert keys.ensure(path) is True
    made = path.read_text()
    # 32 random bytes as base64url without padding, and a newline.
    assert re.fullmatch(r"[A-Za-z0-9_-]{43}\n", made)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]
    assert keys.ensure(path) is False and path.read_text() == made
    keys.ensure(keys.default_file(tmp_path, "other"))
    assert keys.default_file(tmp_path, "other").read_text() != made


def test_what_others_may_have_read_is_refused(tmp_path):
    path = keys.default_file(tmp_path, "chat")
    keys.ensure(path)
    path.chmod(0o640)
    with pytest.raises(HostError, match=r"may be read by others \(mode 0640\)") as raised:
        keys.ensure(path)
    assert path.read_text().strip() not in str(raised.value)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(HostError, match="is empty"):
        keys.ensure(path)


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "secrets").write_text("a file")
    with pytest.raises(HostError, match=r"chat.api_key cannot be (read|written)"):
        keys.ensure(keys.default_file(tmp_path, "chat"))


def test_an_inventory_asks_for_one(tmp_path):
    instance = {"name": "chat", "recipe": "r", "port": 8000, "api_key_file": "generate"}
    words = preflight.plan_arguments(instance, "127.0.0.1", tmp_path, tmp_path / "venv")
    assert words[words.index("--api-key-file") + 1] == str(tmp_path / "secrets" / "chat.api_key")
