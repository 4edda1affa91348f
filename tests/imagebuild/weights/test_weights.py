from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from imagebuild.cli import main
from imagebuild.commands import weights
from imagebuild.files import only_one
from imagebuild.sources import disk
from imagebuild.sources.http import Http
from imagebuild.sources.pipconf import PipSettings, read_settings
from imagebuild.weights import fetch as fetching
from imagebuild.weights import listing
from tests.support.wheels import noise

COMMIT = "a" * 40
NAME = "owner/model"


def shard(*sizes: int) -> bytes:
    """A safetensors file with U8 tensors of these sizes."""
    header, end = {}, 0
    for number, size in enumerate(sizes):
        header[f"t{number}"] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + noise(end)


FILES = {
    "config.json": b'{"model_type": "glm5_next"}',
    "model-00001.safetensors": shard(700_000, 900_000),
    "model-00002.safetensors": shard(1_500_000),
    "model.safetensors.index.json": json.dumps({
        "weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    }).encode(),
    "sub/tokenizer.json": b"{}",
}  # fmt: skip


@dataclass
class Hub:
    """A test double of a model hub, and of a plain web server below /plain/.

    Attributes:
        drop: name -> after how many bytes the first answer breaks off.
        changed: names whose bytes are other ones than the hub says.
        token: asked for where set.
        licence: of the model card.
        link: what a page says of the next one; `last` is then the last page.
        redirect: where files are instead.
        always: after how many bytes every answer with a file breaks off.
        packed: files come without a length.
        model: what is said of the model, where not a description.
        asked: (path, Range, Authorization) of each request.
    """

    files: dict[str, bytes]
    drop: dict[str, int] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    token: str = ""
    licence: str | None = "mit"
    ranges: bool = True
    link: str = ""
    last: int | None = None
    redirect: str = ""
    always: int | None = None
    packed: bool = False
    model: bytes = b""
    sums: bytes | None = None
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    url: str = ""

    def tree(self) -> list[dict[str, object]]:
        entries: list[dict[str, object]] = [{"type": "directory", "path": "sub", "oid": "d" * 40}]
        for path, body in {**self.files, ".gitattributes": b"x"}.items():
            git = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
            entry: dict[str, object] = {
                "type": "file", "path": path, "size": len(body), "oid": git}  # fmt: skip
            if path.endswith(".safetensors"):
                entry["lfs"] = {"oid": hashlib.sha256(body).hexdigest(), "size": len(body)}
            entries.append(entry)
        return entries


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        hub: Hub = self.server.hub
        path, _, query = self.path.partition("?")
        authorization = self.headers.get("Authorization", "")
        hub.asked.append((self.path, self.headers.get("Range", ""), authorization))
        if hub.token and authorization != f"Bearer {hub.token}":
            self.answer(401, b"")
        elif path == f"/api/models/{NAME}/revision/main":
            card = {"license": hub.licence} if hub.licence else {}
            said = json.dumps({"sha": COMMIT, "cardData": card}).encode()
            self.answer(200, hub.model or said)
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            entries = hub.tree()
            page = int(query.partition("page=")[2] or 0)
            more = {"Link": f'<{hub.url}{path}?recursive=true&page={page + 1}>; rel="next"'}
            last = (page + 1) * 3 >= len(entries)
            if hub.link:
                more, last = {"Link": f'{hub.link}; rel="next"'}, page == hub.last
            body = json.dumps(entries[page * 3 : page * 3 + 3]).encode()
            self.answer(200, body, {} if last else more)
        elif path == "/plain/SHA256SUMS" and hub.sums is not None:
            self.answer(200, hub.sums)
        elif path.startswith(f"/{NAME}/resolve/{COMMIT}/"):
            name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/")
            if hub.redirect:
                self.answer(302, b"", {"Location": hub.redirect + name})
            else:
                self.file(hub, name)
        elif path.startswith("/plain/"):
            self.file(hub, path.removeprefix("/plain/"))
        else:
            self.answer(404, b"")

    def file(self, hub: Hub, name: str) -> None:
        body = hub.files.get(name)
        if body is None:
            self.answer(404, b"")
            return
        if name in hub.changed:
            body = bytes([body[0] ^ 1]) + body[1:]
        start = 0
        asked = self.headers.get("Range", "")
        if asked and hub.ranges:
            start = int(asked.removeprefix("bytes=").rstrip("-"))
        headers = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
        cut = hub.drop.pop(name, hub.always)
        if hub.packed:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            return
        self.answer(206 if start else 200, body[start:], headers, cut)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None,
               cut: int | None = None) -> None:  # fmt: skip
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: Hub

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients break off on purpose."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = _Server(("127.0.0.1", 0), _Handler)
    double = server.hub = Hub(dict(FILES))
    double.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", double.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    # pip is asked for its settings in test_from_the_hub alone, since that takes a second.
    monkeypatch.setattr(weights, "read_settings", lambda: PipSettings("", retries=1))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield double
    server.shutdown()
    thread.join()
    server.server_close()


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "weights.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def fetch(folder: Path, *more: str, source: str = NAME) -> int:
    return main(["weights", "fetch", source, "--to", str(folder), *more])


class TestFetch:
    def test_from_the_hub_all_pages_and_both_kinds_of_hash(self, hub: Hub, tmp_path: Path,
                                                          capfd, monkeypatch) -> None:  # fmt: skip
        monkeypatch.setattr(weights, "read_settings", read_settings)
        assert fetch(tmp_path / "w", "--format", "json") == 0
        out, err = capfd.readouterr()
        assert content(tmp_path / "w") == FILES
        told = json.loads(out)
        assert (told["revision"], told["licence"], told["files"]) == (COMMIT, "mit", len(FILES))
        assert told["bytes_fetched"] == told["bytes"] == sum(map(len, FILES.values()))
        assert f"licence of {NAME}: mit" in err

    def test_a_second_call_fetches_only_what_is_wrong(self, hub: Hub, tmp_path: Path) -> None:
        assert fetch(tmp_path / "w") == 0
        (tmp_path / "w/config.json").write_bytes(b'{"model_type": "glm5_nexT"}')
        (tmp_path / "w/model-00002.safetensors").unlink()
        (tmp_path / "w/mine.txt").write_text("stays")
        hub.asked.clear()
        assert fetch(tmp_path / "w") == 0
        names = sorted(path.rpartition("/")[2] for path, *_ in hub.asked if "/resolve/" in path)
        assert names == ["config.json", "model-00002.safetensors"]
        assert content(tmp_path / "w") == {**FILES, "mine.txt": b"stays"}

    def test_a_break_is_continued_where_it_was(self, hub: Hub, tmp_path: Path) -> None:
        hub.drop["model-00001.safetensors"] = 1_200_000
        assert fetch(tmp_path / "w") == 0
        asked = [wanted for path, wanted, _ in hub.asked if path.endswith("00001.safetensors")]
        assert asked[0] == "" and asked[1].startswith("bytes=") and asked[1] != "bytes=0-"
        assert content(tmp_path / "w") == FILES

    def test_a_server_that_cannot_continue_starts_again(self, hub: Hub, tmp_path: Path) -> None:
        hub.drop["model-00001.safetensors"] = 1_200_000
        hub.ranges = False
        assert fetch(tmp_path / "w") == 0
        assert content(tmp_path / "w") == FILES

    def test_the_next_call_continues_a_part(self, hub: Hub, tmp_path: Path) -> None:
        body = FILES["model-00002.safetensors"]
        (tmp_path / "w").mkdir()
        (tmp_path / "w/model-00002.safetensors.part").write_bytes(body[:400_000])
        assert fetch(tmp_path / "w") == 0
        asked = [wanted for path, wanted, _ in hub.asked if path.endswith("00002.safetensors")]
        assert asked == ["bytes=400000-"]
        assert content(tmp_path / "w") == FILES

    def test_a_part_of_another_file_is_no_trap(self, hub: Hub, tmp_path: Path) -> None:
        (tmp_path / "w").mkdir()
        (tmp_path / "w/model-00002.safetensors.part").write_bytes(noise(400_000)[::-1])
        assert fetch(tmp_path / "w") == 0
        assert content(tmp_path / "w") == FILES

    @pytest.mark.parametrize("name", ["config.json", "model-00001.safetensors"])
    def test_other_bytes_get_no_name(self, hub: Hub, tmp_path: Path, capfd, name: str) -> None:
        hub.changed.add(name)
        assert fetch(tmp_path / "w") == 4
        assert "expected hash" in capfd.readouterr().err
        assert name not in content(tmp_path / "w")
        assert not (tmp_path / "w/weights.json").exists()

    def test_space_is_asked_before_the_first_byte(self, hub: Hub, tmp_path: Path,
                                                  monkeypatch, capfd) -> None:  # fmt: skip
        monkeypatch.setattr(fetching, "free_bytes", lambda _: fetching.RESERVE + 3_000_000)
        assert fetch(tmp_path / "w") == 5
        assert (
            "expected 0.0 GB and a reserve of 1.1 GB, found 1.1 GB free" in capfd.readouterr().err
        )
        assert not [path for path, *_ in hub.asked if "/resolve/" in path]
        assert disk.free_bytes(tmp_path) > 0

    def test_the_token_goes_to_the_hub(self, hub: Hub, tmp_path: Path, monkeypatch, capfd) -> None:
        hub.token = "secret"
        assert fetch(tmp_path / "w") == 5
        assert "HF_TOKEN" in capfd.readouterr().err
        monkeypatch.setenv("HF_TOKEN", "secret")
        assert fetch(tmp_path / "w") == 0
        assert "secret" not in "".join(capfd.readouterr())

    def test_a_restrictive_licence_is_accepted_by_name(self, hub: Hub, tmp_path: Path,
                                                       capfd) -> None:  # fmt: skip
        hub.licence = "cc-by-nc-nd-4.0"
        assert fetch(tmp_path / "w") == 2
        assert "--accept-licence cc-by-nc-nd-4.0" in capfd.readouterr().err
        assert not (tmp_path / "w").exists()
        assert fetch(tmp_path / "w", "--accept-licence", "cc-by-nc-nd-4.0") == 0

    @pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "a\\b"])
    def test_a_hostile_name_stops_it(self, hub: Hub, tmp_path: Path, capfd, path: str) -> None:
        hub.files[path] = b"x"
        assert fetch(tmp_path / "w") == 4
        assert "expected names of files below the checkpoint" in capfd.readouterr().err
        assert not (tmp_path / "x").exists()


