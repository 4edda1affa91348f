"""Recipes: what a person decides about a build, as frozen data. Standard library only."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from imagebuild.errors import UsageError
from imagebuild.patching.patch import GPU_ARCHES, GpuArch
from imagebuild.patching.series import Series, load_series
from imagebuild.patching.tree import VLLM, title
from imagebuild.patching.unified import SUFFIX

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = ("linux/amd64", "linux/arm64")
# What `uname -m` prints, and the arch whose cards sit in such a machine.
HOST_ARCHES: Mapping[str, GpuArch] = {"x86_64": "sm_120", "aarch64": "sm_121"}

_SCHEMA: Mapping[str, type] = {
    "schema": int,
    "name": str,
    "description": str,
    "series": str,
    "patches": str,
    "base": dict,
    "wheels": dict,
    "image_pins": dict,
    "gpu_arch": dict,
}
_OPTIONAL: Mapping[str, type] = {"image": dict, "weights": dict}
FLASHKDA = ("auto", "base", "build")
CLUSTERS = ("none", "ray", "mentat")
_DEB = r"[a-z0-9][a-z0-9+.-]+"  # source: Debian Policy 5.6.1


@dataclass(frozen=True)
class GitSource:
    """One commit of a repository; the commit names the content.

    Attributes:
        source: which public document names the commit.
        ref: a branch or tag that is expected to point to it; "" where none is.
    """

    url: str
    commit: str
    source: str = ""
    ref: str = ""


@dataclass(frozen=True)
class DefaultRegistry:
    """The registry of images whose name has no host.

    Attributes:
        host: how the registry is called where a name spells it out.
        url: where its API answers.
        login: the name under which `docker login` keeps its password.
    """

    host: str
    url: str
    login: str


@dataclass(frozen=True)
class ImageName:
    """An image by tag; the lock has its digest. `{version}` in `tag` is the vLLM release."""

    repository: str
    tag: str


@dataclass(frozen=True)
class ImageRecipe:
    """What a person decides about the image.

    Attributes:
        flashkda: whose FlashKDA library: the base's, one built here, or what `auto` finds right.
        cluster: how ranks are placed.
        cited: by base version, the image's reference and digests as a public document names them.
        sources: repositories that stages compile from, by name.
        registry: where an image without a host in its name is.
        base: the base image of a release that no document cites.
        artifacts: other images that stages take files from, by name.
        debs: packages to be installed in the image.
    """

    flashkda: str = "auto"
    cluster: str = "none"
    cited: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sources: Mapping[str, GitSource] = field(default_factory=dict)
    registry: DefaultRegistry | None = None
    base: ImageName | None = None
    artifacts: Mapping[str, ImageName] = field(default_factory=dict)
    debs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One recipe.

    Attributes:
        root: the repository.
        name: of the recipe, equal to its folder's name.
        description: one line.
        base_version: the vLLM release that a build uses by default.
        site_packages: folder of the packages inside the base image, without a leading slash.
        python: minor version of the base's interpreter, for wheel tags and markers.
        site: the package of each project whose wheel is in the tree; the first is patched.
        pins: projects whose exact versions are watched.
        image_pins: by base version, the versions that the image ships instead.
        platforms: docker's platform of each gpu_arch.
        image: what the Docker engine builds beside the tree.
        weights_hub: address of the model hub; HF_ENDPOINT names another one.
    """

    root: Path
    name: str
    description: str
    series_file: Path
    patches_dir: Path
    base_version: str
    site_packages: str
    python: str
    site: Mapping[str, str]
    pins: tuple[str, ...]
    image_pins: Mapping[str, Mapping[str, str]]
    platforms: Mapping[GpuArch, str]
    image: ImageRecipe = field(default_factory=ImageRecipe)
    weights_hub: str = ""

    @property
    def project(self) -> str:
        """The project that is patched, whose version names a base."""
        return next(iter(self.site))

    @property
    def title(self) -> str:
        """That project in messages."""
        return title(self.project)

    @property
    def folder(self) -> Path:
        """The recipe's own folder."""
        return self.series_file.parent

    @property
    def lock_file(self) -> Path:
        """Its lock."""
        return self.folder / "lock.toml"

    def patch_file(self, name: str) -> Path:
        """What a patch of the series is written in: a module, a diff, or a folder of forks."""
        diff, fork = self.patches_dir / f"{name}{SUFFIX}", self.patches_dir / name
        if diff.is_file():
            return diff
        return fork if fork.is_dir() else self.patches_dir / f"{name}.py"

    def platform(self, gpu_arch: GpuArch) -> str:
        """Docker's word for an arch. Raises UsageError when the recipe does not serve it."""
        if gpu_arch not in self.platforms:
            raise UsageError(f"--arch: expected one that recipe {self.name} serves, "
                             f"found {gpu_arch!r}",
                             hint=f"it serves {', '.join(self.platforms)}")  # fmt: skip
        return self.platforms[gpu_arch]

    def series(self) -> Series:
        """Its patches, loaded and validated. Raises UsageError."""
        return load_series(self.series_file, self.patches_dir, self.root / "image" / "runtime")


