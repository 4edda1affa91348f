"""One HTTP session for everything that is fetched: retries, certificates, counts and plain errors.

It knows nothing of indexes, wheels or registries, and it never sends anything but GET and HEAD.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import ssl
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit
from urllib.request import url2pathname

import requests
import urllib3
from requests.adapters import BaseAdapter, HTTPAdapter
from urllib3.util.retry import Retry

from imagebuild.errors import EngineError, UsageError
from imagebuild.sources.httperrors import RETRY_STATUSES, explain, refused
from imagebuild.sources.pipconf import PipSettings, scrub, split_credentials

if TYPE_CHECKING:
    from requests.adapters import _HostParams, _PoolKwargs

CONNECTIONS = 6
MAX_RETRY_AFTER = 120  # seconds; a server that asks for more gets asked again after this
BLOCK = 1 << 18  # bytes per read of a body


@dataclass
class Account:
    """What was asked for on behalf of one piece of work, whichever thread did it."""

    requests: int = 0
    bytes_fetched: int = 0
    outer: Account | None = None

    def add(self, sent: int, body: int) -> None:
        """Adds to itself and to what it is part of."""
        self.requests += sent
        self.bytes_fetched += body
        if self.outer is not None:
            self.outer.add(sent, body)


_ACCOUNT: contextvars.ContextVar[Account | None] = contextvars.ContextVar("account", default=None)


@contextlib.contextmanager
def account() -> Iterator[Account]:
    """Counts what the block sends and receives. A thread that it starts needs its context."""
    mine = Account(outer=_ACCOUNT.get())
    token = _ACCOUNT.set(mine)
    try:
        yield mine
    finally:
        _ACCOUNT.reset(token)


class UnreachableError(EngineError):
    """Nobody answers at an address, or not as a server should."""


class TransferError(EngineError):
    """A body broke off or stalled; asking again may well succeed."""


@dataclass(frozen=True)
class Reply:
    """A whole answer.

    Attributes:
        url: the address that answered, after redirects, without credentials.
        body: the decoded body.
    """

    status: int
    headers: Mapping[str, str]
    url: str
    body: bytes


class Stream:
    """An answer whose body is still to be read."""

    def __init__(self, http: Http, response: requests.Response, what: str) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self.url = scrub(response.url)
        self._http = http
        self._response = response
        self._what = what

    def chunks(self, size: int = BLOCK) -> Iterator[bytes]:
        """Yields the body in pieces of at most about `size` bytes.

        Raises:
            TransferError: the connection broke off before the declared end.
        """
        raw, seen = self._response.raw, 0
        is_remote = self.url.startswith("http")
        try:
            # read1: what arrived before a break is handed out, so that a resume starts behind it.
            while chunk := raw.read1(size, decode_content=True) if is_remote else raw.read(size):
                if is_remote:
                    self._http.count(body=raw.tell() - seen)
                    seen = raw.tell()
                yield chunk
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self._http.failure(error, self.url, self._what, TransferError) from error


class Http:
    """A `requests` session set up as pip is.

    Attributes:
        offline: nothing but `file:` is fetched; everything else is refused.
        backoff: seconds before the second retry; each later wait is twice the one before.
        requests: HTTP requests sent so far, retries and redirects included.
        bytes_fetched: body bytes received so far, as they came over the wire.
    """

    def __init__(
        self, settings: PipSettings, *, offline: bool = False, backoff: float = 0.25
    ) -> None:
        self.settings = settings
        self.offline = offline
        self.backoff = backoff
        self.requests = 0
        self.bytes_fetched = 0
        self._lock = threading.Lock()
        self._credentials = _credentials(settings)
        self._session = self._new_session()

    def __enter__(self) -> Http:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes every connection."""
        self._session.close()

    def remember_login(self, url: str) -> None:
        """Uses the user and password in `url`, if any, for all else on its host as well."""
        clean, login = split_credentials(url)
        if login is not None:
            self._credentials.setdefault(urlsplit(clean).netloc, login)

    def count(self, *, sent: int = 0, body: int = 0) -> None:
        """Adds to `requests` and `bytes_fetched`; safe from any thread."""
        with self._lock:
            self.requests += sent
            self.bytes_fetched += body
            if (mine := _ACCOUNT.get()) is not None:
                mine.add(sent, body)

    def sleep(self, attempt: int) -> None:
        """Waits before the try after the `attempt`th failure (counted from 1)."""
        if attempt > 1:
            time.sleep(min(self.backoff * 2 ** (attempt - 1), MAX_RETRY_AFTER))

    def get(
        self,
        url: str,
        *,
        what: str,
        headers: Mapping[str, str] | None = None,
        accept: Collection[int] = (200,),
        unread: Collection[int] = (),
        own_auth: bool = False,
    ) -> Reply:
        """Fetches a whole answer into memory; a body that breaks off is asked for again.

        Args:
            url: absolute address; `user:password@` in it is used and never shown.
            what: what is fetched, for messages: "the index page of vllm".
            headers: more request headers.
            accept: status codes that the caller understands.
            unread: more of them, whose body is left unread and given as empty.
            own_auth: `headers` say who asks; netrc and pip's logins stay out of it.

        Raises:
            EngineError: offline, unreachable, or a status that is not in `accept`.
        """
        attempt = 0
        while True:
            try:
                with self.stream(
                    url,
                    what=what,
                    headers=headers,
                    accept=(*accept, *unread),
                    own_auth=own_auth,
                ) as stream:
                    body = b"" if stream.status in unread else b"".join(stream.chunks())
                    return Reply(stream.status, stream.headers, stream.url, body)
            except TransferError:
                attempt += 1
                if attempt > self.settings.retries:
                    raise
                self.sleep(attempt)

    @contextlib.contextmanager
    def stream(
        self,
        url: str,
        *,
        what: str,
        headers: Mapping[str, str] | None = None,
        accept: Collection[int] = (200,),
        own_auth: bool = False,
    ) -> Iterator[Stream]:
        """Opens an answer, to be read with `Stream.chunks`; arguments and errors as in `get`."""
        with self._send(url, what, headers, own_auth=own_auth) as response:
            if response.status_code not in accept:
                raise refused(response, what, accept)
            yield Stream(self, response, what)

    def refuse_offline(self, url: str, what: str) -> None:
        """Raises EngineError when `url` may not be asked because of `offline`."""
        if self.offline and not url.startswith("file:"):
            raise EngineError(
                f"{scrub(url)}: expected {what} in the cache, "
                "found nothing there and --offline is set",
                hint="run the same command once without --offline",
            )

    def _send(
        self, url: str, what: str, headers: Mapping[str, str] | None, *, own_auth: bool
    ) -> requests.Response:
        clean, own = split_credentials(url)
        self.refuse_offline(clean, what)
        login = own or self._credentials.get(urlsplit(clean).netloc)
        proxy = self.settings.proxy
        try:
            return self._session.get(
                clean,
                headers=dict(headers or {}),
                auth=_as_given if own_auth else login,
                timeout=self.settings.timeout or None,
                # Given with each request: a session's proxies yield to the environment's.
                proxies={"http": proxy, "https": proxy} if proxy else None,
                stream=True,
            )
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise self.failure(error, clean, what, UnreachableError) from error

    def failure(
        self, error: Exception, url: str, what: str, kind: type[EngineError]
    ) -> EngineError:
        """Turns a network exception into one sentence that says who did not do what."""
        found, hint = explain(error, self.settings)
        host = urlsplit(scrub(url)).netloc or scrub(url)
        return kind(f"{host}: expected {what}, found that {found}", hint=hint)

    def _new_session(self) -> requests.Session:
        settings = self.settings
        for key, path in (("cert", settings.cert), ("client-cert", settings.client_cert)):
            if path and not Path(path).exists():
                raise UsageError(f"pip configuration, {key}: expected a file, found no {path!r}")
        retry = Retry(
            total=settings.retries,
            backoff_factor=self.backoff,
            status_forcelist=RETRY_STATUSES,
            allowed_methods=("GET", "HEAD"),
            respect_retry_after_header=True,
            retry_after_max=MAX_RETRY_AFTER,
            raise_on_status=False,
        )
        session = _Session(settings.trusted_hosts, _Adapter(self, retry, verify=False))
        session.headers["User-Agent"] = "glm53-imagebuild"
        session.cert = settings.client_cert
        session.mount("http://", _Adapter(self, retry))
        session.mount("https://", _Adapter(self, retry, verify=settings.cert))
        session.mount("file:", _FileAdapter())
        return session


