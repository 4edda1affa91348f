"""`lock update` and `lock check` of images and sources: a registry double, a real repository."""

from __future__ import annotations

import os
import tarfile
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from imagebuild.lock_remote import revision_of
from tests.support.product import NOW, VERSIONS, Product
from tests.support.registry_server import RegistryServer, digest_of
from tests.support.remotes import BASE, DOCUMENT, MENTAT, Remote, put_base, revision

DAY = 24 * 3600
UPDATE, CHECK = ("lock", "update"), ("lock", "check")


@pytest.fixture
def served() -> Iterator[RegistryServer]:
    with RegistryServer() as running:
        yield running


@pytest.fixture
def remote(product: Product, served: RegistryServer) -> Remote:
    return Remote(product, served)


@pytest.fixture
def locked(remote: Remote) -> Remote:
    """Everything resolved."""
    ran = remote.product.run(*UPDATE, "image", "mentat", "flashkda")
    assert ran.code == 0, ran
    remote.served.asked.clear()
    return remote


def lock_of(remote: Remote) -> dict[str, Any]:
    return tomllib.loads(remote.product.lock_file.read_text())


def states(remote: Remote) -> dict[str, str]:
    shown = remote.product.run("lock", "show", "--format", "json").json["entries"]
    return {f"{one['base']} {one['name']}".strip(): one["state"] for one in shown}


def findings(remote: Remote, *arguments: str) -> tuple[int, dict[str, list[str]]]:
    """Exit code, and the sentences on entries that are no wheels, by level."""
    document = remote.product.run(*CHECK, *arguments, "--format", "json").json
    by_level: dict[str, list[str]] = {"error": [], "warning": [], "info": []}
    for one in document["findings"]:
        by_level[one["level"]].append(f"{one['entry']}: {one['message']}")
    assert document["problems"] == by_level["error"]
    assert document["warnings"] == by_level["warning"]
    return document["exit_code"], by_level


# lock update


def test_everything_is_resolved_where_its_host_answers(remote: Remote) -> None:
    ran = remote.product.run(*UPDATE)
    assert ran.code == 0, ran
    lock, digests = lock_of(remote), remote.digests
    for version in VERSIONS:
        image = lock["base"][version]["image"]
        assert (image["digest"], image["state"]) == (digests[version], "resolved")
        assert (image["revision"], image["seen"]) == (revision(version), "2026-11-29")
        assert set(image["platforms"]) == {"linux/amd64", "linux/arm64"}
    assert lock["base"]["0.31.0"]["image"]["source"] == DOCUMENT
    assert lock["images"]["mentat"]["digest"] == digests["mentat"]
    assert lock["sources"]["flashkda"] == {
        "url": remote.repository.url, "commit": remote.repository.first, "state": "resolved",
        "source": DOCUMENT, "seen": "2026-11-29",
    }  # fmt: skip
    assert f"image of vLLM 0.32.0: digest was unresolved, is {digests['0.32.0']}" in ran.out
    assert "image of vLLM 0.31.0: digest" not in ran.out
    assert f"+ git ls-remote -- {remote.repository.url}" in ran.err
    assert states(remote) == {
        **{f"{version} {name}": "resolved" for version in VERSIONS
           for name in ("wheels", "epoch", "image")},
        **{f"{version} {name}": "unresolved" for version in VERSIONS for name in ("sdist", "debs")},
        "mentat": "resolved", "flashkda": "resolved",
    }  # fmt: skip


def test_the_same_bytes_on_another_day(remote: Remote) -> None:
    assert remote.product.run(*UPDATE).code == 0
    before = remote.product.lock_file.read_bytes()
    remote.product.now += 40 * DAY
    ran = remote.product.run(*UPDATE, "--format", "json")
    assert (ran.code, ran.json["written"], ran.json["moved"], ran.json["kept"]) == (
        0, False, [], [])  # fmt: skip
    assert remote.product.lock_file.read_bytes() == before


