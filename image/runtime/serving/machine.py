"""What this machine has: GPUs, memory, limits, ports, space. It only looks, and judges nothing."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_GPU_FIELDS = "index,name,compute_cap,memory.total,driver_version"
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU. `memory` is in bytes, 0 where it has none of its own (GB10)."""

    index: str
    name: str
    capability: str
    memory: int
    driver: str


class MachineError(Exception):
    """Something of the machine cannot be asked; the message says what."""


class Machine:
    """The machine. Tests replace methods, or `root` for what is read from files."""

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def output(self, *command: str) -> str:
        """Standard output of a tool. Raises MachineError when it fails or hangs."""
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=30, check=False, errors="replace"
            )
        except OSError as error:
            raise MachineError(f"{command[0]} cannot be run: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise MachineError(f"{command[0]} did not answer in 30 s") from None
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip()).partition("\n")[0]
            raise MachineError(f"{command[0]} ended with {done.returncode}: {said}")
        return done.stdout

    def gpus(self) -> list[Gpu]:
        """Raises MachineError."""
        text = self.output(
            "nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader,nounits"
        )
        return [_gpu(line) for line in text.splitlines() if line.strip()]

    def gpu_processes(self) -> list[str]:
        """Ids of processes that hold GPU memory. Raises MachineError."""
        text = self.output("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader")
        return [line.strip() for line in text.splitlines() if line.strip().isdecimal()]

    def memory(self) -> dict[str, int]:
        """/proc/meminfo in bytes."""
        try:
            lines = (self.root / "proc" / "meminfo").read_text("ascii").splitlines()
        except OSError as error:
            raise MachineError(f"/proc/meminfo cannot be read: {error.strerror}") from error
        pairs = (line.partition(":") for line in lines)
        return {name: int(rest.split()[0]) * 1024 for name, _, rest in pairs if rest.split()}

    def filesystem(self, folder: Path) -> str:
        """Type of the file system that holds a folder, such as nfs4; "" when it is not known."""
        best = ("", "")
        try:
            lines = (self.root / "proc" / "mounts").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        for words in map(str.split, lines):
            if len(words) > 2 and folder.is_relative_to(words[1]) and len(words[1]) >= len(best[0]):
                best = (words[1], words[2])
        return best[1]

    def soft_limit(self, which: int) -> int:
        """A resource limit of this process; -1 is unlimited."""
        return resource.getrlimit(which)[0]

    def size(self, folder: Path) -> int:
        """Size of a file system, bytes."""
        return shutil.disk_usage(folder).total

    def free(self, folder: Path) -> int:
        """Free space for a folder, which need not be there yet, bytes."""
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return shutil.disk_usage(folder).free

    def is_writable(self, folder: Path) -> bool:
        """Whether files can be made in a folder, which need not be there yet."""
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)

    def is_free(self, host: str, port: int) -> bool:
        """Whether a TCP port can be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                return False
        return True

    def which(self, name: str) -> str:
        """Path of a command, or ""."""
        return shutil.which(name) or ""

    def forget(self, files: Sequence[Path]) -> None:
        """Drops the page cache of files: on unified memory it is the GPU's memory that it takes."""
        for path in files:
            try:
                handle = os.open(path, os.O_RDONLY)
            except OSError:
                continue
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            except OSError:
                pass  # a file system that keeps no cache
            finally:
                os.close(handle)


def _gpu(line: str) -> Gpu:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 5:
        raise MachineError(f"nvidia-smi: expected 5 fields, found {line!r}")
    index, name, capability, memory, driver = fields
    return Gpu(index, name, capability, int(memory) * _MIB if memory.isdecimal() else 0, driver)
