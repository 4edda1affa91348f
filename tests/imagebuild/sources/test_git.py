"""git as it is asked: a real repository, and a git that is absent, slow, or of another mind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from imagebuild.errors import EngineError
from imagebuild.sources import git as module
from imagebuild.sources.git import Git, NoCommitError
from imagebuild.sources.http import UnreachableError
from tests.support.remotes import Repository


class Echo(list[str]):
    def __call__(self, command: Sequence[str]) -> None:
        self.append(" ".join(command))


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "git").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_refs_and_commits_that_an_annotated_tag_names(repository: Repository, echo: Echo) -> None:
    assert Git(echo).refs(repository.url) == {
        "HEAD": repository.second,
        "refs/heads/main": repository.second,
        "refs/tags/v1": repository.first,
    }
    assert echo == [f"git ls-remote -- {repository.url}"]


def test_a_commit_that_is_there_and_one_that_is_not(
    repository: Repository, echo: Echo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    git = Git(echo)
    git.require_commit(repository.url, repository.first)
    with pytest.raises(NoCommitError, match="not our ref"):
        git.require_commit(repository.url, "1" * 40)
    assert list(folder.iterdir()) == []


def test_a_repository_that_is_not_there(tmp_path: Path, echo: Echo) -> None:
    with pytest.raises(UnreachableError) as caught:
        Git(echo).refs((tmp_path / "none").as_uri())
    assert "does not appear to be a git repository" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_offline(repository: Repository, echo: Echo) -> None:
    git = Git(echo, offline=True)
    with pytest.raises(EngineError, match=r"git\.example: expected to ask it, found that"):
        git.refs("https://git.example/a.git")
    assert echo == []
    assert git.refs(repository.url)


def test_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnreachableError, match="git: expected it on PATH, found none"):
        Git(echo).refs("https://git.example/a.git")


def test_a_host_that_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, echo: Echo
) -> None:
    fake(tmp_path, monkeypatch, "exec sleep 20")
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    with pytest.raises(UnreachableError, match=r"an answer within 0\.2 s"):
        Git(echo).refs("https://git.example/a.git")


def test_a_password_in_an_address_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, echo: Echo
) -> None:
    fake(tmp_path, monkeypatch, "echo \"fatal: unable to access '$3': no route\" >&2; exit 128")
    with pytest.raises(UnreachableError, match="no route") as caught:
        Git(echo).refs("https://me:s3cret@git.example/a.git")
    assert "expected git.example to answer" in str(caught.value)
    assert "s3cret" not in f"{caught.value} {echo}"


def test_git_asks_nobody_and_takes_no_settings_from_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, echo: Echo
) -> None:
    fake(tmp_path, monkeypatch, f"env > {tmp_path}/seen")
    monkeypatch.setenv("GIT_DIR", "/elsewhere")
    monkeypatch.setenv("GIT_SSL_CAINFO", "/ca.pem")
    assert Git(echo).refs("https://git.example/a.git") == {}
    seen = (tmp_path / "seen").read_text().splitlines()
    assert "GIT_TERMINAL_PROMPT=0" in seen
    assert "GIT_SSL_CAINFO=/ca.pem" in seen
    assert not any(line.startswith("GIT_DIR=") for line in seen)
    assert f"HOME={os.environ['HOME']}" in seen  # the user's proxy and helpers hold
