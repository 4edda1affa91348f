"""Sends an image to other machines' engines as one stream: no archive is written anywhere.

`docker` speaks to the other engine itself (ssh://, or any address that DOCKER_HOST takes), so
nothing of ours must be installed there. A host that has the image already is left alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast
from urllib.parse import urlsplit

from imagebuild.engines.docker import Echo
from imagebuild.engines.failure import last_line
from imagebuild.errors import BrokenError, EngineError, UsageError
from imagebuild.sources import zstd
from imagebuild.sources.disk import DiskError
from imagebuild.sources.pipconf import scrub

# An unpacked layer stands beside its packed form while it is loaded.
_UNPACKED = 2.2
_BLOCK = 1 << 20
_COMPRESS_LEVEL = 3
_NAME = re.compile(r"(?:[\w.-]+@)?[\w.-]+(?::\d+)?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]*")
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Image:
    """An image as an engine knows it.

    Attributes:
        id: "sha256:..."; of the manifest in a containerd store, of the configuration in another.
        layers: diff_ids, which are the same in every store.
        size: bytes.
    """

    id: str
    layers: tuple[str, ...]
    size: int

    def is_same(self, other: Image) -> bool:
        """Whether both hold the same content, in whatever store."""
        return self.id == other.id or (bool(self.layers) and self.layers == other.layers)


@dataclass(frozen=True)
class Shipped:
    """What became of one host.

    Attributes:
        host: as asked for.
        id: of the image there.
        was_there: nothing was sent.
        sent: bytes.
    """

    host: str
    id: str
    was_there: bool
    sent: int


def address(host: str) -> str:
    """The engine's address for a host: a name is reached by ssh. Raises UsageError."""
    if "://" in host:
        try:
            parts = urlsplit(host)
            is_known = parts.scheme in ("ssh", "tcp", "unix", "http", "https", "fd", "npipe")
            is_known = is_known and not parts.netloc.startswith("-")  # ssh would take an option
            if parts.scheme == "ssh":
                is_known = is_known and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_known = False
        if not is_known:
            raise UsageError(f"{scrub(host)!r}: expected an engine's address such as ssh://box2, "
                             "found none")  # fmt: skip
        return host
    if not _NAME.fullmatch(host) or host.startswith("-"):
        raise UsageError(f"{host!r}: expected a host such as box2 or user@10.0.0.2, found none")
    return f"ssh://{host}"


class Running:
    """The processes of all streams, so that an end of ours is also theirs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._is_stopped = False

    def start(
        self,
        command: Sequence[str],
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Starts one. Raises EngineError after `stop`."""
        with self._lock:
            if self._is_stopped:
                raise EngineError("expected to send on, found that it was stopped")
            process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr)
            self._processes.add(process)
            return process

    def stop(self) -> None:
        """Ends all that run; nothing can be started any more."""
        with self._lock:
            self._is_stopped = True
            for process in self._processes:
                with contextlib.suppress(OSError):
                    process.terminate()


def ship(
    image: str, host: str, echo: Echo, progress: Progress, *, compress: bool = False,
    running: Running | None = None,
) -> Shipped:  # fmt: skip
    """Makes `host` have `image` under the same name.

    Args:
        image: a loaded image.
        host: a name for ssh, or the address of an engine.
        echo: is told every command that changes something.
        progress: is told how much was sent.
        compress: send zstd, which pays on slow links.
        running: knows the processes, and can end them.

    Raises:
        UsageError: the image is not here, or its name is none.
        DiskError: too little space there, found before a byte is sent.
        EngineError: a command failed.
        BrokenError: what arrived is another image.
    """
    where = address(host)
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"{image!r}: expected the name of an image, found none")
    here = _inspect([], image)
    if here is None:
        raise UsageError(f"{image}: expected an image of this machine's engine, found none",
                         hint="build.py images lists what was built")  # fmt: skip
    there = _inspect(["--host", where], image)
    if there is not None and here.is_same(there):
        return Shipped(host, there.id, True, 0)
    _require_space(host, where, here)
    sent = _stream(image, where, here.size, echo, lambda done, total: progress(host, done, total),
                   compress=compress, running=running or Running())  # fmt: skip
    arrived = _inspect(["--host", where], image)
    if arrived is None or not here.is_same(arrived):
        found = arrived.id if arrived else "none"
        raise BrokenError(f"{host}: expected {image} with the id {here.id}, found {found}",
                          hint="ship it again; look at the disk there")  # fmt: skip
    return Shipped(host, arrived.id, False, sent)


