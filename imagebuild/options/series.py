"""`audit`, `patches`, `lock`, `init-recipe` and `verify`."""

from __future__ import annotations

from imagebuild.options.common import Verbs, arch, count, group, release, verb

AUDIT_FORMATS = ("text", "json", "markdown", "html", "sarif", "junit", "github")


def audit(verbs: Verbs) -> None:
    """`audit`."""
    audit = verb(verbs, "audit", "commands.audit:run", "what vLLM releases mean for each patch",
                  formats=AUDIT_FORMATS)  # fmt: skip
    audit.add_argument("--report", metavar="FORMAT=FILE", action="append", default=[],
                       help="also write a report, in any of these formats; repeatable")  # fmt: skip
    arch(audit, "leave out patches that do not matter for it; default: none")
    audit.add_argument("--against", metavar="SPEC", action="append", default=[],
                       help="a version or a range such as '>=0.31,<0.33'; repeatable")  # fmt: skip
    audit.add_argument("--since", metavar="V", help="that release and every later one")
    audit.add_argument("--latest", metavar="N", type=count, help="the newest N releases")
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


def patches(verbs: Verbs) -> None:
    """`patches`."""
    patches = group(verbs, "patches", "the series, patch by patch")
    verb(patches, "list", "commands.patches:list_patches", "one row a patch",
          formats=("text", "json", "markdown"))  # fmt: skip
    show = verb(patches, "show", "commands.patches:show", "everything about one patch")
    show.add_argument("name", metavar="NAME")
    check = verb(patches, "check", "commands.patches:check", "judge patches on one tree")
    check.add_argument("name", metavar="NAME", nargs="*", help="default: all")
    arch(check, "leave out patches that do not matter for it; default: none")
    what = check.add_mutually_exclusive_group()
    what.add_argument("--tree", metavar="DIR", help="a site-packages folder")
    what.add_argument("--wheel", metavar="FILE", help="a vLLM wheel on disk")
    what.add_argument("--against", metavar="V", help="a release; default: the recipe's base")
    port = verb(patches, "port", "commands.port:run", "carry patches over to another release")
    port.add_argument("name", metavar="NAME", nargs="*", help="or --all")
    port.add_argument("--all", action="store_true", help="every patch of the series")
    port.add_argument("--to", metavar="V", required=True, type=release, help="a release")
    port.add_argument("--write", action="store_true", help="change the modules of clean ones")
    port.add_argument("--keep", metavar="DIR", help="keep changes and conflicts as files there")
    overlay = verb(patches, "rebase-overlay", "commands.overlay:run",
                    "bring a folder of whole upstream files to another release")  # fmt: skip
    overlay.add_argument("folder", metavar="DIR", help="such files, as below site-packages")
    overlay.add_argument("--from", dest="start", metavar="A", type=release,
                         help="what they are forks of; default: what fork.toml says")  # fmt: skip
    overlay.add_argument("--to", metavar="B", type=release, required=True, help="a release")
    overlay.add_argument("--out", metavar="NEW", help="write the result and its record there")
    apply = verb(patches, "apply", "commands.patches:apply_patches", "patch a folder in place")
    arch(apply, "default: what a patched folder was built for, or that of this machine")
    revert = verb(patches, "revert", "commands.patches:revert_patches", "restore a patched folder")
    for one in (apply, revert):
        one.add_argument("--tree", metavar="DIR", required=True, help="a site-packages folder")


def lock(verbs: Verbs) -> None:
    """`lock`."""
    lock = group(verbs, "lock", "resolved facts of every supported base")
    verb(lock, "show", "commands.lock:show", "what is locked")
    update = verb(lock, "update", "commands.lock:update", "resolve anew where it is from")
    update.add_argument("entry", metavar="ENTRY", nargs="*",
                        help="wheels, image, debs (asks apt in the base, so only when named) or "
                        "another name in `lock show`; one that cannot be reached is then an error; "
                        "default: all")  # fmt: skip
    update.add_argument("--base", metavar="IMAGE", help="with debs: another name of the base, "
                        "such as a mirror's by digest")  # fmt: skip
    update.add_argument("--base-version", type=release, metavar="V", action="append",
                        help="a release; repeatable; default: all that are locked")  # fmt: skip
    update.add_argument("--accept", metavar="PATCH", action="append", default=[],
                        help="take changed scopes of a patch, or of 'all'; repeatable")  # fmt: skip
    update.add_argument("--deep", action="store_true",
                        help="instead record what deep probes find on patched trees")  # fmt: skip
    update.add_argument("--tree", metavar="DIR", action="append", default=[],
                        help="with --deep: a patched tree; repeatable")  # fmt: skip
    update.add_argument("--dist", metavar="DIR", help="with --deep: where results are")
    arch(update, "with --deep: whose tree; default: that of this machine")
    check = verb(lock, "check", "commands.lock:check", "compare with what upstream has now")
    check.add_argument("entry", metavar="ENTRY", nargs="*", help="as for update; default: all")


def init_recipe(verbs: Verbs) -> None:
    """`init-recipe`."""
    init = verb(verbs, "init-recipe", "commands.recipe:run",
                 "make a recipe for patches on any project of the package index")  # fmt: skip
    init.add_argument("spec", metavar="PROJECT==VERSION")
    init.add_argument("--name", metavar="NAME", help="of the recipe; default: the project's")
    init.add_argument("--package", metavar="NAME", help="what the wheel installs; default: it says")


def verify(verbs: Verbs) -> None:
    """`verify`."""
    tree = verb(verbs, "verify", "commands.verify:run", "check a patched tree")
    arch(tree, "what it must be built for; default: what its manifest says, or this machine's")
    tree.add_argument("--tree", metavar="DIR", help="default: what build wrote for this arch")
    tree.add_argument("--dist", metavar="DIR", help="where results are; default: dist")
    tree.add_argument(
        "--deep",
        action="store_true",
        help="also run the tree's own code; needs a CPU build of torch",
    )