def test_what_cannot_be_reached_keeps_its_state(remote: Remote) -> None:
    remote.edit(remote.served.host, "127.0.0.1:9")
    remote.repository.remove()
    ran = remote.product.run(*UPDATE)
    assert ran.code == 0, ran
    for said in ("image of vLLM 0.31.0", "image of vLLM 0.33.0", "image mentat", "source flashkda"):
        assert f"  ! {said} keeps its state: " in ran.out
    # One registry is not waited for four times.
    assert ran.out.count("it is unreachable") == 1
    assert ran.out.count("did not answer before") == 3
    found = states(remote)
    assert (found["0.31.0 image"], found["0.32.0 image"]) == ("cited", "unresolved")
    assert (found["mentat"], found["flashkda"]) == ("unresolved", "cited")


def test_what_is_resolved_stays_so_without_the_hosts(locked: Remote) -> None:
    before = locked.product.lock_file.read_bytes()
    locked.edit(locked.served.host, "127.0.0.1:9")
    locked.repository.remove()
    assert locked.product.run(*UPDATE).code == 0
    assert locked.product.lock_file.read_bytes() == before


@pytest.mark.parametrize("entry", ["image", "mentat", "flashkda"])
def test_an_entry_that_is_named_must_answer(remote: Remote, entry: str) -> None:
    before = remote.product.lock_file.read_bytes()
    remote.edit(remote.served.host, "127.0.0.1:9")
    remote.repository.remove()
    ran = remote.product.run(*UPDATE, entry)
    assert ran.code == 5
    assert "error: " in ran.err
    assert remote.product.lock_file.read_bytes() == before
    assert remote.product.server.asked == []


def test_offline_resolves_nothing_and_says_so(remote: Remote) -> None:
    assert remote.product.run(*UPDATE).code == 0  # the wheels are in the cache now
    remote.served.asked.clear()
    remote.edit("0.17.1", "0.18.0")
    ran = remote.product.run(*UPDATE, "--offline")
    assert ran.code == 0, ran
    assert "image mentat keeps its state" in ran.out
    assert "--offline is set" in ran.out
    assert remote.served.asked == []
    assert states(remote)["mentat"] == "unresolved"


def test_only_what_is_named_is_asked(remote: Remote) -> None:
    assert remote.product.run(*UPDATE, "mentat").code == 0
    assert remote.product.server.asked == []
    assert {path.split("/")[3] for path in remote.served.paths()} == {"mentat"}
    assert states(remote)["flashkda"] == "cited"
    remote.served.asked.clear()
    assert remote.product.run(*UPDATE, "image", "--base-version", "0.32").code == 0
    assert states(remote)["0.32.0 image"] == "resolved"
    assert states(remote)["0.33.0 image"] == "unresolved"
    remote.served.asked.clear()
    assert remote.product.run(*UPDATE, "wheels").code == 0
    assert remote.served.asked == []
    assert remote.product.server.asked != []


@pytest.mark.parametrize("verb", ["update", "check"])
def test_a_mistyped_entry(remote: Remote, verb: str) -> None:
    ran = remote.product.run("lock", verb, "imgae")
    assert ran.code == 2
    assert "expected an entry, found 'imgae'" in ran.err
    assert "hint: entries: wheels, image, debs, mentat, flashkda" in ran.err


def test_an_image_that_moved_is_taken_and_told(locked: Remote) -> None:
    new = put_base(locked.served, "0.32.0", created="2026-11-20T00:00:00Z")
    locked.product.now += DAY
    ran = locked.product.run(*UPDATE, "image")
    assert ran.code == 0
    old = locked.digests["0.32.0"]
    assert f"image of vLLM 0.32.0: digest was {old}, is {new}" in ran.out
    images = {version: base["image"] for version, base in lock_of(locked)["base"].items()}
    assert (images["0.32.0"]["digest"], images["0.32.0"]["seen"]) == (new, "2026-11-30")
    assert images["0.33.0"]["seen"] == "2026-11-29"


