from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path

import pytest

from imagebuild.errors import EngineError, UsageError
from imagebuild.sources.http import Http, account
from imagebuild.sources.httperrors import explain
from imagebuild.sources.pipconf import PipSettings
from tests.support.index_server import IndexServer, authority


@pytest.fixture
def tls_server(folder: Path) -> Iterator[IndexServer]:
    (folder / "vllm-1.whl").write_bytes(b"wheel")
    with IndexServer(folder, tls=True) as running:
        yield running


@pytest.fixture(autouse=True)
def served(folder: Path) -> None:
    (folder / "data.bin").write_bytes(bytes(range(256)) * 4096)


def failure(url: str, **changes: object) -> EngineError:
    settings = replace(PipSettings(url, retries=0, timeout=30), **changes)  # type: ignore[arg-type]
    with Http(settings, backoff=0) as http, pytest.raises(EngineError) as caught:
        http.get(url, what="the page")
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert "object at 0x" not in str(caught.value)
    return caught.value


def test_counts_requests_and_body_bytes(server: IndexServer, http: Http) -> None:
    reply = http.get(server.file_url("data.bin"), what="it")
    assert reply.body == bytes(range(256)) * 4096
    assert (http.requests, http.bytes_fetched) == (1, 1 << 20)


def test_counts_are_right_from_many_threads(server: IndexServer, http: Http) -> None:
    def work() -> None:
        for _ in range(5):
            http.get(server.file_url("data.bin"), what="it")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (http.requests, http.bytes_fetched) == (20, 20 << 20)


