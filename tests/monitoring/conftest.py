"""The live server is started once for all tests of this folder."""

import pytest
from live_server import Live


@pytest.fixture(scope="session")
def live(checkout, tmp_path_factory):
    server = Live(tmp_path_factory.mktemp("live"), checkout)
    try:
        server.start()
        for prompt in ([1, 5, 9, 20], [1, 5, 9, 20], list(range(1, 60))):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
            assert server.fetch("/v1/completions", body)[0] == 200
        yield server
    finally:
        server.stop()