def test_an_image_of_another_commit_is_not_locked(remote: Remote) -> None:
    before = remote.product.lock_file.read_bytes()
    put_base(remote.served, "0.32.0", commit="1234567" + "0" * 33)
    ran = remote.product.run(*UPDATE)
    assert ran.code == 4
    assert "expected it to be built from commit bbbbbbb32" in ran.err
    assert "found 1234567" in ran.err
    assert remote.product.lock_file.read_bytes() == before


def test_an_image_without_one_of_the_platforms(remote: Remote) -> None:
    remote.served.put_image(MENTAT, "linux/amd64", tag="0.17.1")
    ran = remote.product.run(*UPDATE, "mentat")
    assert ran.code == 2
    assert "image team/mentat:0.17.1: expected images for linux/arm64, found linux/amd64" in ran.err


def test_a_registry_that_changes_bytes(remote: Remote) -> None:
    before = remote.product.lock_file.read_bytes()
    remote.served.faults.spoil = True
    ran = remote.product.run(*UPDATE)  # not even unnamed: this is no matter of the network
    assert ran.code == 4
    assert "expected sha256:" in ran.err
    assert remote.product.lock_file.read_bytes() == before


def test_a_registry_that_wants_a_login(remote: Remote) -> None:
    remote.served.faults.tokens, remote.served.faults.login = True, ("me", "secret")
    ran = remote.product.run(*UPDATE, "mentat")
    assert ran.code == 5
    assert "hint: docker login hub.example" in ran.err
    folder = remote.product.folder / "docker"
    folder.mkdir()
    (folder / "config.json").write_text('{"credHelpers": {"hub.example": "test"}}')
    helper = folder / "docker-credential-test"
    helper.write_text('#!/bin/sh\necho \'{"Username": "me", "Secret": "secret"}\'\n')
    helper.chmod(0o755)
    remote.product.extra |= {"DOCKER_CONFIG": str(folder), "PATH": f"{folder}:{os.environ['PATH']}"}
    ran = remote.product.run(*UPDATE, "mentat")
    assert ran.code == 0, ran
    assert "+ docker-credential-test get" in ran.err
    assert "secret" not in ran.out + ran.err


def test_a_commit_that_is_nowhere(remote: Remote) -> None:
    remote.edit(remote.repository.first, "1" * 40)
    ran = remote.product.run(*UPDATE)
    assert ran.code == 4
    assert f"expected commit {'1' * 40}, found that the repository has no such commit" in ran.err


def test_a_commit_that_no_ref_names(remote: Remote) -> None:
    repository = remote.repository
    middle = repository.commit("third")
    repository.commit("fourth")
    remote.edit(repository.first, middle)
    ran = remote.product.run(*UPDATE, "flashkda")
    assert ran.code == 0, ran
    assert states(remote)["flashkda"] == "resolved"
    assert (
        f" fetch --quiet --depth=1 --filter=tree:0 --no-tags -- {repository.url} {middle}"
        in ran.err
    )
    # A tip needs no more than a look at the refs, and an annotated tag counts by its commit.
    for tip in (repository.git("rev-parse", "main"), repository.first):
        remote.edit(middle, tip)
        middle = tip
        assert " fetch " not in remote.product.run(*UPDATE, "flashkda").err


def test_a_value_holds_only_for_what_the_recipe_means(locked: Remote) -> None:
    locked.edit("0.17.1", "0.18.0")
    locked.edit(locked.repository.first, locked.repository.second)
    locked.edit(locked.served.host, "127.0.0.1:9")
    locked.repository.remove()
    found = states(locked)
    assert (found["mentat"], found["flashkda"]) == ("unresolved", "unresolved")
    assert locked.product.run(*UPDATE).code == 0
    found = states(locked)
    assert (found["mentat"], found["flashkda"]) == ("unresolved", "cited")


