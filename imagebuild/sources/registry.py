"""The read side of the OCI distribution protocol: manifests, indexes, tags and blobs, by digest.

Whatever has a digest is compared with it. It needs no engine, pulls nothing into one, and writes to
no registry.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urljoin, urlsplit

from imagebuild.config import DefaultRegistry
from imagebuild.errors import EngineError, IntegrityError, UsageError
from imagebuild.sources.cache import Cache
from imagebuild.sources.disk import disk_errors, write_all
from imagebuild.sources.dockerauth import Logins
from imagebuild.sources.download import ATTEMPTS, Progress, no_progress, parse_content_range
from imagebuild.sources.http import BLOCK, Http, Stream, TransferError
from imagebuild.sources.imageref import Reference, is_loopback
from imagebuild.sources.manifests import (
    ACCEPT,
    INDEXES,
    Descriptor,
    Manifest,
    hasher,
    json_object,
    parse_manifest,
)
from imagebuild.sources.registryauth import Authorizer, Place

MANIFEST_LIMIT = 4 << 20  # bytes; source: OCI distribution specification, "Pushing Manifests"
CONFIG_LIMIT = 16 << 20  # bytes
DEPTH = 3  # indexes inside one another
CHILDREN = 1000  # manifests that one image may list
PAGES = 500  # of a list of tags
_TOLD = (401, 403, 404, 429)


class NotFoundError(EngineError):
    """The registry answers, and has no such repository, tag or digest."""


class Registry:
    """Every registry that images are in; each is asked as its image's name says."""

    def __init__(self, http: Http, logins: Logins, default: DefaultRegistry | None = None) -> None:
        self._http = http
        self._default = default
        self._auth = Authorizer(http, logins)

    def manifest(self, where: Reference, size: int | None = None) -> Manifest:
        """A manifest by digest or tag.

        Args:
            where: the image.
            size: in bytes, where whoever names the digest gives it.

        Raises:
            NotFoundError: the registry has no such image.
            IntegrityError: the bytes are not those of the digest.
            EngineError: unreachable, denied, or no manifest.
            UsageError: the name has no host, and the recipe gives none.
        """
        place = self._place(where)
        what = f"the manifest of {where}"
        path = f"manifests/{where.asked}"
        with self._open(where, place, path, what=what, headers={"Accept": ACCEPT}) as stream:
            body = _bounded(stream, what, MANIFEST_LIMIT)
            told = stream.headers.get("Docker-Content-Digest", "")
            media_type = stream.headers.get("Content-Type", "").partition(";")[0].strip()
        found = parse_manifest(where, body, told, media_type)
        if size is not None and size != found.size:
            raise IntegrityError(f"{what}: expected {size} bytes, found {found.size}")
        return found

    def platforms(self, index: Manifest) -> dict[str, Descriptor]:
        """The image of each platform, such as "linux/arm64"; attestations are none.

        Of several variants the one without a name comes first, then the one listed first.

        Raises:
            EngineError: indexes are nested too deep, or list too much; and as `manifest`.
        """
        if not index.is_index:
            config = self.config(index)
            own = Descriptor(index.media_type, index.digest, index.size)
            return {f"{config.get('os')}/{config.get('architecture')}": own}
        found: dict[str, Descriptor] = {}
        for child in self._leaves(index, depth=1, seen=[0]):
            system, _, rest = child.platform.partition("/")
            machine, _, variant = rest.partition("/")
            name = f"{system}/{machine}"
            known = found.get(name)
            if known is None or (not variant and known.platform.count("/") > 1):
                found[name] = child
        return found

    def _leaves(self, index: Manifest, *, depth: int, seen: list[int]) -> Iterator[Descriptor]:
        for child in index.children:
            seen[0] += 1
            if seen[0] > CHILDREN:
                raise EngineError(f"{index.where}: expected at most {CHILDREN} images, found more")
            if child.is_attestation:
                continue
            if child.media_type not in INDEXES:
                yield child
            elif depth >= DEPTH:
                raise EngineError(f"{index.where}: expected at most {DEPTH} indexes inside one "
                                  "another, found more")  # fmt: skip
            else:
                nested = self.manifest(index.where.at(child.digest), child.size)
                yield from self._leaves(nested, depth=depth + 1, seen=seen)

    def image(self, top: Manifest, platform: str) -> Manifest:
        """The image for a platform of what may be an index.

        Raises:
            UsageError: there is none for that platform; and as `manifest`.
        """
        found = self.platforms(top)
        if platform not in found:
            raise UsageError(f"{top.where}: expected an image for {platform}, found "
                             f"{', '.join(found) or 'none'}")  # fmt: skip
        child = found[platform]
        return top if child.digest == top.digest else self.manifest(
            top.where.at(child.digest), child.size)  # fmt: skip

    def config(self, image: Manifest) -> dict[str, Any]:
        """The configuration of an image: labels, environment, diff_ids. Raises as `blob`."""
        what = f"the configuration of {image.where}"
        wanted = image.config
        if wanted.size > CONFIG_LIMIT:
            raise EngineError(f"{what}: expected at most {CONFIG_LIMIT} bytes, found {wanted.size}")
        return json_object(b"".join(self.blob(image.where, wanted)), what)

    def tags(self, where: Reference) -> list[str]:
        """Every tag of a repository, in the registry's order. Raises as `manifest`."""
        place = self._place(where)
        what = f"the tags of {where.repository}"
        found: list[str] = []
        path: str | None = "tags/list?n=1000"
        for _page in range(PAGES):
            with self._open(where, place, path, what=what) as stream:
                content = json_object(_bounded(stream, what, MANIFEST_LIMIT), what)
                path = _next(stream, place, what)
            found += [str(tag) for tag in content.get("tags") or ()]
            if path is None:
                return list(dict.fromkeys(found))
        raise EngineError(f"{what}: expected at most {PAGES} pages, found more")

    def blob(
        self, where: Reference, wanted: Descriptor, have: Iterable[bytes] = ()
    ) -> Iterator[bytes]:
        """Streams a blob; what breaks off is continued by range.

        The last step compares the digest: what was yielded counts only if no error follows.

        Args:
            where: an image of its repository.
            wanted: the blob.
            have: its first bytes, where an earlier try left some; they are not yielded.

        Raises:
            IntegrityError: other bytes, or not as many as the descriptor says.
            EngineError: as `manifest`, or the connection broke off again and again.
        """
        digest, done, failures = hasher(wanted.digest), 0, 0
        for chunk in have:
            digest.update(chunk)
            done += len(chunk)
        what = f"blob {wanted.digest} of {where.repository}"
        while done < wanted.size:
            before = done
            problem = TransferError(f"{what}: expected {wanted.size} bytes, found that the body "
                                    f"ends after {done}")  # fmt: skip
            try:
                for chunk in self._blob_from(where, wanted, done, what):
                    done += len(chunk)
                    if done > wanted.size:
                        raise IntegrityError(f"{what}: expected {wanted.size} bytes, found more")
                    digest.update(chunk)
                    yield chunk
            except TransferError as error:
                problem = error
            failures = 0 if done > before else failures + 1
            if failures >= ATTEMPTS:
                raise problem
            if done < wanted.size:
                self._http.sleep(failures)
        found = f"{digest.name}:{digest.hexdigest()}"
        if found != wanted.digest:
            raise IntegrityError(f"{what}: expected other bytes, found {found} in {done} bytes")

    def _blob_from(
        self, where: Reference, wanted: Descriptor, start: int, what: str
    ) -> Iterator[bytes]:
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        place = self._place(where)
        with self._open(where, place, f"blobs/{wanted.digest}", what=what, headers=headers,
                        accept=(200, 206, 416)) as stream:  # fmt: skip
            if stream.status == 416:
                raise IntegrityError(f"{what}: expected {wanted.size} bytes, found {start}")
            skip = start
            if stream.status == 206:
                part = parse_content_range(stream.headers.get("Content-Range", ""))
                if part is None or part[0] != start:
                    found = stream.headers.get("Content-Range", "no range")
                    raise TransferError(
                        f"{what}: expected the bytes from {start} on, found {found}"
                    )
                skip = 0
            for chunk in stream.chunks():
                if skip >= len(chunk):
                    skip -= len(chunk)
                    continue
                yield chunk[skip:]
                skip = 0

    def fetch(
        self,
        where: Reference,
        wanted: Descriptor,
        cache: Cache,
        progress: Progress = no_progress,
    ) -> Path:
        """The blob as a verified file in the cache; a later process continues what broke off.

        Raises:
            as `blob`; EngineError when the disk is full.
        """
        sha256 = wanted.digest.removeprefix("sha256:")
        for _tries in range(3):
            if (path := cache.blob(sha256)) is not None:
                return path
            with cache.partial(sha256, wanted.size) as part:
                if not cache.blob_path(sha256).exists():
                    self._complete(where, wanted, cache, part, progress)
                    cache.commit(sha256, part)
        raise EngineError(
            f"{cache.root}: expected to keep {wanted.digest}, found it gone each time"
        )

    def _complete(
        self, where: Reference, wanted: Descriptor, cache: Cache, part: BinaryIO, progress: Progress
    ) -> None:
        """Fills `part`: from what is there, and if that was wrong once more from nothing."""
        done = part.seek(0, 2)
        if done > wanted.size:
            done = part.truncate(0)
        is_resumed = done > 0
        part.seek(0)
        try:
            for chunk in self.blob(where, wanted, iter(lambda: part.read(BLOCK), b"")):
                with disk_errors(cache.root, wanted.size):
                    write_all(part, chunk)
                done += len(chunk)
                progress(wanted.digest[:19], done, wanted.size)
        except IntegrityError:
            part.truncate(0)
            if not is_resumed:
                cache.discard_partial(wanted.digest.removeprefix("sha256:"))
                raise
            self._complete(where, wanted, cache, part, progress)

    def _place(self, where: Reference) -> Place:
        default = self._default
        if not where.host or (default is not None and where.host == default.host):
            if default is None:
                raise UsageError(f"image {where}: expected a host in its name, found none",
                                 hint="name one, or give the recipe an image.registry")  # fmt: skip
            name = where.repository if "/" in where.repository else f"library/{where.repository}"
            return Place(default.url.rstrip("/"), name, (default.login, default.host))
        scheme = "http" if is_loopback(where.host) else "https"
        return Place(f"{scheme}://{where.host}", where.repository, (where.host,))

    @contextlib.contextmanager
    def _open(
        self,
        where: Reference,
        place: Place,
        path: str | None,
        *,
        what: str,
        headers: Mapping[str, str] | None = None,
        accept: Collection[int] = (200,),
    ) -> Iterator[Stream]:
        """One answer; a registry that asks who we are is told once."""
        url = urljoin(f"{place.api}/v2/{place.repository}/", path)

        def send() -> contextlib.AbstractContextManager[Stream]:
            sent = {**(headers or {}), **self._auth.headers(place)}
            return self._http.stream(url, what=what, headers=sent, accept=(*accept, *_TOLD),
                                     own_auth=True)  # fmt: skip

        with contextlib.ExitStack() as stack:
            stream = stack.enter_context(send())
            if stream.status == 401:
                challenge = stream.headers.get("WWW-Authenticate", "")
                said = _said(stream)
                stack.close()
                if not self._auth.answer(place, challenge):
                    raise _denied(place, what, said)
                stream = stack.enter_context(send())
            if stream.status not in accept:
                raise _refused(stream, where, place, what)
            yield stream


