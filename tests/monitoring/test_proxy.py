"""TLS in front of a real server: Debian's Caddy, a local CA, and what stays shut."""

import json
import socket
import ssl
import subprocess
import time
from pathlib import Path

import pytest
from live_server import CANARY, free_port, play, program, write_inventory

NAME = "llm.example.test"


def make_ca(folder: Path) -> dict[str, Path]:
    """A CA of one's own and a certificate for NAME, as a company would hand them out."""
    openssl = program("openssl")
    paths = {name: folder / f"{name}.pem" for name in ("ca", "ca-key", "cert", "key", "request")}

    def run(*arguments: object) -> None:
        subprocess.run([openssl, *map(str, arguments)], check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    run("req", "-x509", *curve, "-keyout", paths["ca-key"], "-out", paths["ca"], "-days", 2,
        "-subj", "/CN=test CA")  # fmt: skip
    run("req", *curve, "-keyout", paths["key"], "-out", paths["request"], "-subj", f"/CN={NAME}")
    names = folder / "names.txt"
    names.write_text(f"subjectAltName=DNS:{NAME}\n")
    run("x509", "-req", "-in", paths["request"], "-CA", paths["ca"], "-CAkey", paths["ca-key"],
        "-CAcreateserial", "-out", paths["cert"], "-days", 2, "-extfile", names)  # fmt: skip
    return paths


class Proxy:
    """The role's configuration, and Caddy with it."""

    def __init__(self, live, folder: Path) -> None:
        self.caddy, self.folder, self.port = program("caddy"), folder, free_port()
        self.files = make_ca(folder)
        self.config = folder / "Caddyfile"
        inventory = write_inventory(
            folder, live.checkout, live.store,
            exl3_instances=[live.instance], exl3_proxy_name=NAME, exl3_proxy_port=self.port,
            exl3_proxy_address="127.0.0.1", exl3_proxy_tls="files",
            exl3_proxy_certificate=str(self.files["cert"]), exl3_proxy_key=str(self.files["key"]),
            exl3_proxy_config=str(self.config), exl3_proxy_admin="off",
            exl3_proxy_caddy=self.caddy, exl3_proxy_max_body="100KB",
        )  # fmt: skip
        done = play(live.checkout, "proxy", inventory)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "changed=0" in play(live.checkout, "proxy", inventory).stdout
        self.log = folder / "caddy.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [self.caddy, "run", "--adapter", "caddyfile", "--config", str(self.config)],
                stdout=log,
                stderr=log,
                env={"HOME": str(folder), "XDG_DATA_HOME": str(folder / "data")},
            )
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def curl(self, path: str, *arguments: str, ca: str | None = None):
        """A client that knows the CA; the key comes from a file, as in the docs."""
        command = ["curl", "-sS", "-m", "60", "--cacert", ca or str(self.files["ca"])]
        command += ["--resolve", f"{NAME}:{self.port}:127.0.0.1", "--noproxy", "*"]
        command += [*arguments, f"https://{NAME}:{self.port}{path}"]
        return subprocess.run(command, capture_output=True, text=True)

    def status(self, path: str, *arguments: str) -> str:
        return self.curl(path, "-o", "/dev/null", "-w", "%{http_code}", *arguments).stdout


@pytest.fixture(scope="module")
def proxy(live, tmp_path_factory):
    made = Proxy(live, tmp_path_factory.mktemp("proxy"))
    header = made.folder / "header"
    header.touch(0o600)
    header.write_text(f"Authorization: Bearer {CANARY}\n")
    made.key = ("-H", f"@{header}", "-H", "Content-Type: application/json")
    yield made
    made.process.terminate()
    made.process.wait(20)


@pytest.mark.slow
def test_an_answer_through_tls(proxy):
    body = json.dumps({"model": "tiny", "prompt": [1, 5, 9], "max_tokens": 4, "ignore_eos": True})
    for path in ("/v1/completions", "/tiny/v1/completions"):
        done = proxy.curl(path, *proxy.key, "-d", body)
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 4, done.stderr
    assert proxy.status("/health") == "200"


@pytest.mark.slow
def test_who_is_not_let_in(proxy, live):
    assert proxy.status("/v1/models") == "401"
    assert proxy.status("/v1/models", "-H", "Authorization: Bearer wrong") == "401"
    assert proxy.status("/v1/models", *proxy.key) == "200"
    for path in ("/metrics", "/docs", "/openapi.json", "/", "/tiny/metrics", "/other/v1/models",
                 "/v1/../metrics", "//metrics", "/tiny/v1/../../metrics"):  # fmt: skip
        assert proxy.status(path, "--path-as-is", *proxy.key) in ("404", "400", "308"), path
    assert live.fetch("/metrics")[0] == 200, "it is there, and not through the proxy"
    large = proxy.folder / "large"
    large.write_text(json.dumps({"model": "tiny", "prompt": "x" * 200_000}))
    # 000: the connection was closed before curl had sent it all.
    refused = proxy.status("/v1/completions", *proxy.key, "-d", f"@{large}")
    assert refused in ("413", "400", "502", "000")
    assert proxy.status("/v1/models", *proxy.key) == "200", "and it goes on"