def test_an_account_counts_its_own_work_in_whatever_thread(server: IndexServer, http: Http) -> None:
    def work(times: int) -> None:
        for _ in range(times):
            http.get(server.file_url("data.bin"), what="it")

    with account() as all_of_it:
        http.get(server.file_url("data.bin"), what="it")
        with account() as inner:
            threads = [
                threading.Thread(target=copy_context().run, args=(work, times)) for times in (2, 3)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    http.get(server.file_url("data.bin"), what="it")  # on nobody's account
    assert (inner.requests, inner.bytes_fetched) == (5, 5 << 20)
    assert (all_of_it.requests, all_of_it.bytes_fetched) == (6, 6 << 20)
    assert http.requests == 7


def test_an_overloaded_server_is_asked_again(server: IndexServer, http: Http) -> None:
    server.faults.busy = 2
    assert http.get(server.file_url("data.bin"), what="it").status == 200
    assert [one.status for one in server.asked] == [503, 503, 200]
    assert http.requests == 3


def test_an_overloaded_server_is_not_asked_for_ever(server: IndexServer, http: Http) -> None:
    server.faults.busy = 99
    with pytest.raises(
        EngineError, match=r"data.bin: expected it \(status 200\), found status 503"
    ):
        http.get(server.file_url("data.bin"), what="it")
    assert len(server.asked) == 4


def test_a_body_that_breaks_off_is_asked_for_again(server: IndexServer, http: Http) -> None:
    server.faults.drop_after = [1000, 0]
    assert len(http.get(server.file_url("data.bin"), what="it").body) == 1 << 20
    assert http.bytes_fetched == (1 << 20) + 1000
    server.faults.drop_after = [1] * 99
    with pytest.raises(EngineError, match="expected it, found that the connection broke off"):
        http.get(server.file_url("data.bin"), what="it")


def test_unread_bodies_are_not_counted(server: IndexServer, http: Http) -> None:
    reply = http.get(server.file_url("data.bin"), what="it", accept=(206,), unread=(200,))
    assert (reply.status, reply.body, http.bytes_fetched) == (200, b"", 0)


def test_redirects_are_followed_and_counted(server: IndexServer, http: Http) -> None:
    url = server.file_url("data.bin").replace("/files/", "/moved/files/")
    assert http.get(url, what="it").url == server.file_url("data.bin")
    assert http.requests == 2


def test_unreachable(server: IndexServer) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    error = failure(f"http://me:s3cret@127.0.0.1:{port}/simple/")
    assert str(error) == (
        f"127.0.0.1:{port}: expected the page, found that it is unreachable (Connection refused)"
    )
    assert error.exit_code == 5 and "config list" in str(error.hint)


def test_a_name_that_does_not_resolve() -> None:
    error = failure("http://no-such-host.invalid/simple/")
    assert "no-such-host.invalid: expected the page, found that its name does not resolve" in str(
        error
    )


def test_a_server_that_says_nothing(server: IndexServer) -> None:
    server.faults.hold = threading.Event()
    error = failure(f"{server.url}/vllm/", timeout=0.05)
    assert "found that it sent nothing for 0.05 s" in str(error)
    assert "timeout" in str(error.hint)


def test_a_proxy_that_is_not_there(server: IndexServer) -> None:
    error = failure(f"{server.url}/vllm/", proxy="http://me:s3cret@127.0.0.1:9")
    assert "the proxy does not let the request through" in str(error)
    assert "s3cret" not in f"{error} {error.hint}"


def test_malformed_addresses(http: Http) -> None:
    with pytest.raises(UsageError, match="expected an address, found that it is malformed"):
        http.get("http://me:s3cret@[/simple/", what="it")
    assert "the address is malformed" in str(failure("index/simple/"))


def test_tls_that_nobody_vouches_for(tls_server: IndexServer) -> None:
    error = failure(tls_server.file_url("vllm-1.whl"))
    assert f"{tls_server.netloc}: expected the page, found that TLS failed (" in str(error)
    assert "certificate" in str(error) and "trusted-host" in str(error.hint)


def test_pips_cert_wins_over_the_environment(
    tls_server: IndexServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import certifi

    authority().cert_pem.write_to_path(str(tmp_path / "ca.pem"))

    monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())
    settings = PipSettings(tls_server.url, cert=str(tmp_path / "ca.pem"), retries=0)
    with Http(settings) as http:
        assert http.get(tls_server.file_url("vllm-1.whl"), what="it").body == b"wheel"


@pytest.mark.parametrize("with_port", [True, False])
def test_trusted_hosts(tls_server: IndexServer, with_port: bool) -> None:
    host = tls_server.netloc if with_port else "127.0.0.1"
    with Http(PipSettings(tls_server.url, trusted_hosts=(host,), retries=0)) as http:
        assert http.get(tls_server.file_url("vllm-1.whl"), what="it").body == b"wheel"


@pytest.mark.parametrize("trusted", ["127.0.0.1:1", "127.0.0.2", "127.0.0"])
def test_other_hosts_are_not_trusted(tls_server: IndexServer, trusted: str) -> None:
    error = failure(tls_server.file_url("vllm-1.whl"), trusted_hosts=(trusted,))
    assert "TLS failed" in str(error)


@pytest.mark.parametrize("key", ["cert", "client_cert"])
def test_a_certificate_that_is_not_there(key: str, tmp_path: Path) -> None:
    settings = replace(PipSettings("http://x"), **{key: str(tmp_path / "none.pem")})
    with pytest.raises(UsageError, match=f"{key.replace('_', '-')}: expected a file, found no"):
        Http(settings)


def test_credentials_of_the_url_are_used_and_not_shown(server: IndexServer) -> None:
    server.faults.auth = ("me", "s3 cret")
    url = server.file_url("data.bin")
    error = failure(url.replace("//", "//me:wrong@"))
    assert str(error) == f"{url}: expected the page (status 200), found status 401 Unauthorized"
    assert "netrc" in str(error.hint)
    with Http(PipSettings(server.url)) as http:
        reply = http.get(url.replace("//", "//me:s3%20cret@"), what="it")
    assert reply.url == url


def test_credentials_of_the_index_serve_its_links(server: IndexServer) -> None:
    server.faults.auth = ("me", "s3cret")
    with Http(PipSettings(server.url.replace("//", "//me:s3cret@"))) as http:
        assert http.get(server.file_url("data.bin"), what="it").status == 200


def test_netrc(server: IndexServer, tmp_path: Path) -> None:
    server.faults.auth = ("me", "s3cret")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password s3cret\n")
    with Http(PipSettings(server.url)) as http:
        assert http.get(server.file_url("data.bin"), what="it").status == 200


def test_offline_refuses_and_says_what_was_wanted(offline: Http, server: IndexServer) -> None:
    with pytest.raises(EngineError, match="expected the page in the cache") as caught:
        offline.get("http://me:s3cret@a.example/x", what="the page")
    assert str(caught.value).startswith("http://a.example/x: ")
    assert "--offline" in str(caught.value.hint)
    assert server.asked == [] and offline.requests == 0


def test_file_urls_work_offline_and_cost_nothing(offline: Http, tmp_path: Path) -> None:
    page = tmp_path / "simple" / "vllm"
    page.mkdir(parents=True)
    (page / "index.html").write_text("<html/>")
    reply = offline.get(f"{page.as_uri()}/", what="it")
    assert (reply.status, reply.body, reply.headers["Content-Type"]) == (
        200,
        b"<html/>",
        "text/html",
    )
    assert offline.get((tmp_path / "no").as_uri(), what="it", accept=(404,)).status == 404
    assert (offline.requests, offline.bytes_fetched) == (0, 0)


def test_what_cannot_be_explained_is_named(settings: PipSettings) -> None:
    assert explain(ValueError("odd"), settings)[0] == "the request failed (ValueError)"
    assert explain(PermissionError(13, "Permission denied"), settings)[0] == (
        "it cannot be read (Permission denied)"
    )
