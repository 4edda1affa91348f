"""The read side of a registry against a double that fails in every way a registry can."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from imagebuild.config import DefaultRegistry
from imagebuild.errors import EngineError, IntegrityError, UsageError
from imagebuild.sources import registry as module
from imagebuild.sources.cache import Cache
from imagebuild.sources.dockerauth import Logins
from imagebuild.sources.http import Http, TransferError, UnreachableError
from imagebuild.sources.imageref import Reference, parse_reference
from imagebuild.sources.manifests import Descriptor
from imagebuild.sources.pipconf import PipSettings
from imagebuild.sources.registry import NotFoundError, Registry
from tests.support.registry_server import (
    DOCKER_LIST,
    DOCKER_MANIFEST,
    INDEX,
    MANIFEST,
    RegistryServer,
    attestation,
    digest_of,
)

NAME = "team/app"
LARGE = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture
def served() -> Iterator[RegistryServer]:
    with RegistryServer() as running:
        yield running


@pytest.fixture
def docker_config(tmp_path: Path) -> Path:
    return tmp_path / "docker.json"


@pytest.fixture
def registry(docker_config: Path) -> Iterator[Registry]:
    with Http(PipSettings("", retries=3, timeout=30), backoff=0) as http:
        yield Registry(http, Logins(lambda _command: None, docker_config))


@pytest.fixture
def where(served: RegistryServer) -> Reference:
    return parse_reference(f"{served.host}/{NAME}:1.0")


def descriptor(stored: dict[str, Any]) -> Descriptor:
    return Descriptor(stored["mediaType"], stored["digest"], stored["size"])


@pytest.fixture
def large(served: RegistryServer) -> Descriptor:
    served.put_image(NAME, tag="1.0")
    return descriptor(served.put_blob(NAME, LARGE))


@pytest.mark.parametrize(
    ("index", "child"), [(INDEX, MANIFEST), (DOCKER_LIST, DOCKER_MANIFEST)], ids=["oci", "docker"]
)
def test_an_index_gives_the_image_of_each_platform(
    served: RegistryServer, registry: Registry, where: Reference, index: str, child: str
) -> None:
    images = {one: served.put_image(NAME, one, layer=one.encode(), media_type=child)
              for one in ("linux/amd64", "linux/arm64")}  # fmt: skip
    notes = [attestation(served, NAME, one["digest"]) for one in images.values()]
    listed = [notes[0], *images.values(), notes[1]]
    digest = served.put(NAME, {"manifests": listed}, index, "1.0")["digest"]
    top = registry.manifest(where)
    assert (top.digest, top.is_index, top.media_type) == (digest, True, index)
    assert {name: one.digest for name, one in registry.platforms(top).items()} == {
        name: one["digest"] for name, one in images.items()
    }
    image = registry.image(top, "linux/arm64")
    assert image.digest == images["linux/arm64"]["digest"]
    assert registry.config(image)["architecture"] == "arm64"
    (layer,) = image.layers
    assert b"".join(registry.blob(image.where, layer)) == b"linux/arm64"
    assert registry.manifest(image.where).digest == image.digest


def test_an_image_without_an_index_has_the_platform_of_its_config(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.put_image(NAME, "linux/arm64", tag="1.0")
    top = registry.manifest(where)
    assert registry.image(top, "linux/arm64") is top
    with pytest.raises(UsageError, match="expected an image for linux/amd64, found linux/arm64"):
        registry.image(top, "linux/amd64")


@pytest.mark.parametrize("annotated", [True, False])
def test_an_attestation_is_known_by_either_sign(
    served: RegistryServer, registry: Registry, where: Reference, annotated: bool
) -> None:
    image = served.put_image(NAME)
    note = attestation(served, NAME, image["digest"])
    if annotated:
        note["platform"] = {"os": "linux", "architecture": "arm64"}
    else:
        del note["annotations"]
    served.put(NAME, {"manifests": [note, image]}, INDEX, "1.0")
    assert list(registry.platforms(registry.manifest(where))) == ["linux/amd64"]


def test_the_plain_variant_is_taken_and_else_the_first(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    def image(name: str, **place: str) -> dict[str, Any]:
        return {**served.put_image(NAME, layer=name.encode()),
                "platform": {"os": "linux", **place}}  # fmt: skip

    v3 = image("v3", architecture="amd64", variant="v3")
    plain = image("plain", architecture="amd64")
    v8 = image("v8", architecture="arm64", variant="v8")
    v9 = image("v9", architecture="arm64", variant="v9")
    served.put(NAME, {"manifests": [v3, plain, v8, v9]}, INDEX, "1.0")
    found = registry.platforms(registry.manifest(where))
    assert {name: one.digest for name, one in found.items()} == {
        "linux/amd64": plain["digest"], "linux/arm64": v8["digest"],
    }  # fmt: skip


def nested(served: RegistryServer, depth: int) -> str:
    """A tag whose image is `depth` indexes down; gives the image's digest."""
    image = served.put_image(NAME)
    inner = image
    for level in range(depth):
        tag = "1.0" if level == depth - 1 else None
        inner = served.put(NAME, {"manifests": [inner]}, INDEX, tag)
    return str(image["digest"])


