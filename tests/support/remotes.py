"""What a recipe names beside wheels: images in a registry double, and a real repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.product import COMMITS, NAME, VERSIONS, Product
from tests.support.registry_server import RegistryServer

BASE, MENTAT = "team/vllm", "team/mentat"
DOCUMENT = "a document, of 2026-10-05"
_TABLES = """
[image]
debs = ["iproute2", "ripgrep"]
[image.registry]
host = "hub.example"
url = "http://{host}"
login = "hub.example"
[image.base]
repository = "team/vllm"
tag = "v{{version}}"
[image.artifacts.mentat]
repository = "team/mentat"
tag = "0.17.1"
[image.cited."0.31.0"]
repository = "team/vllm"
tag = "v0.31.0"
digest = "{digest}"
source = "{document}"
[image.cited."0.31.0".platforms]
"linux/amd64" = "{amd64}"
"linux/arm64" = "{arm64}"
[image.sources.flashkda]
url = "{url}"
commit = "{commit}"
source = "{document}"
"""


def revision(version: str) -> str:
    """The whole commit that the wheel of a release abbreviates."""
    return COMMITS[version].ljust(40, "0")


def put_base(served: RegistryServer, version: str, *, commit: str | None = None,
             tag: str | None = None, **config: Any) -> str:  # fmt: skip
    """Stores the image of a release; gives its digest."""
    environment = [f"VLLM_BUILD_COMMIT={revision(version) if commit is None else commit}"]
    return served.put_index(BASE, tag or f"v{version}", config={"Env": environment}, **config)


class Repository:
    """A git repository on disk, reached by file://, with two commits on main and one tag."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "--quiet", "--initial-branch=main")
        self.first = self.commit("first")
        self.git("tag", "--annotate", "--message=one", "v1", self.first)
        self.second = self.commit("second")

    @property
    def url(self) -> str:
        return self.folder.as_uri()

    def commit(self, message: str) -> str:
        """Adds an empty commit to main; gives its name."""
        self.git("commit", "--quiet", "--allow-empty", f"--message={message}")
        return self.git("rev-parse", "HEAD")

    def git(self, *arguments: str) -> str:
        who = {f"GIT_{role}_{what}": f"test{'@example.invalid' * (what == 'EMAIL')}"
               for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}  # fmt: skip
        done = subprocess.run(
            ["git", "-C", str(self.folder), *arguments], capture_output=True, text=True, check=True,
            env={**os.environ, **who, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
        )  # fmt: skip
        return done.stdout.strip()

    def remove(self) -> None:
        """Nobody answers any more."""
        shutil.rmtree(self.folder)


class Remote:
    """A product whose recipe names images and a source.

    Attributes:
        digests: of the images, by version; "mentat" has its own.
    """

    def __init__(self, product: Product, served: RegistryServer) -> None:
        self.product = product
        self.served = served
        self.repository = Repository(product.folder / "flashkda")
        self.digests = {version: put_base(served, version) for version in VERSIONS}
        self.digests["mentat"] = served.put_index(MENTAT, "0.17.1")
        stored = served.repositories[BASE]
        children = _children(stored.manifests[self.digests["0.31.0"]][1])
        text = _TABLES.format(host=served.host, digest=self.digests["0.31.0"], document=DOCUMENT,
                              url=self.repository.url, commit=self.repository.first,
                              **children)  # fmt: skip
        with self.recipe.open("a") as file:
            file.write(text)

    @property
    def recipe(self) -> Path:
        return self.product.root / "image" / NAME / "recipe.toml"

    def edit(self, old: str, new: str) -> None:
        """Changes the recipe."""
        text = self.recipe.read_text()
        assert old in text
        self.recipe.write_text(text.replace(old, new))

    def hide(self, repository: str, *digests: str) -> None:
        """Takes manifests out of the registry; without digests all tags."""
        stored = self.served.repositories[repository]
        for digest in digests:
            del stored.manifests[digest]
        gone = [tag for tag, digest in stored.tags.items() if not digests or digest in digests]
        for tag in gone:
            del stored.tags[tag]


def _children(index: bytes) -> dict[str, str]:
    listed = json.loads(index)["manifests"]
    return {one["platform"]["architecture"]: one["digest"] for one in listed
            if one["platform"]["os"] == "linux"}  # fmt: skip
