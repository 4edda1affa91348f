"""The only caller of docker and buildx, by subprocess; every call that changes something is echoed.

It knows nothing of recipes. buildx always writes an OCI archive that is loaded afterwards: the
engine's own store refuses rewritten file times while it builds, and so an interrupted build can
never leave a tag.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from imagebuild.engines.failure import failure, hint_of, last_line
from imagebuild.engines.progress import Progress
from imagebuild.errors import EngineError, UsageError

OLDEST = 26  # BuildKit 0.13, the first that rewrites file times
GIB = 1 << 30
_WITHOUT = "or build without an engine: build.py build --engine tree"
Echo = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Builder:
    """What builds.

    Attributes:
        driver: buildx's word.
        platforms: that it can run.
        is_beside: it is not the engine itself, and sees none of the engine's images.
    """

    name: str
    driver: str
    platforms: tuple[str, ...]
    is_beside: bool = False


@dataclass(frozen=True)
class BaseImage:
    """A base as the engine or its registry knows it.

    Attributes:
        reference: as asked for.
        digest: "sha256:...", of the index where there is one.
        platforms: that it has.
        size: in bytes; unpacked and packed where it is local, else packed.
        is_local: the engine has it already.
    """

    reference: str
    digest: str
    platforms: tuple[str, ...]
    size: int
    is_local: bool


@dataclass(frozen=True)
class Call:
    """One build, in buildx's terms. `output` is the archive to write."""

    context: Path
    output: Path
    name: str
    platforms: tuple[str, ...]
    epoch: int
    arguments: Mapping[str, str]
    labels: Mapping[str, str]
    contexts: Mapping[str, str]
    secrets: tuple[str, ...] = ()
    use_cache: bool = True