def test_an_entry_that_the_recipe_no_longer_names_goes(locked: Remote) -> None:
    text = locked.recipe.read_text()
    start, end = text.index("[image.artifacts"), text.index("[image.cited")
    locked.recipe.write_text(text[:start] + text[end:])
    assert locked.product.run(*UPDATE, "flashkda").code == 0
    assert "images" not in lock_of(locked)


def test_the_sdist_is_locked_by_its_hash(remote: Remote) -> None:
    sdist = remote.product.wheels / "vllm-0.32.0.tar.gz"
    with tarfile.open(sdist, "w:gz"):
        pass
    assert remote.product.run(*UPDATE, "wheels").code == 0
    assert lock_of(remote)["base"]["0.32.0"]["sdist"] == {
        "filename": sdist.name, "sha256": digest_of(sdist.read_bytes())[7:],
        "size": sdist.stat().st_size,
    }  # fmt: skip
    assert states(remote)["0.32.0 sdist"] == "resolved"
    assert states(remote)["0.31.0 sdist"] == "unresolved"
    remote.product.server.faults.yanked[sdist.name] = "too large"
    code, found = findings(remote, "wheels")
    assert (code, found["warning"]) == (1, [f"{sdist.name}: upstream withdrew it: too large"])
    sdist.unlink()
    code, found = findings(remote, "wheels")
    assert (code, found["error"]) == (4, [f"{sdist.name}: the index no longer offers it"])


def test_a_cite_that_is_malformed(remote: Remote) -> None:
    remote.edit(remote.digests["0.31.0"], "sha256:00")
    ran = remote.product.run(*UPDATE, "image")
    assert ran.code == 2
    assert "image.cited.0.31.0 is malformed: image: expected sha256:<64 hex digits>" in ran.err


# lock check


def test_all_is_there_as_locked(locked: Remote) -> None:
    code, found = findings(locked)
    assert (code, found["error"], found["warning"]) == (0, [], [])
    assert found["info"] == [
        *(f"vLLM {version}, image: resolved, as the registry has it, 54 days old"
          for version in VERSIONS),
        "mentat: resolved, as the registry has it, 54 days old",
        f"flashkda: resolved, {locked.repository.first[:12]} is there",
    ]  # fmt: skip
    ran = locked.product.run(*CHECK)
    assert ran.out.endswith("lock.toml: as locked\n")


@pytest.fixture
def cited(remote: Remote) -> Remote:
    """The lock as it is where no registry answers; the registry answers again."""
    host = remote.served.host
    remote.edit(host, "127.0.0.1:9")
    assert remote.product.run(*UPDATE).code == 0
    remote.edit("127.0.0.1:9", host)
    return remote


def test_a_cited_digest_that_the_registry_agrees_with(cited: Remote) -> None:
    code, found = findings(cited, "image", "mentat")
    assert code == 0
    assert found["info"] == [
        f"vLLM 0.31.0, image: cited ({DOCUMENT}), as the registry has it, 54 days old; "
        "build.py lock update image records that",
        *(f"vLLM {version}, image: unresolved; team/vllm:v{version} is {cited.digests[version]}"
          for version in VERSIONS[1:]),
        f"mentat: unresolved; team/mentat:0.17.1 is {cited.digests['mentat']}",
    ]  # fmt: skip


def test_without_the_hosts_it_is_said_what_is_not_verified(cited: Remote) -> None:
    cited.edit(cited.served.host, "127.0.0.1:9")
    cited.repository.remove()
    code, found = findings(cited)
    assert (code, found["error"], found["warning"]) == (0, [], [])
    assert found["info"][0].startswith(
        f"vLLM 0.31.0, image: cited ({DOCUMENT}), not verified: 127.0.0.1:9: expected the "
        "manifest of team/vllm:v0.31.0, found that it is unreachable"
    )
    assert found["info"][-1].startswith("flashkda: resolved, not verified: ")
    assert "as locked; not verified: 5 entries" in cited.product.run(*CHECK).out
    for entry in ("image", "mentat", "flashkda"):
        assert cited.product.run(*CHECK, entry).code == 5