def recipes(root: Path = ROOT) -> list[str]:
    """Names of the recipes there are."""
    return sorted(path.parent.name for path in (root / "image").glob("*/recipe.toml"))


def load_recipe(name: str, root: Path = ROOT) -> Recipe:
    """Reads `image/<name>/recipe.toml`.

    Raises:
        UsageError: there is none, or it is malformed; the message names key, expected and found.
    """
    path = root / "image" / name / "recipe.toml"
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        known = ", ".join(recipes(root)) or "none"
        raise UsageError(f"{path}: expected a recipe, found no such file",
                         hint=f"recipes: {known}") from error  # fmt: skip
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: expected TOML, found: {error}") from error
    reader = _Reader(path, content)
    reader.check(_SCHEMA)
    if content["schema"] != 1:
        raise UsageError(f"{path}: expected schema = 1, found {content['schema']!r}")
    if content["name"] != name:
        raise UsageError(f"{path}: expected name = {name!r}, found {content['name']!r}")
    site = reader.names("wheels", "site")
    if not site or (VLLM in site and next(iter(site)) != VLLM):
        first = f"{VLLM} first" if site else "the project that is patched"
        raise UsageError(f"{path}: wheels.site: expected {first}, found {list(site)!r}")
    return Recipe(
        root=root,
        name=name,
        description=content["description"],
        series_file=path.parent / reader.inside("series", content["series"], depth=1),
        patches_dir=root / reader.inside("patches", content["patches"]),
        base_version=reader.text("base", "version"),
        site_packages=reader.inside(
            "base.site_packages", reader.text("base", "site_packages").strip("/")
        ),
        python=reader.python(),
        site=site,
        pins=reader.texts("wheels", "pins"),
        image_pins=reader.image_pins(),
        platforms=reader.platforms(),
        image=reader.image(),
        weights_hub=reader.weights_hub(),
    )