def _refused(stream: Stream, where: Reference, place: Place, what: str) -> EngineError:
    said = _said(stream)
    host = urlsplit(place.api).netloc
    if stream.status == 404:
        return NotFoundError(f"{host}: expected {what}, found that there is none{said}",
                             hint=f"does {where.repository} still have it?")  # fmt: skip
    if stream.status == 429:
        return EngineError(f"{host}: expected {what}, found that it was asked too often{said}",
                           hint=f"wait, or docker login {place.logins[0]}")  # fmt: skip
    return _denied(place, what, said)


def _denied(place: Place, what: str, said: str) -> EngineError:
    return EngineError(
        f"{urlsplit(place.api).netloc}: expected {what}, found that it is denied{said}",
        hint=f"docker login {place.logins[0]}; a repository that is not there is denied as well",
    )


def _said(stream: Stream) -> str:
    """The registry's own words on an error, on one line, or ""."""
    try:
        error = json.loads(_bounded(stream, "", 1 << 16))["errors"][0]
        text = " ".join(str(error.get("message") or error.get("code") or "").split())[:200]
    except (EngineError, ValueError, LookupError, TypeError, AttributeError):
        return ""
    return f" ({text})" if text.isprintable() and text else ""


def _bounded(stream: Stream, what: str, limit: int) -> bytes:
    body = bytearray()
    for chunk in stream.chunks():
        body += chunk
        if len(body) > limit:
            raise EngineError(f"{what}: expected at most {limit} bytes, found more")
    return bytes(body)


def _next(stream: Stream, place: Place, what: str) -> str | None:
    """The address of the next page; one on another host would get our token, so it is refused."""
    import requests.utils

    links = requests.utils.parse_header_links(stream.headers.get("Link", ""))
    target = next((link["url"] for link in links if link.get("rel") == "next"), None)
    if target is None:
        return None
    url = urljoin(stream.url, target)
    if urlsplit(url)[:2] != urlsplit(place.api)[:2]:
        raise EngineError(f"{what}: expected the next page on {urlsplit(place.api).netloc}, "
                          f"found {urlsplit(url).netloc}")  # fmt: skip
    return url