def test_a_tag_that_moved(locked: Remote) -> None:
    new = put_base(locked.served, "0.31.0", created="2026-11-20T00:00:00Z")
    code, found = findings(locked)
    assert code == 1
    assert found["warning"] == [
        f"vLLM 0.31.0, image: tag v0.31.0 moved: locked is {locked.digests['0.31.0']}, it is now "
        f"{new}; build.py lock update image takes it"
    ]


def test_a_tag_that_is_gone_while_its_digest_is_not(locked: Remote) -> None:
    locked.hide(MENTAT)
    code, found = findings(locked)
    assert (code, found["warning"]) == (1, ["mentat: tag 0.17.1 is gone; the digest is still "
                                            "there, so mirror it while it is"])  # fmt: skip


def test_a_digest_that_is_gone(locked: Remote) -> None:
    digest = locked.digests["0.31.0"]
    locked.hide(BASE, digest)
    code, found = findings(locked)
    assert code == 4
    assert found["error"] == [
        f"vLLM 0.31.0, image: team/vllm:v0.31.0@{digest}: the registry no longer has it; nobody "
        "can build on it who has no copy"
    ]


def test_a_cited_platform_that_is_another_image(cited: Remote) -> None:
    wrong = "sha256:" + "0" * 64
    right = lock_of(cited)["base"]["0.31.0"]["image"]["platforms"]["linux/arm64"]
    cited.edit(right, wrong)
    text = cited.product.lock_file.read_text()
    cited.product.lock_file.write_text(text.replace(right, wrong))
    code, found = findings(cited)
    assert code == 4
    assert found["error"] == [f"vLLM 0.31.0, image: linux/arm64: expected {wrong}, found {right}"]


def test_a_cited_image_of_another_commit_than_the_wheel(cited: Remote) -> None:
    text = cited.product.lock_file.read_text()
    cited.product.lock_file.write_text(text.replace('"aaaaaaa31"', '"eeeeeee31"'))
    code, found = findings(cited, "image")
    assert code == 4
    assert found["error"] == [
        "vLLM 0.31.0, image: expected an image of commit eeeeeee31, as the wheel, "
        f"found {revision('0.31.0')}"
    ]


def test_an_image_that_does_not_say_its_commit(locked: Remote) -> None:
    put_base(locked.served, "0.31.0", commit="")
    assert locked.product.run(*UPDATE, "image").code == 0
    code, found = findings(locked)
    assert code == 0
    assert "vLLM 0.31.0, image: the image does not say from which commit it is" in found["info"]


def test_a_recipe_that_wants_something_else_than_is_locked(locked: Remote) -> None:
    locked.edit("0.17.1", "0.18.0")
    locked.edit(locked.repository.first, locked.repository.second)
    code, found = findings(locked)
    assert code == 4
    assert len(found["error"]) == 2
    assert found["error"][0].startswith("mentat: recipe.toml wants team/mentat:0.18.0, locked is")
    assert locked.repository.second in found["error"][1]
    assert locked.product.run(*UPDATE, "flashkda").code == 0
    assert findings(locked, "flashkda")[0] == 0


def test_a_recipe_that_names_what_nobody_locked(remote: Remote) -> None:
    code, found = findings(remote)
    assert code == 4
    assert (
        "mentat: recipe.toml wants team/mentat:0.17.1, locked is none; build.py lock update"
        in (found["error"])
    )
    assert len(found["error"]) == 3 + 1 + 1


NIGHTLY = "nightly-bbbbbbb320000000000000000000000000000000"