class TestMirrors:
    def sums(self) -> bytes:
        return b"".join(b"%s  %s\n" % (hashlib.sha256(body).hexdigest().encode(), name.encode())
                        for name, body in FILES.items())  # fmt: skip

    def test_any_web_server_with_sums(self, hub: Hub, tmp_path: Path) -> None:
        hub.sums = self.sums()
        assert fetch(tmp_path / "w", source=f"{hub.url}/plain") == 0
        assert content(tmp_path / "w") == FILES

    def test_a_web_server_without_sums_is_refused(self, hub: Hub, tmp_path: Path, capfd) -> None:
        assert fetch(tmp_path / "w", source=f"{hub.url}/plain") == 2
        assert "expected SHA256SUMS beside the files" in capfd.readouterr().err

    def test_malformed_sums(self, hub: Hub, tmp_path: Path, capfd) -> None:
        hub.sums = self.sums() + b"<html>\n"
        assert fetch(tmp_path / "w", source=f"{hub.url}/plain") == 4
        assert f"line {len(FILES) + 1}: expected a hash and a name" in capfd.readouterr().err

    def test_a_folder_with_and_without_sums(self, tmp_path: Path, capfd) -> None:
        source = tmp_path / "source"
        for name, body in FILES.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(body)
        assert fetch(tmp_path / "w", source=str(source)) == 0
        assert content(tmp_path / "w") == FILES
        (source / "SHA256SUMS").write_bytes(self.sums().replace(b"config", b"confih"))
        assert fetch(tmp_path / "w", source=str(source)) == 4
        assert "found no confih.json" in capfd.readouterr().err

    def test_nothing_of_the_kind(self, tmp_path: Path, capfd) -> None:
        assert fetch(tmp_path / "w", source="./nowhere") == 2
        assert "expected OWNER/NAME" in capfd.readouterr().err


