"""The command line: verbs, options and the one place where an error becomes an exit code."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from imagebuild.config import CLUSTERS, FLASHKDA, PLATFORMS
from imagebuild.errors import BuildError, EngineError, UsageError
from imagebuild.patching.patch import GPU_ARCHES

INTERRUPTED = 130
AUDIT_FORMATS = ("text", "json", "markdown", "html", "sarif", "junit", "github")
_EPILOG = """\
exit codes: 0 all well; 1 a person must look; 2 usage or a malformed file; 3 broken; 4 lock or
integrity; 5 engine, network or tool; 130 interrupted"""


_Handler = Callable[[int, FrameType | None], object] | signal.Handlers


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting, so that a wrong call is an error like any other."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", hint=f"{self.prog} --help")


def main(arguments: Sequence[str], *, root: Path | None = None) -> int:
    """Runs one verb; returns the exit code.

    Args:
        arguments: without the program's name.
        root: the repository that recipes, patches and results are in; by default the one that this
            code is in.
    """
    for stream in (sys.stdout, sys.stderr):
        # A file name need not be text; it is shown escaped instead of failing the run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        parsed = _parser().parse_args(list(arguments))
    except UsageError as error:
        return _fail(error, argparse.Namespace(format=_format_of(arguments)))
    try:
        with _ended_as_by_ctrl_c():
            module, _, name = parsed.run.partition(":")
            handler = getattr(importlib.import_module(f"imagebuild.{module}"), name)
            if module == "testrun":
                code: int = handler(parsed.rest)
                return code
            return _run(handler, parsed, root)
    except BuildError as error:
        return _fail(error, parsed)
    except KeyboardInterrupt:
        return _fail(_InterruptedError("interrupted"), parsed)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _fail(EngineError(f"{where}{error.strerror or error}"), parsed)
    except Exception as error:
        if parsed.verbose:
            raise
        hint = "run again with -v and report what it prints"
        return _fail(EngineError(f"internal error: {error!r}", hint=hint), parsed)


@contextlib.contextmanager
def _ended_as_by_ctrl_c() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end a run as Ctrl-C does, so that it clears up after itself."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may have handlers
        return
    defaults: dict[signal.Signals, _Handler] = {
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
        signal.SIGINT: signal.default_int_handler,
    }
    # What is ignored, as under nohup, stays so.
    known = {one: default for one, default in defaults.items() if signal.getsignal(one) is default}

    def end(number: int, _frame: object) -> NoReturn:
        # A second one must not stop the clearing up, unless it is a person's.
        for one in known:
            signal.signal(one, defaults[one] if one is signal.SIGINT else signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in known:
        signal.signal(one, end)
    try:
        yield
    finally:
        for number, handler in known.items():
            signal.signal(number, handler)


class _InterruptedError(BuildError):
    """The user stopped it."""

    exit_code = INTERRUPTED


def _run(handler, parsed: argparse.Namespace, root: Path | None) -> int:  # type: ignore[no-untyped-def]  # noqa: ANN001
    from imagebuild.commands.context import Context
    from imagebuild.config import ROOT
    from imagebuild.console import Console

    console = Console(output=parsed.format, color=parsed.color, verbose=parsed.verbose)
    code: int = handler(Context(parsed, console, root or ROOT))
    return code


def _fail(error: BuildError, parsed: argparse.Namespace) -> int:
    from imagebuild.console import Console

    console = Console(
        output=getattr(parsed, "format", "text"),
        color=getattr(parsed, "color", "auto"),
        verbose=getattr(parsed, "verbose", False),
    )
    console.error(error)
    console.document({"error": str(error), "hint": error.hint, "exit_code": error.exit_code})
    return error.exit_code


def _format_of(arguments: Sequence[str]) -> str:
    """The output format that a call asks for which could not be parsed."""
    joined = [*arguments, ""]
    asked = [joined[i + 1] for i, word in enumerate(arguments) if word == "--format"]
    asked += [word.partition("=")[2] for word in arguments if word.startswith("--format=")]
    return "json" if "json" in asked else "text"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="build.py",
        description="Builds, audits and verifies the GLM-5.3-Flash image for sm_120 and sm_121.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    plan = _verb(verbs, "plan", "commands.build:plan", "print what build would do; touch nothing")
    build = _verb(verbs, "build", "commands.build:run", "build a patched tree and its layer")
    for one in (plan, build):
        one.add_argument("--arch", choices=[*GPU_ARCHES, "all"],
                         help="default: this machine's; all: an index over both")  # fmt: skip
        one.add_argument(
            "--engine",
            choices=["tree", "docker"],
            help="tree (default): packages and a layer; docker: an image",
        )
        one.add_argument("--base-version", type=_release, metavar="V",
                         help="a locked vLLM release")  # fmt: skip
        one.add_argument("--dist", metavar="DIR", help="where results go; default: dist")
        _image(one)
    _reproduce(verbs)
    images = _verb(verbs, "images", "commands.image:images", "what was built from what, by docker")
    images.add_argument("--dist", metavar="DIR", help="where results are; default: dist")
    _render(verbs)

    audit = _verb(verbs, "audit", "commands.audit:run", "what vLLM releases mean for each patch",
                  formats=AUDIT_FORMATS)  # fmt: skip
    audit.add_argument("--report", metavar="FORMAT=FILE", action="append", default=[],
                       help="also write a report, in any of these formats; repeatable")  # fmt: skip
    _arch(audit, "leave out patches that do not matter for it; default: none")
    audit.add_argument("--against", metavar="SPEC", action="append", default=[],
                       help="a version or a range such as '>=0.31,<0.33'; repeatable")  # fmt: skip
    audit.add_argument("--since", metavar="V", help="that release and every later one")
    audit.add_argument("--latest", metavar="N", type=_count, help="the newest N releases")
    audit.add_argument("--wheel", metavar="FILE", action="append", default=[],
                       help="a vLLM wheel on disk; repeatable")  # fmt: skip
    audit.add_argument("--tree", metavar="DIR", action="append", default=[],
                       help="a site-packages folder; repeatable")  # fmt: skip
    audit.add_argument("--nightly", metavar="URL", action="append", default=[],
                       help="an index of vLLM wheels of one commit; repeatable")  # fmt: skip
    audit.add_argument("--first-bad", metavar="NAME",
                       help="search releases for the first on which this patch fails")  # fmt: skip
    audit.add_argument("--watch", action="store_true",
                       help="audit what is newer than the lock and not reported yet, check the "
                       "lock, and print an issue's body")  # fmt: skip
    audit.add_argument("--state", metavar="FILE", help="with --watch: what is reported; "
                       "default: dist/RECIPE/audit-watch.json")  # fmt: skip

    _patches(verbs)
    _lock(verbs)
    _weights(verbs)
    _bench(verbs)
    ship = _verb(verbs, "ship", "commands.ship:run", "send an image to other machines by ssh")
    ship.add_argument("host", metavar="HOST", nargs="+", help="such as box2 or user@10.0.0.2")
    ship.add_argument("--image", metavar="NAME:TAG", help="default: what build --arch sm_121 tags")
    ship.add_argument("--compress", action="store_true", help="send zstd; pays on slow links")
    ship.add_argument("--jobs", metavar="N", type=_count, default=2,
                      help="hosts at a time; default: 2")  # fmt: skip

    lint = _verb(verbs, "lint", "commands.lint:run", "faults of Dockerfile, compose and env files")
    lint.add_argument("file", metavar="FILE", nargs="*", help="default: the repository's own")
    lint.add_argument("--strict", action="store_true", help="exit 1 on warnings")
    doctor = _verb(verbs, "doctor", "commands.doctor:run", "whether this host can run a deployment")
    doctor.add_argument("deployment", metavar="DEPLOYMENT", help="such as gb10-2x")
    doctor.add_argument("--model-dir", metavar="DIR", help="of the checkpoint on this host")
    doctor.add_argument("--set", metavar="GLM_X=V", action="append", default=[],
                        help="a knob; repeatable")  # fmt: skip
    doctor.add_argument("--strict", action="store_true", help="exit 1 on warnings")

    init = _verb(verbs, "init-recipe", "commands.recipe:run",
                 "make a recipe for patches on any project of the package index")  # fmt: skip
    init.add_argument("spec", metavar="PROJECT==VERSION")
    init.add_argument("--name", metavar="NAME", help="of the recipe; default: the project's")
    init.add_argument("--package", metavar="NAME", help="what the wheel installs; default: it says")

    verify = _verb(verbs, "verify", "commands.verify:run", "check a patched tree")
    _arch(verify, "what it must be built for; default: what its manifest says, or this machine's")
    verify.add_argument("--tree", metavar="DIR", help="default: what build wrote for this arch")
    verify.add_argument("--dist", metavar="DIR", help="where results are; default: dist")
    verify.add_argument(
        "--deep",
        action="store_true",
        help="also run the tree's own code; needs a CPU build of torch",
    )

    cache = _group(verbs, "cache", "downloads that are kept")
    _verb(cache, "show", "commands.cache:show", "where it is and how large")
    prune = _verb(cache, "prune", "commands.cache:prune", "remove what was used least recently")
    prune.add_argument("--to", metavar="SIZE", help="such as 5GiB; default: the cache's limit")
    _verb(cache, "remove-smoke", "commands.cache:remove_smoke",
          "remove the environments of verify --deep")  # fmt: skip

    _kernel(verbs)

    test = verbs.add_parser("test", help="run the tests; other arguments go to pytest",
                            add_help=False, prefix_chars="\0")  # fmt: skip
    test.add_argument("rest", nargs=argparse.REMAINDER)
    test.set_defaults(run="testrun:run", verbose=False)
    return parser


def _reproduce(verbs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    text = "build twice and compare, or rebuild an image from its labels"
    reproduce = _verb(verbs, "reproduce", "commands.reproduce:run", text)
    reproduce.add_argument("image", metavar="IMAGE", nargs="?",
                           help="a loaded image, or an OCI archive or folder")  # fmt: skip
    reproduce.add_argument("--engine", choices=["tree", "docker"], help="default: tree")
    reproduce.add_argument("--arch", choices=[*GPU_ARCHES, "all"],
                           help="default: this machine's, or the image's")  # fmt: skip
    reproduce.add_argument("--base-version", type=_release, metavar="V",
                           help="a locked vLLM release")  # fmt: skip
    reproduce.add_argument("--dist", metavar="DIR", help="where both are built; default: dist")
    reproduce.add_argument("--keep", action="store_true", help="keep both builds")
    _image(reproduce, is_build=False)
    reproduce.set_defaults(tag=None, push=False, no_load=False, no_cache=False)


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


def _patches(verbs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    patches = _group(verbs, "patches", "the series, patch by patch")
    _verb(patches, "list", "commands.patches:list_patches", "one row a patch",
          formats=("text", "json", "markdown"))  # fmt: skip
    show = _verb(patches, "show", "commands.patches:show", "everything about one patch")
    show.add_argument("name", metavar="NAME")
    check = _verb(patches, "check", "commands.patches:check", "judge patches on one tree")
    check.add_argument("name", metavar="NAME", nargs="*", help="default: all")
    _arch(check, "leave out patches that do not matter for it; default: none")
    what = check.add_mutually_exclusive_group()
    what.add_argument("--tree", metavar="DIR", help="a site-packages folder")
    what.add_argument("--wheel", metavar="FILE", help="a vLLM wheel on disk")
    what.add_argument("--against", metavar="V", help="a release; default: the recipe's base")
    port = _verb(patches, "port", "commands.port:run", "carry patches over to another release")
    port.add_argument("name", metavar="NAME", nargs="*", help="or --all")
    port.add_argument("--all", action="store_true", help="every patch of the series")
    port.add_argument("--to", metavar="V", required=True, type=_release, help="a release")
    port.add_argument("--write", action="store_true", help="change the modules of clean ones")
    port.add_argument("--keep", metavar="DIR", help="keep changes and conflicts as files there")
    overlay = _verb(patches, "rebase-overlay", "commands.overlay:run",
                    "bring a folder of whole upstream files to another release")  # fmt: skip
    overlay.add_argument("folder", metavar="DIR", help="such files, as below site-packages")
    overlay.add_argument("--from", dest="start", metavar="A", type=_release,
                         help="what they are forks of; default: what fork.toml says")  # fmt: skip
    overlay.add_argument("--to", metavar="B", type=_release, required=True, help="a release")
    overlay.add_argument("--out", metavar="NEW", help="write the result and its record there")
    apply = _verb(patches, "apply", "commands.patches:apply_patches", "patch a folder in place")
    _arch(apply, "default: what a patched folder was built for, or that of this machine")
    revert = _verb(patches, "revert", "commands.patches:revert_patches", "restore a patched folder")
    for one in (apply, revert):
        one.add_argument("--tree", metavar="DIR", required=True, help="a site-packages folder")


def _lock(verbs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    lock = _group(verbs, "lock", "resolved facts of every supported base")
    _verb(lock, "show", "commands.lock:show", "what is locked")
    update = _verb(lock, "update", "commands.lock:update", "resolve anew where it is from")
    update.add_argument("entry", metavar="ENTRY", nargs="*",
                        help="wheels, image, debs (asks apt in the base, so only when named) or "
                        "another name in `lock show`; one that cannot be reached is then an error; "
                        "default: all")  # fmt: skip
    update.add_argument("--base", metavar="IMAGE", help="with debs: another name of the base, "
                        "such as a mirror's by digest")  # fmt: skip
    update.add_argument("--base-version", type=_release, metavar="V", action="append",
                        help="a release; repeatable; default: all that are locked")  # fmt: skip
    update.add_argument("--accept", metavar="PATCH", action="append", default=[],
                        help="take changed scopes of a patch, or of 'all'; repeatable")  # fmt: skip
    update.add_argument("--deep", action="store_true",
                        help="instead record what deep probes find on patched trees")  # fmt: skip
    update.add_argument("--tree", metavar="DIR", action="append", default=[],
                        help="with --deep: a patched tree; repeatable")  # fmt: skip
    update.add_argument("--dist", metavar="DIR", help="with --deep: where results are")
    _arch(update, "with --deep: whose tree; default: that of this machine")
    check = _verb(lock, "check", "commands.lock:check", "compare with what upstream has now")
    check.add_argument("entry", metavar="ENTRY", nargs="*", help="as for update; default: all")


def _weights(verbs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    weights = _group(verbs, "weights", "checkpoints on local disk")
    fetch = _verb(weights, "fetch", "commands.weights:fetch",
                  "fetch a checkpoint; what is there and right is kept")  # fmt: skip
    fetch.add_argument("source", metavar="SOURCE",
                       help="OWNER/NAME on the model hub, an http address with SHA256SUMS, "
                       "or a folder")  # fmt: skip
    fetch.add_argument("--to", metavar="DIR", required=True, help="where the files go")
    fetch.add_argument("--revision", metavar="R", default="main", help="of the hub; default: main")
    fetch.add_argument("--accept-licence", metavar="NAME",
                       help="of weights whose licence restricts their use")  # fmt: skip
    verify = _verb(weights, "verify", "commands.weights:verify", "check a fetched checkpoint")
    verify.add_argument("folder", metavar="DIR")
    verify.add_argument("--quick", action="store_true", help="sizes and headers alone")
    for one in (fetch, verify):
        one.add_argument("--jobs", metavar="N", type=_count, default=4,
                         help="files at a time; default: 4")  # fmt: skip


def _bench(verbs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    bench = _group(verbs, "bench", "measure what is running")
    serve = _verb(bench, "serve", "commands.bench:serve",
                  "speed of an OpenAI server, or of two in turn")  # fmt: skip
    serve.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8002")
    serve.add_argument("--versus", metavar="URL", help="another server, measured in turn with it")
    serve.add_argument("--baseline", metavar="FILE", help="an earlier --output to compare with")
    serve.add_argument("--output", metavar="FILE", help="where the figures go as JSON")
    serve.add_argument("--label", metavar="TEXT", default="", help="kept in --output")
    serve.add_argument("--model", metavar="NAME", help="default: the first one served")
    serve.add_argument("--api-key-file", metavar="FILE", help="default: OPENAI_API_KEY's value")
    serve.add_argument("--concurrency", metavar="N,N", type=_counts,
                       default=(1, 2, 4, 8, 16, 32, 64, 128, 256),
                       help="default: 1,2,4,...,256")  # fmt: skip
    for name, default, what in (
        ("--prompt-tokens", 512, "about how long prompts are"),
        ("--output-tokens", 128, "how long answers are"),
        ("--requests", 2, "for each of those at a time"),
        ("--repeats", 5, "of each level, for the median"),
        ("--timeout", 300, "seconds without a byte"),
    ):
        serve.add_argument(name, metavar="N", type=_positive, default=default,
                           help=f"{what}; default: {default}")  # fmt: skip


def _counts(text: str) -> tuple[int, ...]:
    """Numbers with commas. Raises what argparse turns into a sentence."""
    counts = tuple(int(word) for word in text.split(",") if word.isdecimal())
    if len(counts) != text.count(",") + 1 or not all(1 <= count <= 1024 for count in counts):
        raise argparse.ArgumentTypeError(f"expected numbers from 1 to 1024, found {text!r}")
    return counts


def _positive(text: str) -> int:
    """A number above 0. Raises what argparse turns into a sentence."""
    if not text.isdecimal() or not 1 <= int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"expected a number above 0, found {text!r}")
    return int(text)


def _kernel(verbs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    kernel = _group(verbs, "kernel", "the attention kernel")
    build = _verb(kernel, "build", "commands.kernelbuild:build",
                  "compile the library, with this machine's nvcc or the pinned one")  # fmt: skip
    build.add_argument("--arch", choices=GPU_ARCHES, action="append",
                       help="may be given twice; default: all")  # fmt: skip
    build.add_argument("--platform", choices=PLATFORMS, help="default: this machine's")
    build.add_argument("--cuda", metavar="DIR", help="a CUDA toolkit to take nvcc from")
    build.add_argument("--pinned", action="store_true",
                       help="take the pinned compiler even where there is one")  # fmt: skip
    build.add_argument("--debug", action="store_true", help="trap on rows that are out of range")
    build.add_argument("--out", metavar="FILE", help="default: below dist/kernel")
    build.add_argument("--dist", metavar="DIR", help="where results are; default: dist")
    check = _verb(kernel, "check", "commands.kernelruns:check",
                  "check the kernel and FlashKDA on this machine's GPU against fp64")  # fmt: skip
    check.add_argument("--quick", action="store_true", help="a few seconds instead of a minute")
    check.add_argument("--only", choices=["kernel", "flashkda"], help="default: both")
    check.add_argument("--flashkda", metavar="FILE",
                       help="default: the one in the installed vLLM, if any")  # fmt: skip
    bench = _verb(kernel, "bench", "commands.kernelruns:bench",
                  "time the kernel beside every other one that a user could pick")  # fmt: skip
    bench.add_argument("--prepare", action="store_true",
                       help="make the baselines and stop: needs nvcc and no GPU")  # fmt: skip
    bench.add_argument("--parts", metavar="DIR", help="the baselines; default: dist/kernel-bench")
    bench.add_argument("--tilelang", action="store_true", help="prepare TileLang too, 90 MB")
    bench.add_argument("--out", metavar="FILE", help="default: kernel/bench/results.json")
    bench.add_argument("--dist", metavar="DIR", help="where results are; default: dist")
    for one in (check, bench):
        one.add_argument("--python", metavar="FILE",
                         help="one that has torch; default: the first python3 on PATH")  # fmt: skip
        one.add_argument(
            "--library",
            metavar="FILE",
            help="default: what kernel build made, or the installed one",
        )


def _render(verbs) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    text = "write generated lines of the Dockerfile, or manifests for Kubernetes"
    render = _verb(verbs, "render", "commands.render:run", text)
    render.add_argument("what", nargs="?", choices=["dockerfile", "kubernetes"],
                        default="dockerfile", help="default: dockerfile")  # fmt: skip
    more = render.add_argument_group("with kubernetes")
    more.add_argument("--deployment", metavar="NAME", help="such as gb10-4x")
    more.add_argument("--image", metavar="NAME", help="that every rank runs")
    more.add_argument("--model-path", metavar="DIR", help="of the checkpoint on each node")
    more.add_argument("--cache-path", metavar="DIR", default="/var/cache/glm53",
                      help="on each node; default: /var/cache/glm53")  # fmt: skip
    more.add_argument("--drafter-path", metavar="DIR", default="", help="with dflash2")
    more.add_argument("--name", metavar="NAME", default="glm53", help="default: glm53")
    more.add_argument("--namespace", metavar="NAME", default="default", help="default: default")
    more.add_argument("--replicas", metavar="N", type=_count, default=1,
                      help="groups of ranks; default: 1")  # fmt: skip
    more.add_argument("--cluster", choices=CLUSTERS, default="none", help="the image's")
    more.add_argument("--set", metavar="GLM_X=V", action="append", default=[],
                      help="a knob; repeatable")  # fmt: skip
    more.add_argument("--node-label", metavar="L=V", action="append", default=[],
                      help="that nodes must have; repeatable")  # fmt: skip
    more.add_argument("--rdma", metavar="RESOURCE", default="rdma/hca_shared_devices_a",
                      help="of the device plugin; default: rdma/hca_shared_devices_a")  # fmt: skip
    more.add_argument("--api-key-secret", metavar="NAME", default="",
                      help="a Secret with the key api-key")  # fmt: skip
    more.add_argument("--output", metavar="FILE", help="default: stdout")


def _group(verbs, name: str, text: str):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    parser = verbs.add_parser(name, help=text, description=text, allow_abbrev=False)
    return parser.add_subparsers(title="verbs", metavar="VERB", required=True)


def _verb(  # type: ignore[no-untyped-def]
    verbs,  # noqa: ANN001
    name: str,
    run: str,
    text: str,
    formats: Sequence[str] = ("text", "json"),
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--recipe", metavar="NAME", help="default: the only one")
    parser.add_argument("--format", choices=formats, default="text",
                        help="json goes to stdout alone")  # fmt: skip
    parser.add_argument("--offline", action="store_true", help="use the cache alone")
    parser.add_argument("--color", choices=["auto", "always", "never"], default="auto")
    parser.add_argument("-v", "--verbose", action="store_true", help="show causes of errors")
    parser.set_defaults(run=run)
    return parser


def _count(text: str) -> int:
    """A number of things at a time. Raises what argparse turns into a sentence."""
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 64, found {text!r}")
    return int(text)


def _release(text: str) -> str:
    """A release as tags of images and of the repository name it: v0.31.0 is 0.31.0."""
    return text.removeprefix("v")


def _arch(parser: argparse.ArgumentParser, text: str = "default: that of this machine") -> None:
    parser.add_argument("--arch", choices=GPU_ARCHES, help=text)
