"""The verbs and their options, as one parser; a module a subject."""

from __future__ import annotations

import argparse

from imagebuild.options import images, kernel, series, serving
from imagebuild.options.common import Parser, Verbs, group, verb

_EPILOG = """\
exit codes: 0 all well; 1 a person must look; 2 usage or a malformed file; 3 broken; 4 lock or
integrity; 5 engine, network or tool; 130 interrupted"""


def parser() -> argparse.ArgumentParser:
    """All of it, in the order of the help."""
    made = Parser(
        prog="build.py",
        description="Builds, audits and verifies the GLM-5.3-Flash image for sm_120 and sm_121.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verbs = made.add_subparsers(title="verbs", metavar="VERB", required=True)
    for declare in (
        images.build,
        images.reproduce,
        images.images,
        images.lint,
        series.audit,
        series.patches,
        series.lock,
        series.init_recipe,
        series.verify,
        kernel.kernel,
        serving.weights,
        serving.ship,
        serving.doctor,
        serving.bench,
        serving.render,
        _cache,
        _test,
    ):
        declare(verbs)
    return made


def _cache(verbs: Verbs) -> None:
    """`cache`."""
    cache = group(verbs, "cache", "downloads that are kept")
    verb(cache, "show", "commands.cache:show", "where it is and how large")
    prune = verb(cache, "prune", "commands.cache:prune", "remove what was used least recently")
    prune.add_argument("--to", metavar="SIZE", help="such as 5GiB; default: the cache's limit")
    verb(cache, "remove-smoke", "commands.cache:remove_smoke",
          "remove the environments of verify --deep")  # fmt: skip


def _test(verbs: Verbs) -> None:
    """`test`."""
    test = verbs.add_parser("test", help="run the tests; other arguments go to pytest",
                            add_help=False, prefix_chars="\0")  # fmt: skip
    test.add_argument("rest", nargs=argparse.REMAINDER)
    test.set_defaults(run="testrun:run", verbose=False)
