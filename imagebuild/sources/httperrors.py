"""Says in one sentence why a request failed; it sends nothing and shows no credentials."""

from __future__ import annotations

import ssl
from collections.abc import Collection

import requests
import urllib3

from imagebuild.errors import EngineError
from imagebuild.sources.pipconf import PipSettings, scrub

RETRY_STATUSES = (429, 500, 502, 503, 504)
_MALFORMED = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
)


def refused(response: requests.Response, what: str, accept: Collection[int]) -> EngineError:
    """The error for a status that is not in `accept`."""
    wanted = " or ".join(str(status) for status in accept)
    hint = None
    if response.status_code in (401, 403):
        hint = "give user and password in ~/.netrc or in the index URL of pip's configuration"
    elif response.status_code in RETRY_STATUSES:
        hint = "the server is overloaded or down; run the same command again later"
    return EngineError(
        f"{scrub(response.url)}: expected {what} (status {wanted}), "
        f"found status {response.status_code} {response.reason}",
        hint=hint,
    )


def _chain(error: BaseException) -> list[BaseException]:
    """The exceptions inside one another that requests and urllib3 wrap around the cause."""
    found: list[BaseException] = []
    todo: list[object] = [error]
    while todo:
        item = todo.pop(0)
        if isinstance(item, BaseException) and item not in found:
            found.append(item)
            todo += [*item.args, getattr(item, "reason", None), item.__cause__, item.__context__]
    return found


def explain(error: Exception, settings: PipSettings) -> tuple[str, str | None]:
    """One clause on what went wrong, and the next thing to try."""
    u3 = urllib3.exceptions
    reach = "check the network, and proxy and index-url in `python -m pip config list`"
    chain = _chain(error)
    seconds = f"{settings.timeout:g} s"

    def first(*kinds: type[BaseException]) -> BaseException | None:
        return next((item for item in chain if isinstance(item, kinds)), None)

    if first(requests.exceptions.ProxyError, u3.ProxyError):
        return "the proxy does not let the request through", reach
    if tls := first(ssl.SSLError, u3.SSLError, requests.exceptions.SSLError):
        why = getattr(first(ssl.SSLCertVerificationError), "verify_message", "") or getattr(
            tls, "reason", ""
        )
        detail = f" ({why})" if isinstance(why, str) and why else ""
        return f"TLS failed{detail}", "set `cert` or `trusted-host` in pip's configuration"
    if first(u3.NameResolutionError):
        return "its name does not resolve", reach
    if refused := first(u3.NewConnectionError):
        number = next((e.strerror for e in chain if isinstance(e, OSError) and e.strerror), "")
        return f"it is unreachable ({number or type(refused).__name__})", reach
    if first(u3.ConnectTimeoutError, requests.exceptions.ConnectTimeout):
        return f"it does not accept a connection within {seconds}", reach
    if first(u3.ReadTimeoutError, requests.exceptions.ReadTimeout, TimeoutError):
        return f"it sent nothing for {seconds}", "raise `timeout` in pip's configuration"
    if first(u3.ProtocolError, requests.exceptions.ChunkedEncodingError, ConnectionError):
        return "the connection broke off", "run the same command again"
    if first(*_MALFORMED):
        return "the address is malformed", reach
    if isinstance(error, OSError) and error.strerror:
        return f"it cannot be read ({error.strerror})", None
    return f"the request failed ({type(error).__name__})", reach