class _Reader:
    """Typed access with errors that say where, what was expected and what was found."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    def check(self, schema: Mapping[str, type]) -> None:
        for key in self.content:
            if key not in schema and key not in _OPTIONAL:
                known = ", ".join([*schema, *_OPTIONAL])
                raise UsageError(f"{self.path}: unknown key {key!r}",
                                 hint=f"known keys: {known}")  # fmt: skip
        for key, kind in schema.items():
            self._value(self.content, key, key, kind)

    def text(self, table: str, key: str) -> str:
        return str(self._value(self.content[table], key, f"{table}.{key}", str))

    def texts(self, table: str, key: str) -> tuple[str, ...]:
        value = self._value(self.content[table], key, f"{table}.{key}", list)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UsageError(f"{self.path}: {table}.{key}: expected names, found {value!r}")
        return tuple(value)

    def names(self, table: str, key: str) -> dict[str, str]:
        value = self._value(self.content[table], key, f"{table}.{key}", dict)
        return self._strings(value, f"{table}.{key}")

    def _strings(self, value: object, label: str) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise UsageError(f"{self.path}: {label}: expected names with strings, found {value!r}")
        return dict(value)

    def inside(self, label: str, text: str, *, depth: int | None = None) -> str:
        pure = PurePosixPath(text)
        is_inside = bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts
        if not is_inside or (depth is not None and len(pure.parts) > depth):
            what = "the name of a file beside it" if depth == 1 else "a path that leads down"
            raise UsageError(f"{self.path}: {label}: expected {what}, found {text!r}")
        return text

    def python(self) -> str:
        text = self.text("base", "python")
        if not re.fullmatch(r"3\.\d+", text):
            raise UsageError(f"{self.path}: base.python: expected a minor version such as 3.12, "
                             f"found {text!r}")  # fmt: skip
        return text

    def image_pins(self) -> dict[str, dict[str, str]]:
        table = self.content["image_pins"]
        return {
            version: self._strings(table[version], f"image_pins.{version}") for version in table
        }

    def weights_hub(self) -> str:
        table = self.content.get("weights", {})
        words = self._words(table, "weights", ("hub",)) if table else {"hub": ""}
        if table and not words["hub"].startswith(("https://", "http://")):
            raise UsageError(f"{self.path}: weights.hub: expected https://..., "
                             f"found {words['hub']!r}")  # fmt: skip
        return words["hub"]

    def platforms(self) -> dict[GpuArch, str]:
        table = self.content["gpu_arch"]
        if not table:
            raise UsageError(f"{self.path}: gpu_arch: expected {' or '.join(GPU_ARCHES)}, "
                             "found none")  # fmt: skip
        for arch, platform in table.items():
            if arch not in GPU_ARCHES or platform not in PLATFORMS:
                raise UsageError(
                    f"{self.path}: gpu_arch.{arch}: expected one of {', '.join(GPU_ARCHES)} "
                    f"with one of {', '.join(PLATFORMS)}, found {platform!r}"
                )
        return dict(table)

    def image(self) -> ImageRecipe:
        table = self.content.get("image", {})
        known = ("flashkda", "cluster", "cited", "sources", "registry", "base", "artifacts", "debs")
        if not isinstance(table, dict) or (odd := sorted(set(table) - set(known))):
            found = odd[0] if isinstance(table, dict) else table
            raise UsageError(f"{self.path}: image: unknown key {found!r}",
                             hint=f"known keys: {', '.join(known)}")  # fmt: skip
        choices = {"flashkda": FLASHKDA, "cluster": CLUSTERS}
        chosen = {key: table.get(key, words[0]) for key, words in choices.items()}
        for key, words in choices.items():
            if chosen[key] not in words:
                raise UsageError(f"{self.path}: image.{key}: expected {' or '.join(words)}, "
                                 f"found {chosen[key]!r}")  # fmt: skip
        cited = {version: dict(entry) for version, entry in self._tables(table, "cited")}
        registry, base = table.get("registry"), table.get("base")
        debs = table.get("debs", [])
        if not isinstance(debs, list) or not all(re.fullmatch(_DEB, str(name)) for name in debs):
            raise UsageError(f"{self.path}: image.debs: expected names of packages, found {debs!r}")
        return ImageRecipe(
            cited=cited,
            sources={name: self._source(name, one) for name, one in self._tables(table, "sources")},
            registry=None if registry is None else self._registry(registry),
            base=None if base is None else self._image_name(base, "image.base"),
            artifacts={
                name: self._image_name(one, f"image.artifacts.{name}")
                for name, one in self._tables(table, "artifacts")
            },
            debs=tuple(debs),
            **chosen,
        )

    def _tables(self, table: dict[str, Any], key: str) -> list[tuple[str, dict[str, Any]]]:
        """The named tables below a key."""
        found = table.get(key, {})
        if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
            raise UsageError(f"{self.path}: image.{key}: expected tables by name, found {found!r}")
        return list(found.items())

    def _words(self, entry: object, label: str, wanted: tuple[str, ...],
               more: tuple[str, ...] = ()) -> dict[str, str]:  # fmt: skip
        """A table of strings with these keys and no others; `more` may be left out."""
        if not isinstance(entry, dict) or (odd := sorted(set(entry) - {*wanted, *more})):
            found = odd[0] if isinstance(entry, dict) else entry
            raise UsageError(f"{self.path}: {label}: unknown key {found!r}",
                             hint=f"known keys: {', '.join((*wanted, *more))}")  # fmt: skip
        there = [key for key in (*wanted, *more) if key in entry or key in wanted]
        return {key: str(self._value(entry, key, f"{label}.{key}", str)) for key in there}

    def _source(self, name: str, entry: dict[str, Any]) -> GitSource:
        where = f"image.sources.{name}"
        source = GitSource(**self._words(entry, where, ("url", "commit"), ("source", "ref")))
        if not re.fullmatch(r"[0-9a-f]{40}", source.commit):
            raise UsageError(f"{self.path}: {where}.commit: expected 40 hex digits, "
                             f"found {source.commit!r}")  # fmt: skip
        # A word that git takes for an option or a command of its own is no address.
        if not re.match(r"(https?|ssh|git|file)://", source.url) or source.ref.startswith("-"):
            raise UsageError(f"{self.path}: {where}: expected url = https://... and a ref, "
                             f"found {source.url!r}, {source.ref!r}")  # fmt: skip
        return source

    def _registry(self, entry: object) -> DefaultRegistry:
        words = self._words(entry, "image.registry", ("host", "url", "login"))
        if not re.match(r"https?://[^/]", words["url"]):
            raise UsageError(f"{self.path}: image.registry.url: expected https://..., "
                             f"found {words['url']!r}")  # fmt: skip
        return DefaultRegistry(**words)

    def _image_name(self, entry: object, label: str) -> ImageName:
        words = self._words(entry, label, ("repository", "tag"))
        if "@" in words["repository"] + words["tag"] or not all(words.values()):
            raise UsageError(f"{self.path}: {label}: expected a repository and a tag, since the "
                             f"digest is in the lock, found {words!r}")  # fmt: skip
        return ImageName(**words)

    def _value(self, table: dict[str, Any], key: str, label: str, kind: type) -> object:
        if key not in table:
            raise UsageError(f"{self.path}: expected the key {label}, found none")
        if not isinstance(table[key], kind):
            raise UsageError(f"{self.path}: {label}: expected {kind.__name__}, "
                             f"found {table[key]!r}")  # fmt: skip
        return table[key]
