"""A small HTTP server with the part of the OpenAI interface that readiness asks for, and faults on
demand.

It takes the place of `vllm serve` where the subject of a test is who starts, watches and replaces
a server.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("words", nargs="*", help="`serve MODEL`, when called as vllm is")
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--served-model-name", default="small")
parser.add_argument("--answer", default="Paris.")
parser.add_argument("--ready-after", type=float, default=0.0)
parser.add_argument("--raise", dest="raises", help="text of a ValueError to die with at start")
parser.add_argument("--raise-until", help="die only while this file is absent, and create it")
parser.add_argument("--silent", action="store_true", help="print nothing and never listen")
parser.add_argument("--drain", type=float, default=0.0, help="seconds to go on after SIGTERM")
parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
parser.add_argument("--worker", action="store_true", help="have a child process that outlives us")
parser.add_argument("--slow-unless-bound", action="store_true", help="answer fast where pinned")
parser.add_argument("--answers", type=int, help="how many, before the engine hangs")
parser.add_argument("--noise", type=int, default=0, help="bytes to print at start")
options, _ = parser.parse_known_args()

if options.silent:
    time.sleep(600)
print(f"starting on {options.port}", flush=True)
if options.noise:
    print("\n".join(["x" * 99] * (options.noise // 100)), flush=True)
if options.raises:
    marker = options.raise_until
    if marker is None or not os.path.exists(marker):
        if marker:
            open(marker, "w").close()
        raise ValueError(options.raises)
if options.worker:
    # In a session of its own, as a worker that a killed parent leaves behind.
    worker = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
    )
    print(f"worker {worker.pid}", flush=True)
time.sleep(options.ready_after)


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def allowed(self):
        key = os.environ.get("VLLM_API_KEY")
        return key is None or self.headers.get("Authorization") == f"Bearer {key}"

    def do_GET(self):
        if self.path == "/health":
            self.answer(200, {})
        elif self.path == "/v1/models" and self.allowed():
            self.answer(200, {"data": [{"id": options.served_model_name}]})
        else:
            self.answer(401 if not self.allowed() else 404, {})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked += 1
        if not self.allowed():
            self.answer(401, {})
        elif options.answers is not None and options.answers < self.server.asked:
            time.sleep(600)  # and /health goes on to say 200
        elif self.path == "/v1/chat/completions" and asked["model"] == options.served_model_name:
            self.answer(200, {"choices": [{"message": {"content": options.answer}}]})
        elif self.path == "/v1/completions" and asked.get("stream"):
            self.stream(asked["max_tokens"])
        elif self.path == "/v1/completions":
            self.answer(200, {"choices": [{"text": options.answer}]})
        else:
            self.answer(404, {})

    def stream(self, tokens):
        """One chunk per token, the usage in the last one, as vLLM does with include_usage."""
        slow = options.slow_unless_bound and os.environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        chunks = [{"choices": [{"text": f"word{n} "}]} for n in range(tokens)]
        for chunk in [*chunks, {"choices": [], "usage": {"completion_tokens": tokens}}]:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            time.sleep(0.02 if slow else 0.002)
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def log_message(self, pattern, *values):
        # A log that cannot be written costs no answer, as with Python's own logging.
        with contextlib.suppress(OSError):
            print(pattern % values, flush=True)


class Server(ThreadingHTTPServer):
    asked = 0
    allow_reuse_address = True
    daemon_threads = True


def stop(*_):
    if options.deaf:
        print("not listening to SIGTERM", flush=True)
        return

    def drain():
        time.sleep(options.drain)
        print("drained", flush=True)
        server.shutdown()

    threading.Thread(target=drain).start()


server = Server((options.host, options.port), Handler)
signal.signal(signal.SIGTERM, stop)
print("listening", flush=True)
server.serve_forever(poll_interval=0.05)