@pytest.mark.slow
def test_a_certificate_that_nobody_vouches_for(proxy, tmp_path):
    other = make_ca(tmp_path)
    done = proxy.curl("/health", ca=str(other["ca"]))
    assert done.returncode == 60 and "certificate" in done.stderr


@pytest.mark.slow
def test_no_plain_text_and_no_old_tls(proxy):
    command = ["curl", "-sS", "-m", "10", "-o", "/dev/null", "-w", "%{http_code}", "--noproxy", "*"]
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{proxy.port}/health"], capture_output=True, text=True
    )
    assert done.stdout == "400"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(("127.0.0.1", proxy.port), timeout=10) as link,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
    ):
        context.wrap_socket(link, server_hostname=NAME)


@pytest.mark.slow
def test_tokens_come_as_they_are_made(proxy):
    """Each in a piece of its own, not all of them at the end."""
    body = {"model": "tiny", "prompt": [1, 5, 9], "max_tokens": 60, "ignore_eos": True}
    context = ssl.create_default_context(cafile=str(proxy.files["ca"]))
    text = json.dumps({**body, "stream": True}).encode()
    with (
        socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as link,
        context.wrap_socket(link, server_hostname=NAME) as tls,
    ):
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {NAME}:{proxy.port}\r\nConnection: close\r\n"
            f"Authorization: Bearer {CANARY}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(text)}\r\n\r\n"
        )
        tls.sendall(head.encode() + text)
        pieces, whole = 0, b""
        while data := tls.recv(65536):
            pieces += b"data: {" in data
            whole += data
    assert whole.startswith(b"HTTP/1.1 200") and whole.count(b"data: {") >= 30
    # On a busy machine several tokens meet in one piece; held back, all of them would.
    assert pieces > 2, f"{pieces} pieces: the proxy holds the answer back"


@pytest.mark.slow
def test_the_key_stands_nowhere(proxy, live):
    """Only its own file, and the client's, hold it."""
    holders = [
        path
        for folder in (live.folder, proxy.folder)
        for path in folder.rglob("*")
        if path.is_file() and CANARY.encode() in path.read_bytes()
    ]
    assert set(holders) == {live.key_file, proxy.folder / "header"}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            assert CANARY.encode() not in (process / "cmdline").read_bytes(), process
        except OSError:
            continue


def test_an_open_server_is_refused(checkout, tmp_path):
    """Without a key everybody who reaches the proxy could use the GPUs."""
    instance = {"name": "chat", "recipe": "a", "port": 8000}
    inventory = write_inventory(
        tmp_path, checkout, tmp_path / "store", exl3_instances=[instance],
        exl3_proxy_config=str(tmp_path / "Caddyfile"), exl3_proxy_caddy=program("caddy"),
        exl3_proxy_tls="internal",
    )  # fmt: skip
    done = play(checkout, "proxy", inventory)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "chat would be reachable without an API key" in said
    assert not (tmp_path / "Caddyfile").exists()
    done = play(checkout, "proxy", inventory, "-e", '{"exl3_proxy_open": true}')
    assert done.returncode == 0, done.stdout
    assert "tls internal" in (tmp_path / "Caddyfile").read_text()
    done = play(
        checkout, "proxy", inventory, "-e", "exl3_proxy_tls=files", "-e", "exl3_proxy_open=true"
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode != 0 and "exl3_proxy_certificate or exl3_proxy_key is not set" in said


def test_a_configuration_that_caddy_refuses_changes_nothing(checkout, tmp_path):
    before = "# the old one\n"
    (tmp_path / "Caddyfile").write_text(before)
    inventory = write_inventory(
        tmp_path, checkout, tmp_path / "store", exl3_instances=[], exl3_proxy_tls="files",
        exl3_proxy_config=str(tmp_path / "Caddyfile"), exl3_proxy_caddy=program("caddy"),
        exl3_proxy_certificate="/nowhere/cert.pem", exl3_proxy_key="/nowhere/key.pem",
    )  # fmt: skip
    done = play(checkout, "proxy", inventory)
    assert done.returncode != 0 and "/nowhere/cert.pem" in done.stdout + done.stderr
    assert (tmp_path / "Caddyfile").read_text() == before
