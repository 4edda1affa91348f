"""Programs that stand in for vLLM and for what the entry point runs, as scripts of this Python."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

# Serves /health after a moment, with a worker of its own that ignores SIGTERM and one that has left
# its process group. Behaviour comes from the environment, which is what the entry point passes on.
VLLM = """
import http.server, json, os, signal, subprocess, sys, threading, time
argv = sys.argv[1:]
record = os.environ["STANDIN_RECORD"]
with open(record, "w") as file:
    json.dump({"argv": argv, "env": dict(os.environ)}, file)
mode = os.environ.get("STANDIN_MODE", "")
if mode == "dies":
    print("torch.OutOfMemoryError: no", flush=True)
    sys.exit(7)
sleeper = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
workers = [subprocess.Popen([sys.executable, "-c", sleeper]),
           subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)]
with open(record + ".pids", "w") as file:
    file.write(" ".join(str(one.pid) for one in [*workers]) + f" {os.getpid()}")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/slow":
            open(record + ".busy", "w").close()
            time.sleep(0.6)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"done")
    def log_message(self, *_):
        pass
def serve():
    port = int(argv[argv.index("--port") + 1])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
print("Loading weights took 0.1 seconds", flush=True)
server = None if mode == "never" else serve()
def drain(*_):
    if mode == "deaf":
        return
    print("draining", flush=True)
    server and server.shutdown()
    server and server.server_close()  # waits for the requests in flight
    print("drained", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, drain)
print("ready", flush=True)
while True:
    time.sleep(0.05)
    if mode == "crashes" and os.path.exists(record + ".crash"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def program(path: Path, text: str) -> Path:
    """An executable script that this Python runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def check(path: Path, code: int = 0, document: str = "", before: str = "") -> list[str]:
    """A numeric check that ends as it is told."""
    text = f"import os, sys, time\n{before}\nprint({document!r})\nsys.stderr.write('- here\\n')\n"
    return [str(program(path, f"{text}sys.exit({code})\n"))]