class _Session(requests.Session):
    """Sends requests to trusted hosts, and to no other, through `insecure`."""

    def __init__(self, trusted: Collection[str], insecure: _Adapter) -> None:
        super().__init__()
        self._trusted = frozenset(trusted)
        self._insecure = insecure
        if trusted:
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)

    def get_redirect_target(self, resp: requests.Response) -> str | None:
        """Where a redirect leads: a server must not send us to files of this machine."""
        target: str | None = super().get_redirect_target(resp)
        try:
            scheme = urlsplit(urljoin(resp.url, target or "")).scheme
        except ValueError:
            scheme = ""
        if target and scheme not in ("http", "https"):
            resp.close()
            raise requests.exceptions.InvalidSchema("a redirect to what is no http address")
        return target

    def get_adapter(self, url: str) -> BaseAdapter:
        parts = urlsplit(url)
        if parts.scheme == "https" and not self._trusted.isdisjoint(
            (str(parts.hostname), f"{parts.hostname}:{parts.port or 443}")
        ):
            return self._insecure
        return super().get_adapter(url)

    def close(self) -> None:
        super().close()
        self._insecure.close()


class _Adapter(HTTPAdapter):
    """Counts what is sent, and decides how certificates are checked, redirects included.

    `verify` is False (do not check), a PEM file or folder, or None: the system's certificates as
    pip does since 24.2, plus certifi's, plus those that REQUESTS_CA_BUNDLE names.
    """

    def __init__(self, http: Http, retry: Retry, *, verify: str | bool | None = None) -> None:
        self._http = http
        self._verify = verify
        self._context = _system_context() if verify is None else None
        super().__init__(pool_maxsize=CONNECTIONS, max_retries=retry)

    def build_connection_pool_key_attributes(
        self,
        request: requests.PreparedRequest,
        verify: bool | str,
        cert: str | tuple[str, str] | None = None,
    ) -> tuple[_HostParams, _PoolKwargs]:
        host, pool = super().build_connection_pool_key_attributes(request, verify, cert)
        if self._context is not None:
            pool["ssl_context"] = self._context
        return host, pool

    def send(  # noqa: PLR0917  the parameters are those of requests' adapters
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: float | tuple[float, float] | tuple[float, None] | None = None,
        verify: bool | str = True,
        cert: bytes | str | tuple[bytes | str, bytes | str] | None = None,
        proxies: Mapping[str, str] | None = None,
    ) -> requests.Response:
        chosen = verify if self._verify is None else self._verify
        self._http.count(sent=1)
        response = super().send(request, stream, timeout, chosen, cert, proxies)
        history = getattr(getattr(response.raw, "retries", None), "history", ())
        self._http.count(sent=len(history))
        return response