class TestVerify:
    @pytest.fixture
    def fetched(self, hub: Hub, tmp_path: Path) -> Path:
        assert fetch(tmp_path / "w") == 0
        return tmp_path / "w"

    def verify(self, folder: Path, *more: str) -> int:
        return main(["weights", "verify", str(folder), *more])

    def test_a_sound_folder(self, fetched: Path) -> None:
        assert self.verify(fetched) == 0 and self.verify(fetched, "--quick") == 0

    def test_one_flipped_bit(self, fetched: Path, capfd) -> None:
        path = fetched / "model-00002.safetensors"
        body = bytearray(path.read_bytes())
        body[-1] ^= 1
        path.write_bytes(body)
        assert self.verify(fetched, "--quick") == 0
        capfd.readouterr()
        assert self.verify(fetched, "--format", "json") == 3
        [finding] = json.loads(capfd.readouterr().out)["findings"]
        assert finding["file"] == path.name and "expected sha256" in finding["message"]

    def test_a_lost_file_and_a_cut_one(self, fetched: Path, capfd) -> None:
        (fetched / "config.json").unlink()
        with (fetched / "model-00001.safetensors").open("ab") as file:
            file.truncate(1000)
        capfd.readouterr()
        assert self.verify(fetched, "--quick", "--format", "json") == 3
        told = {one["file"] for one in json.loads(capfd.readouterr().out)["findings"]}
        assert told == {"config.json", "model-00001.safetensors"}

    @pytest.mark.parametrize("damage", ["size", "header", "weight_map"])
    def test_a_mirror_of_cut_files_is_caught_by_the_headers(self, hub: Hub, tmp_path: Path,
                                                            damage: str) -> None:  # fmt: skip
        """The bytes are as their source says them, and the source's are broken."""
        name = "model-00001.safetensors"
        if damage == "size":
            hub.files[name] = FILES[name][:-1]
        elif damage == "header":
            hub.files[name] = b"\xff" * 16
        else:
            index = {"weight_map": {"a": "model-00009.safetensors"}}
            hub.files["model.safetensors.index.json"] = json.dumps(index).encode()
        assert fetch(tmp_path / "w") == 0
        assert self.verify(tmp_path / "w", "--quick") == 3

    def test_without_a_record(self, tmp_path: Path, capfd) -> None:
        assert self.verify(tmp_path) == 2
        (tmp_path / "weights.json").write_text('{"schema": 1, "files": {"a": {"size": -1}}}')
        assert self.verify(tmp_path) == 4
        assert "Traceback" not in capfd.readouterr().err


