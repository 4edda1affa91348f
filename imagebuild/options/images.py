"""`plan`, `build`, `reproduce`, `images` and `lint`."""

from __future__ import annotations

import argparse

from imagebuild.config import CLUSTERS, FLASHKDA
from imagebuild.options.common import Verbs, release, verb
from imagebuild.patching.patch import GPU_ARCHES


def build(verbs: Verbs) -> None:
    """`plan` and `build`."""
    plan = verb(verbs, "plan", "commands.build:plan", "print what build would do; touch nothing")
    build = verb(verbs, "build", "commands.build:run", "build a patched tree and its layer")
    for one in (plan, build):
        one.add_argument("--arch", choices=[*GPU_ARCHES, "all"],
                         help="default: this machine's; all: an index over both")  # fmt: skip
        one.add_argument(
            "--engine",
            choices=["tree", "docker"],
            help="tree (default): packages and a layer; docker: an image",
        )
        one.add_argument("--base-version", type=release, metavar="V",
                         help="a locked vLLM release")  # fmt: skip
        one.add_argument("--dist", metavar="DIR", help="where results go; default: dist")
        _image(one)
    build.add_argument("--kernel", action="store_true",
                       help="with the tree, compile the kernel's library for its processor; an "
                       "image always has it")  # fmt: skip


def reproduce(verbs: Verbs) -> None:
    """`reproduce`."""
    text = "build twice and compare, or rebuild an image from its labels"
    reproduce = verb(verbs, "reproduce", "commands.reproduce:run", text)
    reproduce.add_argument("image", metavar="IMAGE", nargs="?",
                           help="a loaded image, or an OCI archive or folder")  # fmt: skip
    reproduce.add_argument("--engine", choices=["tree", "docker"], help="default: tree")
    reproduce.add_argument("--arch", choices=[*GPU_ARCHES, "all"],
                           help="default: this machine's, or the image's")  # fmt: skip
    reproduce.add_argument("--base-version", type=release, metavar="V",
                           help="a locked vLLM release")  # fmt: skip
    reproduce.add_argument("--dist", metavar="DIR", help="where both are built; default: dist")
    reproduce.add_argument("--keep", action="store_true", help="keep both builds")
    _image(reproduce, is_build=False)
    reproduce.set_defaults(tag=None, push=False, no_load=False, no_cache=False)


def images(verbs: Verbs) -> None:
    """`images`."""
    images = verb(verbs, "images", "commands.image:images", "what was built from what, by docker")
    images.add_argument("--dist", metavar="DIR", help="where results are; default: dist")


def lint(verbs: Verbs) -> None:
    """`lint`."""
    lint = verb(verbs, "lint", "commands.lint:run", "faults of Dockerfile, compose and env files")
    lint.add_argument("file", metavar="FILE", nargs="*", help="default: the repository's own")
    lint.add_argument("--strict", action="store_true", help="exit 1 on warnings")


def _image(parser: argparse.ArgumentParser, *, is_build: bool = True) -> None:
    """Options of `--engine docker`; the tree engine refuses them."""
    image = parser.add_argument_group("with --engine docker")
    image.add_argument(
        "--base", metavar="IMAGE", help="NAME@sha256:... or a loaded tag to start from"
    )
    image.add_argument("--cluster", choices=CLUSTERS, help="default: the recipe's")
    image.add_argument("--mentat-version", metavar="V", help="that of the hosts' daemons")
    image.add_argument("--flashkda", choices=FLASHKDA, help="default: the recipe's")
    image.add_argument("--builder", metavar="NAME", help="a builder of buildx")
    image.add_argument("--toolchain", metavar="IMAGE", help="where the kernel is compiled; "
                       "default: the base")  # fmt: skip
    image.add_argument("--build-context", metavar="NAME=DIR", action="append", default=[],
                       help="what this machine cannot fetch; repeatable")  # fmt: skip
    image.add_argument("--secret", metavar="SPEC", action="append", default=[],
                       help="as buildx takes it, such as a private CA; repeatable")  # fmt: skip
    if not is_build:
        return
    image.add_argument("--tag", metavar="NAME:TAG", help="default: RECIPE:VLLM-ARCH")
    image.add_argument("--push", action="store_true", help="push the tag once it is loaded")
    image.add_argument("--no-load", action="store_true", help="keep the archive, load nothing")
    image.add_argument("--no-cache", action="store_true", help="run every step again")