def _as_given(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Keeps requests from putting a login of netrc over an Authorization header."""
    return request


def _system_context() -> ssl.SSLContext:
    import truststore

    return truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _File(io.FileIO):
    """Is closed with the response, as requests does with what has this method."""

    def release_conn(self) -> None:
        self.close()


class _FileAdapter(BaseAdapter):
    """Answers `file:` URLs; a folder answers with its index.html, as it does for pip."""

    def send(
        self, request: requests.PreparedRequest, *_args: object, **_kwargs: object
    ) -> requests.Response:
        url = request.url or ""
        response = requests.Response()
        response.request, response.url = request, url
        path = Path(url2pathname(urlsplit(url).path))
        if path.is_dir():
            path /= "index.html"
        try:
            response.raw = _File(path)
        except (FileNotFoundError, NotADirectoryError):
            response.status_code, response.reason = 404, "no such file"
            response.raw = io.BytesIO()
            return response
        response.status_code, response.reason = 200, "OK"
        if path.suffix in (".html", ".htm"):
            response.headers["Content-Type"] = "text/html"
        response.headers["Content-Length"] = str(path.stat().st_size)
        return response

    def close(self) -> None:
        """Holds nothing."""


def _credentials(settings: PipSettings) -> dict[str, tuple[str, str]]:
    """User and password by host, for links of an index that leave its credentials out."""
    found: dict[str, tuple[str, str]] = {}
    for url in (*settings.index_urls, *settings.find_links):
        clean, auth = split_credentials(url)
        if auth is not None:
            found.setdefault(urlsplit(clean).netloc, auth)
    return found