@pytest.mark.parametrize(
    ("tag", "created", "said"),
    [
        (NIGHTLY, "2026-09-26T00:00:00Z",
         "is a nightly, of which only the newest are kept; vLLM 0.32.0 is built from that very "
         "commit"),
        ("nightly-ddd6fbc", "2026-09-26T00:00:00Z",
         "is a nightly, of which only the newest are kept; vLLM 0.31.0 is the first locked release "
         "published after it; that it contains the commit is for git to say"),
        ("cu130-nightly", "2027-01-01T00:00:00Z",
         "is a nightly, of which only the newest are kept"),
        ("glm53-flash-arm64-cu130", "2027-01-01T00:00:00Z",
         "names no release, and such tags are rebuilt in place"),
        ("latest", "odd", "moves with every build"),
    ],
)  # fmt: skip
def test_a_tag_on_which_nobody_can_rely(remote: Remote, tag: str, created: str, said: str) -> None:
    put_base(remote.served, "0.33.0", commit="", tag=tag, created=created)
    remote.edit('tag = "v{version}"', f'tag = "{tag}"')
    assert remote.product.run(*UPDATE, "image", "--base-version", "0.33.0").code == 0
    code, found = findings(remote, "image")
    assert code == 1
    assert f"vLLM 0.33.0, image: tag {tag} {said}" in found["warning"]


def test_a_base_of_half_a_year_ago(locked: Remote) -> None:
    locked.product.now = NOW + 124 * DAY
    assert findings(locked)[0] == 0
    locked.product.now += 3 * DAY
    code, found = findings(locked)
    assert (code, found["warning"]) == (
        1, ["vLLM 0.31.0: 181 days old; build.py audit says what a newer one means"])  # fmt: skip


def test_a_ref_that_moved_or_went(locked: Remote) -> None:
    first, repository = locked.repository.first, locked.repository
    locked.edit(f'commit = "{first}"', f'commit = "{first}"\nref = "v1"')
    assert findings(locked, "flashkda")[0] == 0
    repository.git("tag", "--force", "v1", repository.second)
    code, found = findings(locked, "flashkda")
    assert (code, found["warning"]) == (
        1, [f"flashkda: v1 moved: locked is {first}, it is now {repository.second}"])  # fmt: skip
    repository.git("tag", "--delete", "v1")
    code, found = findings(locked, "flashkda")
    assert (code, found["warning"]) == (1, ["flashkda: v1 is gone; the commit is still there"])


def test_a_source_whose_commit_was_thrown_away(locked: Remote) -> None:
    repository = locked.repository
    repository.git("checkout", "--quiet", "--orphan", "new")
    new = repository.commit("new history")
    repository.git("update-ref", "refs/heads/main", new)
    repository.git("tag", "--delete", "v1")
    repository.git("reflog", "expire", "--expire=now", "--all")
    repository.git("gc", "--quiet", "--prune=now")
    code, found = findings(locked, "flashkda")
    assert code == 4
    assert "found that the repository has no such commit" in found["error"][0]


# What a configuration says of its commit

COMMIT = "db9527a46873454610df6dbedf79a36d6bf1a7f6"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"config": {"Env": [f"VLLM_BUILD_COMMIT={COMMIT}"],
                     "Labels": {"org.opencontainers.image.revision": "1" * 40}}}, COMMIT),
        ({"config": {"Env": ["VLLM_BUILD_COMMIT=unknown"],
                     "Labels": {"org.opencontainers.image.revision": COMMIT.upper()}}}, COMMIT),
        ({"config": {"Env": ["VLLM_BUILD_COMMIT=", "ODD"], "Labels": None}}, ""),
        ({"config": {"Labels": {"org.opencontainers.image.revision": "abc"}}}, ""),
        ({"config": None}, ""),
        ({}, ""),
    ],
)  # fmt: skip
def test_the_commit_of_an_image(config: dict[str, Any], expected: str) -> None:
    assert revision_of(config) == expected