class Docker:
    """One engine, and a builder of it."""

    def __init__(self, echo: Echo, builder: str | None = None) -> None:
        self._echo = echo
        self._builder = builder

    def engine_version(self) -> str:
        """The version of the engine that answers. Raises EngineError: none does, or it is old."""
        answer = self._ask(["version", "--format", "{{json .Server}}"])
        server = _json(answer.stdout)
        if not isinstance(server, dict) or not server.get("Version"):
            said = last_line(answer.stderr) or "nothing"
            where = os.environ.get("DOCKER_HOST", "the default socket")
            raise EngineError(f"docker: expected an engine at {where}, found: {said}",
                              hint=f"start Docker, for example: systemctl start docker; {_WITHOUT}"
                              )  # fmt: skip
        version = str(server["Version"])
        major = re.match(r"\d+", version)
        if not major or int(major[0]) < OLDEST:
            raise EngineError(f"docker: expected an engine of version {OLDEST} or newer, found "
                              f"{version}", hint=f"update Docker, {_WITHOUT}")  # fmt: skip
        return version

    def builder(self) -> Builder:
        """The builder that builds go to.

        Raises:
            EngineError: no buildx, no such builder, or its store cannot write OCI archives.
        """
        if self._ask(["buildx", "version"]).returncode:
            raise EngineError("docker buildx: expected the plugin, found none",
                              hint="install it, on Debian: apt-get install docker-buildx; "
                              + _WITHOUT)  # fmt: skip
        named = [self._builder] if self._builder else []
        answer = self._ask(["buildx", "inspect", *named])
        told = re.findall(r"^(\w+): +(.+)$", answer.stdout, re.MULTILINE)
        fields = dict(reversed(told))  # the builder's own come first, then those of its nodes
        if answer.returncode or "Driver" not in fields:
            what = f"--builder {self._builder}" if self._builder else "buildx inspect"
            raise EngineError(f"{what}: expected a builder, found: {last_line(answer.stderr)}",
                              hint="docker buildx ls names those there are")  # fmt: skip
        name, driver = fields.get("Name", ""), fields["Driver"]
        if driver == "docker":
            self._require_own_engine()
            self._require_containerd_store()
        listed = ",".join(value for key, value in told if key == "Platforms").replace("*", "")
        platforms = tuple(dict.fromkeys(part.strip() for part in listed.split(",") if part))
        return Builder(name, driver, platforms, is_beside=driver != "docker")

    def _require_own_engine(self) -> None:
        """Raises for the engine of another context: buildx lists it, and does not build with it."""
        named = self._builder
        if named and named != self._ask(["context", "show"]).stdout.strip():
            raise EngineError(f"--builder {named}: expected a builder, found the engine of another "
                              "context", hint=f"DOCKER_CONTEXT={named} build.py ..., without "
                              "--builder")  # fmt: skip

    def _require_containerd_store(self) -> None:
        answer = self._ask(["info", "--format", "{{json .DriverStatus}}"])
        if "io.containerd.snapshotter" not in answer.stdout:
            raise EngineError(
                "docker: expected the containerd image store, which keeps digests, found another",
                hint='put {"features": {"containerd-snapshotter": true}} into '
                f"/etc/docker/daemon.json and restart Docker, {_WITHOUT}",
            )

    def require_platforms(self, builder: Builder, platforms: Sequence[str]) -> None:
        """Raises EngineError for a platform that the builder cannot run."""
        missing = [one for one in platforms if one not in builder.platforms]
        if missing:
            raise EngineError(
                f"builder {builder.name}: expected it to run {' and '.join(missing)}, found "
                f"{', '.join(builder.platforms) or 'none'}",
                hint="install emulation, on Debian: apt-get install qemu-user-binfmt (trixie) or "
                "qemu-user-static; or name a builder of that platform: --builder NAME",
            )

    def base(
        self, reference: str, platforms: Sequence[str], builder: Builder | None = None
    ) -> BaseImage:
        """Looks the base up, in the engine's store and then in its registry.

        Args:
            reference: as a FROM names it.
            platforms: that it must have.
            builder: what builds from it.

        Raises:
            EngineError: it is in neither.
            UsageError: it has no image for one of the platforms.
        """
        is_beside = builder is not None and builder.is_beside
        found = (None if is_beside else self._local(reference)) or self._remote(reference)
        missing = [one for one in platforms if found.platforms and one not in found.platforms]
        if missing:
            raise UsageError(f"base {reference}: expected an image for {' and '.join(missing)}, "
                             f"found {', '.join(found.platforms)}",
                             hint="name the digest of the index over all platforms")  # fmt: skip
        return found

    def _local(self, reference: str) -> BaseImage | None:
        known = self.inspect(reference)
        if known is None:
            return None
        # A tag over several platforms is inspected as this machine's; the build finds the others.
        return BaseImage(reference, _digest_of(reference) or str(known["Id"]), (),
                         int(known.get("Size", 0)), is_local=True)  # fmt: skip

    def _remote(self, reference: str) -> BaseImage:
        document = self._manifest(reference)
        digest = _digest_of(reference)
        repository = reference.partition("@")[0]
        if "manifests" not in document:
            return BaseImage(reference, digest, (), _packed(document), is_local=False)
        sizes = {}
        for child in document["manifests"]:
            place = child.get("platform", {})
            platform = f"{place.get('os')}/{place.get('architecture')}"
            if platform.startswith("linux/"):
                sizes[platform] = _packed(self._manifest(f"{repository}@{child['digest']}"))
        return BaseImage(reference, digest, tuple(sizes), max(sizes.values(), default=0),
                         is_local=False)  # fmt: skip

    def _manifest(self, reference: str) -> dict[str, Any]:
        answer = self._ask(["buildx", "imagetools", "inspect", "--raw", reference])
        content = _json(answer.stdout)
        if answer.returncode or not isinstance(content, dict):
            raise EngineError(f"base {reference}: expected it in the engine or its registry, "
                              f"found: {last_line(answer.stderr)}",
                              hint="docker login, or a mirror: --base MIRROR/NAME@sha256:..., or "
                              "docker load an archive of it and name its tag")  # fmt: skip
        return content

    def inspect(self, reference: str) -> dict[str, Any] | None:
        """The engine's own record of an image; None where it has none."""
        answer = self._ask(["image", "inspect", reference])
        content = _json(answer.stdout)
        if answer.returncode or not isinstance(content, list) or not content:
            return None
        return dict(content[0])

    def images(self, label: str) -> list[dict[str, Any]]:
        """Records of all images that carry a label, newest first."""
        answer = self._ask(["image", "ls", "--quiet", "--no-trunc", "--filter", f"label={label}"])
        ids = dict.fromkeys(answer.stdout.split())
        return [found for found in map(self.inspect, ids) if found is not None]

    def require_space(self, base: BaseImage, output: Path) -> None:
        """Raises EngineError when engine or output folder have too little space for a build.

        A base to be pulled is stored packed and unpacked, about four times its packed size; the
        archive holds all layers packed.
        """
        packed = base.size // 4 if base.is_local else base.size
        wanted = {output: packed + GIB}
        root = Path(self._ask(["info", "--format", "{{.DockerRootDir}}"]).stdout.strip() or "/")
        if root.is_dir():
            wanted[root] = 2 * GIB + (packed if base.is_local else 4 * packed)
        for folder, needed in wanted.items():
            free = shutil.disk_usage(folder).free
            if free < needed:
                raise EngineError(
                    f"{folder}: expected {needed / GIB:.1f} GiB free for this build, found "
                    f"{free / GIB:.1f} GiB",
                    hint="docker system prune, or results elsewhere: --dist DIR",
                )

    def build(self, call: Call, step: Callable[[str], None]) -> Progress:
        """Builds into `call.output`.

        Raises:
            BuildError: a step failed, with the exit code that the step gave; EngineError for all
                else.
        """
        command = [*self._client(), "buildx", "build", *self._options(call), str(call.context)]
        self._echo(command)
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(call.epoch)}
        progress = Progress(step)
        with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              errors="replace") as process:  # fmt: skip
            try:
                for line in process.stdout or ():
                    progress.feed(line.rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise failure(progress)
        return progress

    def _options(self, call: Call) -> list[str]:
        options = ["--progress", "plain", "--provenance=false", "--sbom=false"]
        options += ["--builder", self._builder] if self._builder else []
        options += [] if call.use_cache else ["--no-cache"]
        options += ["--platform", ",".join(call.platforms)]
        for name, value in call.arguments.items():
            options += ["--build-arg", f"{name}={value}"]
        for name, value in call.contexts.items():
            options += ["--build-context", f"{name}={value}"]
        for secret in call.secrets:
            options += ["--secret", secret]
        for name, value in call.labels.items():
            options += ["--label", f"{name}={value}"]
            if name.startswith("org.opencontainers."):
                options += ["--annotation", f"manifest:{name}={value}"]
        output = f"type=oci,dest={call.output},name={call.name},rewrite-timestamp=true"
        return [*options, "--output", output]

    def load(self, archive: Path) -> None:
        """Loads an archive under the name in it; digests stay. Raises EngineError."""
        self._do(["load", "--quiet", "--input", str(archive)])

    def save(self, image: str, archive: Path) -> None:
        """Writes a loaded image as an archive; digests stay. Raises EngineError."""
        self._do(["save", "--output", str(archive), image])

    def run(self, image: str, platform: str, script: str) -> str:
        """What a shell script prints in a new container of an image, which has the network.

        Raises:
            EngineError: the image cannot be pulled or run for that platform, or the script failed.
        """
        return self._do(["run", "--rm", "--platform", platform, "--entrypoint", "sh", image,
                         "-c", script])  # fmt: skip

    def tag(self, image: str, name: str) -> None:
        """Gives an image one more name. Raises EngineError."""
        self._do(["image", "tag", image, name])

    def push(self, name: str) -> str:
        """Pushes a tag; returns the digest that the registry has now. Raises EngineError."""
        said = self._do(["push", name])
        found = re.search(r"digest: (sha256:[0-9a-f]{64})", said)
        if not found:
            raise EngineError(f"docker push {name}: expected a digest, found: {last_line(said)}")
        return found[1]

    def _do(self, arguments: Sequence[str]) -> str:
        command = [*self._client(), *arguments]
        self._echo(command)
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              check=False)  # fmt: skip
        if done.returncode:
            raise EngineError(f"docker {arguments[0]}: expected it to succeed, found: "
                              f"{last_line(done.stderr)}", hint=hint_of(done.stderr))  # fmt: skip
        return done.stdout

    def _ask(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._client(), *arguments], capture_output=True, text=True,
                              errors="replace", check=False)  # fmt: skip

    @staticmethod
    def _client() -> list[str]:
        if shutil.which("docker") is None:
            raise EngineError("docker: expected the client on PATH, found none",
                              hint=f"install Docker {OLDEST} or newer with buildx, {_WITHOUT}"
                              )  # fmt: skip
        return ["docker"]


def _packed(manifest: Mapping[str, Any]) -> int:
    return sum(int(layer.get("size", 0)) for layer in manifest.get("layers", ()))


def _digest_of(reference: str) -> str:
    digest = reference.partition("@")[2]
    return digest if digest.startswith("sha256:") else ""


def _json(text: str) -> object:
    try:
        content: object = json.loads(text)
    except ValueError:
        return None
    return content
