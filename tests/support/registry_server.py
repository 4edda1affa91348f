"""A test double of an OCI registry and its token service: a real HTTP server on 127.0.0.1.

It answers what the read side of the distribution protocol asks for, and fails on request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
PLATFORMS = ("linux/amd64", "linux/arm64")


class Asked(NamedTuple):
    """One request as it came in."""

    path: str
    authorization: str
    range: str
    status: int


@dataclass
class Faults:
    """How the server fails.

    Attributes:
        tokens: a bearer token is asked for, which the token service gives.
        login: user and password that the token service wants (or the registry, with `basic`).
        basic: user and password are asked for instead of a token.
        refuse_tokens: the token service answers with 403.
        odd_token: what the token service sends instead of JSON.
        uses: a token is good for that many requests.
        busy: this many answers are 429 with Retry-After: 0.
        denied: every answer is 403.
        drop_after: each entry breaks one blob answer off after that many bytes.
        cut: blob answers declare and send this many bytes less.
        grow: blob answers have this many bytes more.
        flip: a byte at this offset of each blob is wrong.
        ranges: whether blobs are served by range.
        moved: blobs are answered with a redirect to the same path at this address.
        digest_header: sent instead of the manifest's own digest; "" sends none.
        spoil: manifests come with one more space at their end.
        page: tags on one page.
        next_page: sent instead of the address of the next page.
    """

    tokens: bool = False
    login: tuple[str, str] | None = None
    basic: bool = False
    refuse_tokens: bool = False
    odd_token: bytes | None = None
    uses: int | None = None
    busy: int = 0
    denied: bool = False
    drop_after: list[int] = field(default_factory=list)
    cut: int = 0
    grow: int = 0
    flip: int | None = None
    ranges: bool = True
    moved: str = ""
    digest_header: str | None = None
    spoil: bool = False
    page: int = 1000
    next_page: str | None = None


@dataclass
class Stored:
    """One repository."""

    tags: dict[str, str] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class RegistryServer:
    """Serves what was put into it until the end of the `with` block.

    Attributes:
        faults: may be changed between requests.
        asked: the requests so far.
    """

    def __init__(self) -> None:
        self.faults = Faults()
        self.asked: list[Asked] = []
        self.repositories: dict[str, Stored] = {}
        self.given: dict[str, int] = {}
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.double = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> RegistryServer:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def paths(self) -> list[str]:
        return [one.path for one in self.asked]

    def put(self, repository: str, content: Mapping[str, Any], media_type: str,
            tag: str | None = None) -> dict[str, Any]:  # fmt: skip
        """Stores a manifest; gives its descriptor."""
        stored = self.repositories.setdefault(repository, Stored())
        body = json.dumps({"schemaVersion": 2, "mediaType": media_type, **content}).encode()
        digest = digest_of(body)
        stored.manifests[digest] = (media_type, body)
        if tag is not None:
            stored.tags[tag] = digest
        return {"mediaType": media_type, "digest": digest, "size": len(body)}

    def put_blob(self, repository: str, data: bytes, media_type: str = LAYER) -> dict[str, Any]:
        """Stores a blob; gives its descriptor."""
        self.repositories.setdefault(repository, Stored()).blobs[digest_of(data)] = data
        return {"mediaType": media_type, "digest": digest_of(data), "size": len(data)}

    def put_image(self, repository: str, platform: str = PLATFORMS[0], *, tag: str | None = None,
                  layer: bytes = b"layer", media_type: str = MANIFEST,
                  **config: Any) -> dict[str, Any]:  # fmt: skip
        """Stores an image of one layer; gives its descriptor with the platform."""
        system, machine = platform.split("/")
        inner = {"os": system, "architecture": machine, "created": "2026-10-05T08:00:00Z"}
        data = json.dumps({**inner, **config}).encode()
        content = {"config": self.put_blob(repository, data, CONFIG),
                   "layers": [self.put_blob(repository, layer)]}  # fmt: skip
        found = self.put(repository, content, media_type, tag)
        return {**found, "platform": {"os": system, "architecture": machine}}

    def put_index(self, repository: str, tag: str, *, attested: bool = True,
                  media_type: str = INDEX, **config: Any) -> str:  # fmt: skip
        """Stores an image for each platform with its attestation; gives the index's digest."""
        children = [self.put_image(repository, one, layer=one.encode(), **config)
                    for one in PLATFORMS]  # fmt: skip
        if attested:
            children += [attestation(self, repository, child["digest"]) for child in children]
        return str(self.put(repository, {"manifests": children}, media_type, tag)["digest"])