def _docker(where: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [_program(), *where, *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def _program() -> str:
    found = shutil.which("docker")
    if found is None:
        raise EngineError("docker: expected the command, found none on PATH")
    return found


def _inspect(where: Sequence[str], image: str) -> Image | None:
    done = _docker(where, "image", "inspect", "--format", "{{json .}}", image)
    if done.returncode != 0:
        said = last_line(done.stderr)
        if re.search(r"no such (image|object)", said, re.IGNORECASE):
            return None
        raise EngineError(f"{' '.join(where) or 'docker'}: expected an engine, found: {said}",
                          hint=_reach(where))  # fmt: skip
    try:
        found: dict[str, Any] = json.loads(done.stdout)
        layers = (found.get("RootFS") or {}).get("Layers") or []
        return Image(str(found["Id"]), tuple(map(str, layers)), int(found.get("Size") or 0))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"{' '.join(where) or 'docker'}: expected what it knows of {image}, "
                          f"found {done.stdout[:80]!r}") from error  # fmt: skip


def _reach(where: Sequence[str]) -> str | None:
    if where and where[-1].startswith("ssh://"):
        name = where[-1].removeprefix("ssh://")
        return f"make this work without a question: ssh {name} docker version"
    return None


def _require_space(host: str, where: str, image: Image) -> None:
    """Compares what is free below the engine's folder there with what the image needs."""
    done = _docker(["--host", where], "info", "--format", "{{.DockerRootDir}}")
    root = done.stdout.strip()
    if done.returncode != 0 or not root.startswith("/"):
        raise EngineError(f"{host}: expected the engine's folder, found: {last_line(done.stderr)}")
    free = _free(where, root)
    if free is None:
        return  # an engine behind tcp:// has no shell; it says itself when its disk is full
    needed = int(image.size * _UNPACKED)
    if free < needed:
        raise DiskError(f"{host}:{root}: expected {needed / 1e9:.1f} GB, found "
                        f"{free / 1e9:.1f} GB free", hint="free some space there, such as by: "
                        "docker image prune")  # fmt: skip


def _free(where: str, root: str) -> int | None:
    if where.startswith("unix://"):
        folder = Path(root)
        return shutil.disk_usage(folder if folder.exists() else "/").free
    if not where.startswith("ssh://"):
        return None
    parts = urlsplit(where)
    user = f"{parts.username}@" if parts.username else ""
    name = f"{user}{parts.hostname}"
    ports = ["-p", str(parts.port)] if parts.port else []
    # ssh joins the words to a line for the shell there.
    command = ["ssh", "-o", "BatchMode=yes", *ports, "--", name, "df", "-B1", "--output=avail",
               shlex.quote(root)]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              check=False)  # fmt: skip
    except OSError as error:
        raise EngineError(f"ssh: expected the command, found {error.strerror}") from error
    last = (done.stdout.split() or [""])[-1]
    if done.returncode != 0 or not last.isdecimal():
        raise EngineError(f"{name}: expected the free space of {root}, found: "
                          f"{last_line(done.stderr) or last!r}")  # fmt: skip
    return int(last)


def _stream(
    image: str,
    where: str,
    size: int,
    echo: Echo,
    progress: Callable[[int, int | None], None],
    *,
    compress: bool,
    running: Running,
) -> int:
    """`docker save | docker load`, with the bytes counted between; returns how many were sent."""
    save = [_program(), "save", image]
    load = [_program(), "--host", where, "load"]
    echo([*save, "|", *load])
    with (
        running.start(save, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as source,
        running.start(load, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                      stderr=subprocess.STDOUT) as target,
    ):  # fmt: skip
        errors, stream = cast(IO[bytes], source.stderr), cast(IO[bytes], source.stdout)
        into, answers = cast(IO[bytes], target.stdin), cast(IO[bytes], target.stdout)
        said: dict[str, bytes] = {}
        readers = [_reader(said, "save", errors), _reader(said, "load", answers)]
        try:
            sent = _copy(stream, into, size, progress, compress=compress)
        except BrokenPipeError:
            sent = 0
        finally:
            stream.close()
            with contextlib.suppress(BrokenPipeError):
                into.close()
        codes = {"save": source.wait(), "load": target.wait()}
        for reader in readers:
            reader.join()
    # A load that ended early breaks the pipe of save: what load says is then the cause.
    for name in ("load", "save"):
        if codes[name]:
            text = last_line(said.get(name, b"").decode("utf-8", "replace")) or "nothing"
            raise EngineError(f"docker {name}: expected {image} to get to {where}, found: {text}")
    return sent


def _reader(said: dict[str, bytes], name: str, stream: IO[bytes]) -> threading.Thread:
    """Drains a stream in a thread, so that no side waits for a full pipe."""

    def read() -> None:
        said[name] = stream.read()

    thread = threading.Thread(target=read)
    thread.start()
    return thread


def _copy(
    source: IO[bytes],
    target: IO[bytes],
    size: int,
    progress: Callable[[int, int | None], None],
    *,
    compress: bool,
) -> int:
    done = sent = 0
    packer = zstd.compressor(_COMPRESS_LEVEL) if compress else None
    while block := source.read(_BLOCK):
        done += len(block)
        packed = packer.compress(block) if packer else block
        target.write(packed)
        sent += len(packed)
        progress(min(done, size) if size else done, size or None)
    if packer:
        rest = packer.flush()
        target.write(rest)
        sent += len(rest)
    return sent