class TestHostileHubs:
    def test_pages_that_loop(self, hub: Hub, tmp_path: Path, capfd) -> None:
        hub.link = f"<{hub.url}/api/models/{NAME}/tree/{COMMIT}?recursive=true>"
        assert fetch(tmp_path / "w") == 4
        assert "expected a list of files that ends" in capfd.readouterr().err

    def test_pages_without_end(self, hub: Hub, tmp_path: Path, monkeypatch, capfd) -> None:
        monkeypatch.setattr(listing, "_MOST_FILES", 3)
        assert fetch(tmp_path / "w") == 4
        assert "expected a list of files that ends" in capfd.readouterr().err

    @pytest.mark.parametrize("link", [
        "<file:///etc/passwd>", "<//localhost/x>", "<https://127.0.0.1/x>",
        "<http://user:hunter2@elsewhere/x>", "<http://[>",
    ])  # fmt: skip
    def test_the_next_page_is_on_the_same_host(self, hub: Hub, tmp_path: Path, capfd,
                                               link: str) -> None:  # fmt: skip
        hub.link = link
        assert fetch(tmp_path / "w") == 4
        err = capfd.readouterr().err
        assert "expected the next page on the same host" in err and "hunter2" not in err

    def test_the_next_page_may_be_relative(self, hub: Hub, tmp_path: Path) -> None:
        hub.link = "<?recursive=true&page=1>"
        hub.last = 1
        assert fetch(tmp_path / "w") == 0
        assert content(tmp_path / "w") == FILES

    def test_a_redirect_to_another_host_has_no_token(self, hub: Hub, tmp_path: Path,
                                                     monkeypatch) -> None:  # fmt: skip
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        hub.redirect = f"{hub.url.replace('127.0.0.1', 'localhost')}/plain/"
        assert fetch(tmp_path / "w") == 0
        with_token = {path for path, _, said in hub.asked if "hf_secret" in said}
        assert with_token and not any(path.startswith("/plain/") for path in with_token)
        assert content(tmp_path / "w") == FILES

    @pytest.mark.parametrize("addresses", [
        ("http://[", NAME), ("hub.example", NAME), ("file:///etc", NAME), ("", "https://[::1"),
    ])  # fmt: skip
    def test_addresses_that_are_none(self, tmp_path: Path, monkeypatch, capfd, addresses) -> None:
        monkeypatch.setattr(weights, "read_settings", lambda: PipSettings("", retries=1))
        monkeypatch.setenv("HF_ENDPOINT", addresses[0])
        assert fetch(tmp_path / "w", source=addresses[1]) == 2
        assert "expected an http address" in capfd.readouterr().err

    @pytest.mark.parametrize("place", ["http://[", "gopher://127.0.0.1/", "//["])
    def test_a_redirect_to_nowhere(self, hub: Hub, tmp_path: Path, capfd, place: str) -> None:
        hub.redirect = place
        assert fetch(tmp_path / "w") == 5
        assert "the address is malformed" in capfd.readouterr().err

    def test_a_redirect_to_a_file_of_this_machine(self, hub: Hub, tmp_path: Path, capfd) -> None:
        for name, body in FILES.items():
            (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "here" / name).write_bytes(body)
        hub.redirect = f"file://{tmp_path}/here/"
        assert fetch(tmp_path / "w") == 5
        assert "the address is malformed" in capfd.readouterr().err
        assert not any(content(tmp_path / "w").values())

    @pytest.mark.parametrize("name", ["a\ud800", "a\x1b[2J", "a\nb", "x" * 251, "y/" + "é" * 126])
    def test_names_that_no_disk_or_terminal_takes(self, hub: Hub, tmp_path: Path, capfd,
                                                  name: str) -> None:  # fmt: skip
        hub.files[name] = b"x"
        assert fetch(tmp_path / "w") == 4
        err = capfd.readouterr().err
        assert "expected names of files below the checkpoint" in err and "\x1b" not in err

    def test_a_part_is_no_file_of_a_checkpoint(self, hub: Hub, tmp_path: Path, capfd) -> None:
        hub.files["config.json.part"] = b"x"
        assert fetch(tmp_path / "w") == 4
        assert "expected whole files, found config.json.part" in capfd.readouterr().err

    def test_json_of_any_depth(self, hub: Hub, tmp_path: Path, capfd) -> None:
        hub.model = b"[" * 200_000
        assert fetch(tmp_path / "w") == 5
        assert "expected JSON of a model hub" in capfd.readouterr().err
        assert fetch(tmp_path / "w", source="a/b\n") == 2

    def test_a_server_that_never_gets_on(self, hub: Hub, tmp_path: Path, monkeypatch) -> None:
        """It always breaks off after the same bytes, and cannot continue."""
        monkeypatch.setattr(Http, "sleep", lambda self, attempt: None)
        hub.ranges = False
        hub.always = 1_200_000
        assert fetch(tmp_path / "w") == 5
        asked = [path for path, *_ in hub.asked if path.endswith("00001.safetensors")]
        assert len(asked) < 10

    @pytest.mark.parametrize("token", ["hf_sec ret", "hf_secr\u0113t", "hf_sec\nret"])
    def test_a_token_that_is_none_is_not_shown(self, hub: Hub, tmp_path: Path, monkeypatch,
                                               capfd, token: str) -> None:  # fmt: skip
        monkeypatch.setenv("HF_TOKEN", token)
        assert fetch(tmp_path / "w") == 2
        assert "hf_sec" not in capfd.readouterr().err and hub.asked == []

    def test_a_token_with_the_end_of_its_line(self, hub: Hub, tmp_path: Path, monkeypatch) -> None:
        hub.token = "hf_secret"
        monkeypatch.setenv("HF_TOKEN", "hf_secret\n")
        assert fetch(tmp_path / "w") == 0

    def test_a_login_in_an_address_is_not_shown(self, hub: Hub, tmp_path: Path, capfd) -> None:
        hub.sums = TestMirrors().sums()
        hub.changed.add("config.json")
        source = hub.url.replace("//", "//user:hunter2@")
        assert fetch(tmp_path / "w", source=f"{source}/plain") == 4
        assert "hunter2" not in capfd.readouterr().err

    def test_a_file_without_a_size_leaves_the_reserve(self, hub: Hub, tmp_path: Path, monkeypatch,
                                                      capfd) -> None:  # fmt: skip
        hub.sums = TestMirrors().sums()
        hub.packed = True
        free = iter([fetching.RESERVE * 2] + [fetching.RESERVE - 1] * 99)
        monkeypatch.setattr(fetching, "free_bytes", lambda _: next(free))
        assert fetch(tmp_path / "w", "--jobs", "1", source=f"{hub.url}/plain") == 5
        assert "GB free" in capfd.readouterr().err