def test_indexes_may_be_nested_but_not_without_end(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    digest = nested(served, module.DEPTH)
    assert registry.platforms(registry.manifest(where))["linux/amd64"].digest == digest
    nested(served, module.DEPTH + 1)
    with pytest.raises(EngineError, match="at most 3 indexes inside one another, found more"):
        registry.platforms(registry.manifest(where))


def test_an_index_of_too_many_images(
    served: RegistryServer, registry: Registry, where: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHILDREN", 3)
    image = served.put_image(NAME)
    served.put(NAME, {"manifests": [image] * 4}, INDEX, "1.0")
    with pytest.raises(EngineError, match="at most 3 images, found more"):
        registry.platforms(registry.manifest(where))


def test_a_tag_without_a_digest_in_the_answer_is_hashed(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    digest = served.put_index(NAME, "1.0")
    served.faults.digest_header = ""
    assert registry.manifest(where).digest == digest


def test_changed_bytes_of_a_manifest(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    digest = served.put_index(NAME, "1.0")
    top = registry.manifest(where)
    served.faults.spoil = True
    for one in (where, where.at(digest), top.where.at(top.children[0].digest)):
        with pytest.raises(IntegrityError, match=r"expected sha256:\w+, found sha256:"):
            registry.manifest(one)
    served.faults.digest_header = ""
    with pytest.raises(IntegrityError):  # of a digest the answer's own word is not needed
        registry.manifest(where.at(digest))


def test_a_header_that_lies(served: RegistryServer, registry: Registry, where: Reference) -> None:
    served.put_index(NAME, "1.0")
    served.faults.digest_header = digest_of(b"another")
    with pytest.raises(IntegrityError):
        registry.manifest(where)
    served.faults.digest_header = "md5:00"
    with pytest.raises(EngineError, match="expected a digest, found 'md5:00'"):
        registry.manifest(where)


def test_a_child_of_another_size(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    image = served.put_image(NAME)
    inner = served.put(NAME, {"manifests": [image]}, INDEX)
    served.put(NAME, {"manifests": [{**inner, "size": inner["size"] + 1}]}, INDEX, "1.0")
    with pytest.raises(IntegrityError, match=r"expected \d+ bytes, found \d+"):
        registry.platforms(registry.manifest(where))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"schemaVersion": 1, "fsLayers": []}, "an image or an index of schema 2"),
        ({}, "an image or an index of schema 2"),
        ({"manifests": [], "layers": []}, "an image or an index of schema 2"),
        ({"manifests": 3}, "manifests: expected a list, found 3"),
        ({"manifests": ["x"]}, "expected a descriptor with digest and size"),
        ({"manifests": [{"digest": "sha256:00", "size": 1}]}, "expected a descriptor"),
        ({"manifests": [{"digest": digest_of(b""), "size": -1}]}, "expected a descriptor"),
        ({"manifests": [{"digest": digest_of(b""), "size": 1, "platform": 3}]}, "a descriptor"),
        ({"layers": []}, "expected a descriptor"),
    ],
)
def test_what_is_no_manifest(
    served: RegistryServer, registry: Registry, where: Reference, content: dict[str, Any], said: str
) -> None:
    served.put(NAME, content, INDEX if "manifests" in content else MANIFEST, "1.0")
    with pytest.raises(EngineError, match=said) as caught:
        registry.platforms(registry.manifest(where))
    assert "\n" not in str(caught.value)


def test_an_answer_that_is_no_json(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    body = b"<html>log in to the network first</html>"
    served.put_index(NAME, "1.0")
    stored = served.repositories[NAME]
    stored.manifests[stored.tags["1.0"]] = (INDEX, body)
    served.faults.digest_header = ""
    with pytest.raises(EngineError, match="expected JSON, found 40 bytes that are none"):
        registry.manifest(where)


def test_a_manifest_without_end(
    served: RegistryServer, registry: Registry, where: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MANIFEST_LIMIT", 100)
    served.put_index(NAME, "1.0")
    with pytest.raises(EngineError, match="expected at most 100 bytes, found more"):
        registry.manifest(where)


def test_a_config_without_end(
    served: RegistryServer, registry: Registry, where: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONFIG_LIMIT", 100)
    served.put_image(NAME, tag="1.0", history=["x" * 200])
    with pytest.raises(EngineError, match="at most 100 bytes"):
        registry.config(registry.manifest(where))
    assert not any("/blobs/" in path for path in served.paths())


# Who asks


def log_in(path: Path, name: str, user: str = "me", password: str = "secret:1") -> None:
    packed = base64.b64encode(f"{user}:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {name: {"auth": packed}}}))


def test_an_anonymous_token_is_asked_for_once(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.tokens = True
    registry.image(registry.manifest(where), "linux/amd64")
    tokens = [one for one in served.asked if one.path.startswith("/token")]
    assert [one.authorization for one in tokens] == [""]
    assert "scope=repository%3Ateam%2Fapp%3Apull" in tokens[0].path
    assert "service=test+service" in tokens[0].path
    assert [one.status for one in served.asked].count(401) == 1


def test_the_login_goes_to_the_token_service_alone(
    served: RegistryServer, registry: Registry, where: Reference, docker_config: Path
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.tokens, served.faults.login = True, ("me", "secret:1")
    log_in(docker_config, served.host)
    assert registry.manifest(where).is_index
    kinds = [(one.path.startswith("/token"), one.authorization[:6]) for one in served.asked]
    assert kinds == [(False, ""), (True, "Basic "), (False, "Bearer")]


def test_a_wrong_password_is_one_sentence(
    served: RegistryServer, registry: Registry, where: Reference, docker_config: Path
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.tokens, served.faults.login = True, ("me", "right")
    log_in(docker_config, served.host)
    with pytest.raises(EngineError, match="found that user me is refused") as caught:
        registry.manifest(where)
    assert caught.value.hint == f"docker login {served.host}"
    assert "secret" not in str(caught.value)


def test_a_token_that_ran_out_is_renewed(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.tokens, served.faults.uses = True, 1
    for _time in range(3):
        assert registry.manifest(where).is_index
    assert len([one for one in served.asked if one.path.startswith("/token")]) == 3


def test_a_token_that_is_not_taken_is_no_endless_loop(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.tokens, served.faults.uses = True, 0
    with pytest.raises(EngineError, match=r"denied \(who are you\)"):
        registry.manifest(where)
    assert len(served.asked) == 3


def test_user_and_password_where_the_registry_wants_them(
    served: RegistryServer, registry: Registry, where: Reference, docker_config: Path
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.basic, served.faults.login = True, ("me", "secret:1")
    with pytest.raises(EngineError, match="denied") as caught:
        registry.manifest(where)
    assert f"docker login {served.host}" in str(caught.value.hint)
    log_in(docker_config, f"http://{served.host}")
    with Http(PipSettings("", retries=0), backoff=0) as http:
        again = Registry(http, Logins(lambda _command: None, docker_config))
        assert again.manifest(where).is_index


def test_a_netrc_stays_out_of_it(
    served: RegistryServer, registry: Registry, where: Reference, tmp_path: Path
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.tokens = True
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login other password other\n")
    assert registry.manifest(where).is_index
    assert not any(one.authorization.startswith("Basic") for one in served.asked)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "expected a token to read team/app in JSON, found 6 bytes that are none"),
        (b"[]", "in JSON, found 2 bytes"),
        (b"{}", "in JSON, found 2 bytes"),
        (b'{"token": 3}', "in JSON"),
        (b'{"token": "a\\r\\nHost: evil"}', "in JSON"),
        (b'{"token": "a", "expires_in": "soon"}', "in JSON"),
    ],
)
def test_a_token_service_that_sends_something_else(
    served: RegistryServer, registry: Registry, where: Reference, body: bytes, said: str
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.tokens, served.faults.odd_token = True, body
    with pytest.raises(EngineError, match=said):
        registry.manifest(where)


def test_an_access_token_is_a_token(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.tokens, served.faults.odd_token = True, b'{"access_token": "own"}'
    served.given["own"] = 1
    assert registry.manifest(where).is_index


def test_an_anonymous_user_that_gets_no_token(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.faults.tokens = served.faults.refuse_tokens = True
    with pytest.raises(EngineError, match="found that an anonymous user is refused"):
        registry.manifest(where)


# What the registry does not have, or does not give


@pytest.mark.parametrize("name", ["team/app:2.0", "team/none:1.0", f"team/app@sha256:{'0' * 64}"])
def test_what_is_not_there(served: RegistryServer, registry: Registry, name: str) -> None:
    served.put_index(NAME, "1.0")
    with pytest.raises(NotFoundError, match=r"found that there is none \(") as caught:
        registry.manifest(parse_reference(f"{served.host}/{name}"))
    assert caught.value.exit_code == 5


def test_denied(served: RegistryServer, registry: Registry, where: Reference) -> None:
    served.faults.denied = True
    with pytest.raises(EngineError, match=r"found that it is denied \(not for you\)") as caught:
        registry.manifest(where)
    assert "a repository that is not there is denied as well" in str(caught.value.hint)


def test_an_overloaded_registry_is_asked_again_and_then_told(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.put_index(NAME, "1.0")
    served.faults.busy = 2
    assert registry.manifest(where).is_index
    served.faults.busy = 100
    with pytest.raises(EngineError, match=r"asked too often \(slow down\)") as caught:
        registry.manifest(where)
    assert caught.value.hint == f"wait, or docker login {served.host}"
    assert len(served.asked) == 3 + 4  # four tries: the first one and pip's three retries


def test_nobody_answers(registry: Registry) -> None:
    with RegistryServer() as gone:
        host = gone.host
    with pytest.raises(UnreachableError, match="it is unreachable"):
        registry.manifest(parse_reference(f"{host}/{NAME}:1"))


def test_offline_asks_nobody(served: RegistryServer, where: Reference, docker_config: Path) -> None:
    with Http(PipSettings(""), offline=True) as http:
        registry = Registry(http, Logins(lambda _command: None, docker_config))
        with pytest.raises(EngineError, match="--offline is set"):
            registry.manifest(where)
    assert served.asked == []


# Where an image is asked for


def test_a_name_without_a_host_goes_to_the_recipes_registry(
    served: RegistryServer, docker_config: Path
) -> None:
    served.put_index("library/debian", "13")
    served.put_index(NAME, "1.0")
    log_in(docker_config, "the login's own name")
    served.faults.tokens, served.faults.login = True, ("me", "secret:1")
    default = DefaultRegistry("hub.example", f"http://{served.host}", "the login's own name")
    with Http(PipSettings("", retries=0), backoff=0) as http:
        registry = Registry(http, Logins(lambda _command: None, docker_config), default)
        for name in ("debian:13", "team/app:1.0", "hub.example/team/app:1.0"):
            assert registry.manifest(parse_reference(name)).is_index


def test_a_name_without_a_host_and_no_default(registry: Registry) -> None:
    with pytest.raises(UsageError, match="image debian:13: expected a host in its name"):
        registry.manifest(parse_reference("debian:13"))


# Tags


def test_tags_come_page_by_page(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    for number in range(7):
        served.put_image(NAME, tag=f"v{number}")
    served.faults.page = 3
    assert registry.tags(where) == [f"v{number}" for number in range(7)]
    assert len(served.asked) == 3


def test_a_repository_without_tags(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.put_image(NAME)
    assert registry.tags(where) == []


def test_the_next_page_is_not_sought_elsewhere(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    for number in range(3):
        served.put_image(NAME, tag=f"v{number}")
    served.faults.page = 1
    served.faults.next_page = "https://127.0.0.1:9/v2/team/app/tags/list"
    with pytest.raises(EngineError, match=r"expected the next page on .*, found 127\.0\.0\.1:9"):
        registry.tags(where)


def test_pages_without_end(
    served: RegistryServer, registry: Registry, where: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGES", 4)
    for number in range(3):
        served.put_image(NAME, tag=f"v{number}")
    served.faults.page, served.faults.next_page = 1, f"/v2/{NAME}/tags/list"
    with pytest.raises(EngineError, match="expected at most 4 pages"):
        registry.tags(where)


# Blobs

Read = Callable[[], bytes]


@pytest.fixture
def read(registry: Registry, where: Reference, large: Descriptor) -> Read:
    return lambda: b"".join(registry.blob(where, large))


def test_a_blob_in_one_go(served: RegistryServer, read: Read) -> None:
    assert read() == LARGE
    assert [one.range for one in served.asked] == [""]


def test_a_blob_that_breaks_off_is_continued(served: RegistryServer, read: Read) -> None:
    served.faults.drop_after = [300_000, 200_000]
    assert read() == LARGE
    assert [one.range for one in served.asked] == ["", "bytes=300000-", "bytes=500000-"]


def test_a_server_without_ranges_sends_it_all_again(served: RegistryServer, read: Read) -> None:
    served.faults.ranges = False
    served.faults.drop_after = [300_000]
    assert read() == LARGE
    assert [one.status for one in served.asked] == [200, 200]


def test_a_blob_that_never_gets_further(served: RegistryServer, read: Read) -> None:
    served.faults.drop_after = [300_000] + [0] * 50
    with pytest.raises(TransferError, match="broke off"):
        read()
    assert len(served.asked) < 10


def test_a_blob_elsewhere_is_asked_for_without_our_token(
    served: RegistryServer, read: Read
) -> None:
    served.faults.tokens = True
    with RegistryServer() as store:
        store.put_blob(NAME, LARGE)
        served.faults.moved = f"http://{store.host}"
        store.faults.drop_after = [300_000]
        assert read() == LARGE
        assert [one.range for one in store.asked] == ["", "bytes=300000-"]
        assert {one.authorization for one in store.asked} == {""}
    assert served.asked[-1].authorization.startswith("Bearer ")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"flip": 700_000}, "expected other bytes, found sha256:"),
        ({"cut": 1}, "expected 1048576 bytes, found 1048575"),
        ({"grow": 1}, "expected 1048576 bytes, found more"),
    ],
)
def test_a_blob_of_other_bytes(
    served: RegistryServer, read: Read, fault: dict[str, int], said: str
) -> None:
    served.faults = replace(served.faults, **fault)
    with pytest.raises(IntegrityError, match=said):
        read()


def test_a_blob_by_sha512(served: RegistryServer, registry: Registry, where: Reference) -> None:
    served.put_image(NAME, tag="1.0")
    digest = "sha512:" + hashlib.sha512(b"data").hexdigest()
    served.repositories[NAME].blobs[digest] = b"data"
    assert b"".join(registry.blob(where, Descriptor("", digest, 4))) == b"data"
    served.faults.flip = 0
    with pytest.raises(IntegrityError, match="found sha512:"):
        list(registry.blob(where, Descriptor("", digest, 4)))


def test_a_config_of_other_bytes(
    served: RegistryServer, registry: Registry, where: Reference
) -> None:
    served.put_image(NAME, tag="1.0")
    image = registry.manifest(where)
    served.faults.flip = 0
    with pytest.raises(IntegrityError):
        registry.config(image)


def test_a_blob_in_the_cache_is_not_asked_for(
    served: RegistryServer, registry: Registry, where: Reference, large: Descriptor, cache: Cache
) -> None:
    told: list[int] = []
    path = registry.fetch(where, large, cache, lambda _name, done, _total: told.append(done))
    assert path.read_bytes() == LARGE
    assert told[-1] == len(LARGE)
    asked = len(served.asked)
    assert registry.fetch(where, large, cache) == path
    assert len(served.asked) == asked


def test_a_later_run_continues_in_the_cache(
    served: RegistryServer, registry: Registry, where: Reference, large: Descriptor, cache: Cache
) -> None:
    served.faults.drop_after = [400_000] + [0] * 50
    with pytest.raises(TransferError):
        registry.fetch(where, large, cache)
    served.faults.drop_after, served.asked = [], []
    assert registry.fetch(where, large, cache).read_bytes() == LARGE
    assert [one.range for one in served.asked] == ["bytes=400000-"]


@pytest.mark.parametrize("left", [b"x" * 400_000, b"x" * (len(LARGE) + 1)], ids=["wrong", "long"])
def test_what_is_left_over_may_be_wrong(
    registry: Registry, where: Reference, large: Descriptor, cache: Cache, left: bytes
) -> None:
    with cache.partial(large.digest.removeprefix("sha256:")) as part:
        part.write(left)
    assert registry.fetch(where, large, cache).read_bytes() == LARGE


def test_a_wrong_blob_leaves_nothing_in_the_cache(
    served: RegistryServer, registry: Registry, where: Reference, large: Descriptor, cache: Cache
) -> None:
    served.faults.flip = 5
    with pytest.raises(IntegrityError):
        registry.fetch(where, large, cache)
    assert [path for path in cache.root.rglob("*") if path.is_file()] == []