def attestation(server: RegistryServer, repository: str, of: str) -> dict[str, Any]:
    """The descriptor of a manifest that is no image, as BuildKit adds it."""
    found = server.put_image(repository, "unknown/unknown", layer=of.encode())
    return {**found, "annotations": {"vnd.docker.reference.type": "attestation-manifest",
                                     "vnd.docker.reference.digest": of}}  # fmt: skip


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    double: RegistryServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients break off on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        double: RegistryServer = self.server.double  # type: ignore[attr-defined]
        faults = double.faults
        with double.lock:
            is_busy = faults.busy > 0
            faults.busy -= is_busy
        path = urlsplit(self.path).path
        if is_busy:
            self._error(429, "TOOMANYREQUESTS", "slow down", {"Retry-After": "0"})
        elif path == "/token":
            self._token(double)
        elif faults.denied:
            self._error(403, "DENIED", "not for you")
        elif not self._is_allowed(double):
            self._challenge(double)
        elif match := re.fullmatch(r"/v2/(.+)/(manifests|blobs|tags)/([^/]+)", path):
            self._object(double, *match.groups())
        else:
            self._error(404, "NOT_FOUND", "no such thing")

    def _is_allowed(self, double: RegistryServer) -> bool:
        faults, told = double.faults, self.headers.get("Authorization", "")
        if faults.basic and faults.login:
            return told == _basic(faults.login)
        if not faults.tokens:
            return True
        with double.lock:
            left = double.given.get(told.removeprefix("Bearer "), 0)
            double.given[told.removeprefix("Bearer ")] = left - 1
        return left > 0

    def _challenge(self, double: RegistryServer) -> None:
        repository = re.sub(r"^/v2/(.+)/(manifests|blobs|tags)/.*", r"\1", self.path)
        value = 'Basic realm="test"'
        if not double.faults.basic:
            value = (f'Bearer realm="http://{double.host}/token",service="test service",'
                     f'scope="repository:{repository}:pull"')  # fmt: skip
        self._error(401, "UNAUTHORIZED", "who are you", {"WWW-Authenticate": value})

    def _token(self, double: RegistryServer) -> None:
        faults, query = double.faults, parse_qs(urlsplit(self.path).query)
        told = self.headers.get("Authorization", "")
        if faults.refuse_tokens or (faults.login and told != _basic(faults.login)):
            self._error(403, "DENIED", "wrong password")
            return
        if faults.odd_token is not None:
            self._send(200, faults.odd_token, {})
            return
        with double.lock:
            token = f"t{len(double.given)}.{query['scope'][0].replace(':', '.').replace('/', '.')}"
            double.given[token] = 10**9 if faults.uses is None else faults.uses
        self._send(200, json.dumps({"token": token, "expires_in": 300}).encode(), {})

    def _object(self, double: RegistryServer, repository: str, kind: str, name: str) -> None:
        stored = double.repositories.get(repository)
        if stored is None:
            self._error(404, "NAME_UNKNOWN", "repository name not known to registry")
        elif kind == "tags":
            self._tags(double, repository, sorted(stored.tags))
        elif kind == "blobs" and double.faults.moved:
            location = f"{double.faults.moved}/v2/{repository}/blobs/{name}"
            self._send(307, b"", {"Location": location})
        elif kind == "blobs":
            self._blob(double, stored, name)
        else:
            self._manifest(double, stored, name)

    def _manifest(self, double: RegistryServer, stored: Stored, name: str) -> None:
        digest = stored.tags.get(name, name)
        if digest not in stored.manifests:
            self._error(404, "MANIFEST_UNKNOWN", "manifest unknown")
            return
        media_type, body = stored.manifests[digest]
        faults = double.faults
        told = digest if faults.digest_header is None else faults.digest_header
        headers = {"Content-Type": media_type} | ({"Docker-Content-Digest": told} if told else {})
        if media_type not in self.headers.get("Accept", ""):
            self._error(404, "MANIFEST_UNKNOWN", "OCI index found, but accept header lacks it")
            return
        self._send(200, body + (b" " if faults.spoil else b""), headers)

    def _tags(self, double: RegistryServer, repository: str, tags: list[str]) -> None:
        query = parse_qs(urlsplit(self.path).query)
        last = query.get("last", [""])[0]
        rest = [tag for tag in tags if tag > last]
        page = rest[: double.faults.page]
        headers = {}
        if len(rest) > len(page):
            target = double.faults.next_page or f"/v2/{repository}/tags/list?last={page[-1]}&n=9"
            headers["Link"] = f'<{target}>; rel="next"'
        self._send(200, json.dumps({"name": repository, "tags": page or None}).encode(), headers)

    def _blob(self, double: RegistryServer, stored: Stored, name: str) -> None:
        data = stored.blobs.get(name)
        if data is None:
            self._error(404, "BLOB_UNKNOWN", "blob unknown to registry")
            return
        faults, body = double.faults, bytearray(data)
        if faults.flip is not None:
            body[faults.flip] ^= 0xFF
        body = body[: len(body) - faults.cut] + bytes(faults.grow)
        with double.lock:
            drop = faults.drop_after.pop(0) if faults.drop_after else None
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked is None or not faults.ranges:
            self._send(200, bytes(body), {}, drop)
            return
        start = int(asked[1])
        if start >= len(body):
            self._send(416, b"", {"Content-Range": f"bytes */{len(body)}"})
            return
        place = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._send(206, bytes(body[start:]), {"Content-Range": place}, drop)

    def _error(
        self, status: int, code: str, message: str, headers: dict[str, str] | None = None
    ) -> None:
        body = json.dumps({"errors": [{"code": code, "message": message}]}).encode()
        self._send(status, body, headers or {})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], drop: int | None = None
    ) -> None:
        double: RegistryServer = self.server.double  # type: ignore[attr-defined]
        told = self.headers
        with double.lock:
            double.asked.append(Asked(self.path, told.get("Authorization", ""),
                                      told.get("Range", ""), status))  # fmt: skip
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if drop is not None and drop < len(body):
            self.wfile.write(body[:drop])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body)


def _basic(login: tuple[str, str]) -> str:
    return "Basic " + base64.b64encode(":".join(login).encode()).decode()