class TestFolders:
    def test_a_mirror_of_what_was_fetched(self, hub: Hub, tmp_path: Path) -> None:
        """`sha256sum *` there names our record, and its own file the second time."""
        none = hashlib.sha256(b"").hexdigest().encode()
        hub.sums = TestMirrors().sums() + none + b"  weights.json\n" + none + b"  SHA256SUMS\n"
        assert fetch(tmp_path / "w", source=f"{hub.url}/plain") == 0
        assert main(["weights", "verify", str(tmp_path / "w")]) == 0

    def test_a_source_whose_fetch_did_not_end(self, hub: Hub, tmp_path: Path, capfd) -> None:
        (tmp_path / "s").mkdir()
        (tmp_path / "s/config.json").write_bytes(b"{}")
        (tmp_path / "s/model.safetensors.part").write_bytes(b"half")
        assert fetch(tmp_path / "w", source=str(tmp_path / "s")) == 4
        assert "found model.safetensors.part" in capfd.readouterr().err

    @pytest.mark.parametrize("place", ["model-00001.safetensors", "model-00001.safetensors.part"])
    def test_a_folder_in_the_way_is_found_first(self, hub: Hub, tmp_path: Path, capfd,
                                                place: str) -> None:  # fmt: skip
        (tmp_path / "w" / place).mkdir(parents=True)
        assert fetch(tmp_path / "w") == 5
        assert "expected a file or nothing, found a folder" in capfd.readouterr().err
        assert not [path for path, *_ in hub.asked if "/resolve/" in path]

    def test_a_file_where_the_folder_should_be(self, hub: Hub, tmp_path: Path, capfd) -> None:
        (tmp_path / "w").write_text("mine")
        assert fetch(tmp_path / "w") == 5
        assert (tmp_path / "w").read_text() == "mine"

    def test_one_fetch_at_a_time(self, hub: Hub, tmp_path: Path, capfd) -> None:
        with only_one(tmp_path / "w" / fetching.LOCK, "a fetch"):
            assert fetch(tmp_path / "w") == 5
        assert "is under way in another process" in capfd.readouterr().err

    @pytest.mark.parametrize("record", [b"[" * 200_000, b"{}", b"\xff", b'{"files": 3}'])
    def test_a_record_that_is_none(self, tmp_path: Path, capfd, record: bytes) -> None:
        (tmp_path / "weights.json").write_bytes(record)
        assert main(["weights", "verify", str(tmp_path)]) == 4
        assert "malformed" in capfd.readouterr().err

    def test_kill_at_any_point_is_resumed(self, hub: Hub, tmp_path: Path, monkeypatch) -> None:
        """Whatever was written when it died: no wrong file has its name, and the next call ends."""
        body = FILES["model-00001.safetensors"]
        for cut in (0, 1, len(body) // 2, len(body) - 1, len(body)):
            folder = tmp_path / str(cut)
            folder.mkdir()
            (folder / "model-00001.safetensors.part").write_bytes(body[:cut])
            (folder / ".weights.lock").write_bytes(b"")
            assert fetch(folder) == 0
            assert content(folder) == FILES


def test_a_hub_that_is_out_of_reach(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound and deaf: every connection is refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert fetch(tmp_path / "weights") == 5
    said = capsys.readouterr().err
    assert "expected the model" in said
    assert "; HF_ENDPOINT names a mirror\n" in said
