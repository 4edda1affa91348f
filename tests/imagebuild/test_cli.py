"""The command line: every exit code by a real cause, one sentence each, JSON on stdout alone."""

from __future__ import annotations

import json
import os
import pty
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from imagebuild import cli
from tests.support.product import (
    COMMITS,
    GREETER,
    NAME,
    REPOSITORY,
    TAGS,
    Product,
    Ran,
    files_of,
    release_files,
)
from tests.support.wheels import build_wheel, sha256

LOCK = f"image/{NAME}/lock.toml"
RECIPE = f"image/{NAME}/recipe.toml"
SERIES = f"image/{NAME}/series.toml"
GREETER_FILE = f"patches/{NAME}/{GREETER}.py"
BUILD = ("build", "--arch", "sm_120")
WHEEL = f"vllm-0.31.0-{TAGS['linux/amd64']}.whl"


def site(product: Product) -> Path:
    """A patched tree."""
    assert product.run(*BUILD).code == 0
    return product.root / "dist" / "tiny-sm_120" / "site"


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# One cause each: what to do before, the call, the exit code, and what the sentence must say.


def _no_network(product: Product) -> None:
    product.index_url = f"http://127.0.0.1:{closed_port()}/simple"


def _bad_address(product: Product) -> None:
    product.index_url = "http://[::1/simple"


def _yanked(product: Product) -> None:
    name = build_wheel(product.wheels, version="0.33.5", tag=TAGS["linux/amd64"]).name
    product.server.faults.yanked[name] = "wrong torch"


def _rebuilt(product: Product) -> None:
    build_wheel(product.wheels, tag=TAGS["linux/amd64"])


def _corrupt_cache(product: Product) -> None:
    assert product.run(*BUILD).code == 0
    shutil.rmtree(product.root / "dist")
    blob = next((product.cache / "sha256").glob(f"*/{sha256(product.wheels / WHEEL)}"))
    data = bytearray(blob.read_bytes())
    data[len(data) // 2] ^= 1
    blob.write_bytes(data)


def _foreign(product: Product) -> None:
    path = site(product) / "vllm" / "greeter.py"
    path.write_bytes(path.read_bytes() + b"# mine\n")


def _fault(**faults: object) -> Callable[[Product], None]:
    def prepare(product: Product) -> None:
        for name, value in faults.items():
            assert hasattr(product.server.faults, name)
            setattr(product.server.faults, name, value)

    return prepare


def _replaced(path: str, old: str, new: str) -> Callable[[Product], None]:
    return lambda product: product.replace(path, old, new)


def _nothing(_product: Product) -> None:
    pass


SITE = "{root}/dist/tiny-sm_120/site"
CAUSES = {
    "unknown verb": (_nothing, ("brew",), 2, "invalid choice: 'brew'"),
    "unknown option": (_nothing, ("plan", "--fast"), 2, "unrecognized arguments: --fast"),
    "abbreviated option": (_nothing, ("plan", "--rec", "tiny"), 2, "unrecognized arguments"),
    "unknown arch": (_nothing, ("plan", "--arch", "sm_90"), 2, "invalid choice: 'sm_90'"),
    "unknown recipe": (_nothing, ("plan", "--recipe", "x"), 2, "expected a recipe, found no such"),
    "unknown patch": (_nothing, ("patches", "show", GREETER[:-2]), 2, "is not a patch of this"),
    "unknown patch, checked": (_nothing, ("patches", "check", "zzz"), 2, "'zzz' is not a patch"),
    "unknown version": (_nothing, ("audit", "--against", "7.7"), 2, "expected version 7.7, found"),
    "size that is none": (_nothing, ("cache", "prune", "--to", "lots"), 2, "--to: expected a size"),
    "malformed recipe": (_replaced(RECIPE, "[base]", "[base"), ("plan",), 2, "expected TOML"),
    "malformed series": (_replaced(SERIES, "[", ""), ("patches", "list"), 2, "expected TOML"),
    "series of numbers": (_replaced(SERIES, '["', '[3, "'), ("plan",), 2, "expected `patches ="),
    "series twice": (_replaced(SERIES, '["', f'["{GREETER}", "'), ("plan",), 2, "is listed twice"),
    "series names nothing": (_replaced(SERIES, '["', '["v_a_b", "'), ("plan",), 2, "found no such"),
    "patch that raises": (_replaced(GREETER_FILE, "PATCH =", "1 / 0\nPATCH ="), ("plan",), 2,
                          "fails to load: ZeroDivisionError"),
    "patch that is none": (_replaced(GREETER_FILE, "PATCH =", "P ="), ("plan",), 2,
                           "expected a constant PATCH"),
    "patch without a range": (_replaced(GREETER_FILE, ">=0.31,<0.32", "0.31"), ("plan",), 2,
                              "is not a range"),
    "no tree": (_nothing, ("verify", "--tree", "{root}/x"), 2, "expected a site-packages folder"),
    "nothing built": (_nothing, ("verify", "--arch", "sm_120"), 2, "hint: build.py build"),
    "tree that is not vLLM": (_nothing, ("patches", "apply", "--tree", "{root}"), 2,
                              "found no usable vllm/_version.py"),
    "tree without our patches": (_nothing, ("patches", "revert", "--tree", "{root}"), 2,
                                 "expected a tree that we patched"),
    "malformed index address": (_bad_address, ("audit",), 2, "expected an address, found that it"),
    "yanked": (_yanked, ("audit", "--against", "0.33.5"), 1, "upstream withdrew it: wrong torch"),
    "review": (lambda p: p.only_locked("0.31.0"), ("audit", "--against", "0.32.0"), 1, ""),
    "reason gone": (_replaced(GREETER_FILE, '"hello")', '"x")'), BUILD, 1,
                    "no longer true that Greeter.greet gives 'x'"),
    "drifted": (_replaced(GREETER_FILE, 'return "hello"', 'return "hullo"'), BUILD, 3, "drifted: "),
    "no effect": (_replaced(GREETER_FILE, "'        return \"good day\"\\n'",
                            "'        return \"good night\"\\n'"), BUILD, 3, "defeated: "),
    "changed by somebody else": (_foreign, ("verify", "--arch", "sm_120"), 3, ""),
    "changed, applied": (_foreign, ("patches", "apply", "--tree", SITE), 3, "files differ from"),
    "changed, reverted": (_foreign, ("patches", "revert", "--tree", SITE), 3, "files differ from"),
    "not locked": (_nothing, ("build", "--base-version", "0.34.0"), 4, "vLLM 0.34.0 is not locked"),
    "malformed lock": (_replaced(LOCK, "epoch", "epok"), BUILD, 4, "malformed"),
    "wrong hash": (_fault(flip=900), BUILD, 4, "found other bytes"),
    "other wheel": (_rebuilt, BUILD, 4, "expected a wheel for linux/amd64 with sha256"),
    "index that hides the change": (_fault(flip=900, hashes=False), BUILD, 4, ""),
    "corrupt cache": (_corrupt_cache, (*BUILD, "--offline"), 4, "expected sha256"),
    "no network": (_no_network, BUILD, 5, "it is unreachable"),
    "cold cache": (_nothing, (*BUILD, "--offline"), 5, "and --offline is set"),
    "truncated body": (_fault(cut=100, length=False), BUILD, 5, "the body ends after"),
    "broken connection": (_fault(drop_after=[100] * 30), BUILD, 5, "the connection broke off"),
    "index that is none": (_fault(page=b"<h1>Sign in</h1>"), BUILD, 5, "a simple index page"),
    "busy index": (_fault(busy=99), BUILD, 5, "found status 503"),
}  # fmt: skip


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_has_its_sentence_and_its_code(
    product: Product, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("imagebuild.sources.http.Http.sleep", lambda *_: None)
    prepare, call, code, said = CAUSES[cause]
    prepare(product)
    words = [word.format(root=product.root) for word in call]
    ran = product.run(*words)
    assert ran.code == code, ran
    if said:
        assert said in ran.err, ran.err
        assert ran.err.count("error: ") == 1
    again = product.run(*words, "--format", "json")
    assert again.code == code
    if said:
        assert set(again.json) == {"schema", "error", "hint", "exit_code"}
        assert again.json["exit_code"] == code
        assert said.removeprefix("hint: ") in f"{again.json['error']} {again.json['hint']}"


def test_every_code_of_the_table_is_reached() -> None:
    text = (REPOSITORY / "README.md").read_text().partition("## Exit codes")[2]
    told = {
        int(row.split("|")[1]) for row in text.split("\n") if row[:2] == "| " and row[2].isdigit()
    }
    # 0 is every other test; 130 is the interrupt in test_tree_engine.py.
    assert {code for _, _, code, _ in CAUSES.values()} | {0, 130} == told


def test_a_call_without_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for call in ([], ["lock"]):
        assert cli.main(call) == 2
        assert "the following arguments are required: VERB" in capsys.readouterr().err


def test_a_repository_without_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan"], root=tmp_path) == 2
    assert "expected a folder with a recipe.toml, found none" in capsys.readouterr().err


def test_several_recipes_must_be_named(product: Product) -> None:
    shutil.copytree(product.root / "image" / NAME, product.root / "image" / "other")
    product.replace("image/other/recipe.toml", 'name = "tiny"', 'name = "other"')
    ran = product.run("plan", "--arch", "sm_120")
    assert (ran.code, ran.out) == (2, "")
    assert "hint: recipes: other, tiny" in ran.err
    assert product.run("plan", "--arch", "sm_120", "--recipe", "other").code == 0


def test_a_tree_that_somebody_patched(product: Product) -> None:
    root = site(product)
    assert product.run("patches", "revert", "--tree", str(root)).code == 0
    (root / "vllm" / "greeter.py").write_text(
        'class Greeter:\n    def greet(self):\n        # better\n        return "hello"\n'
    )
    before = files_of(root)
    ran = product.run("patches", "apply", "--tree", str(root), "--arch", "sm_120")
    assert ran.code == 3
    assert "somebody else changed files that we patch" in ran.err
    assert files_of(root) == before


def test_a_corrupt_cache_entry_is_fetched_again_online(product: Product) -> None:
    _corrupt_cache(product)
    ran = product.run(*BUILD)
    assert ran.code == 0
    assert "it is fetched again" in ran.err


def test_an_index_without_ranges_builds(product: Product) -> None:
    product.server.faults.ranges = False
    assert product.run(*BUILD).code == 0


def test_offline_after_a_build_needs_nothing(product: Product) -> None:
    assert product.run(*BUILD).code == 0
    shutil.rmtree(product.root / "dist")
    asked = len(product.server.asked)
    assert product.run(*BUILD, "--offline").code == 0
    assert len(product.server.asked) == asked


def test_an_interrupt_is_130_and_one_document(
    product: Product, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_context: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("imagebuild.commands.build.plan", stop)
    ran = product.run("plan", "--format", "json")
    assert ran.code == 130
    assert ran.json == {"schema": 1, "error": "interrupted", "hint": None, "exit_code": 130}
    assert ran.err == "error: interrupted\n"


def test_what_nobody_foresaw_is_a_sentence_too(
    product: Product, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_context: object) -> int:
        raise ValueError("odd")

    monkeypatch.setattr("imagebuild.commands.build.plan", fail)
    assert cli.main(["plan"], root=product.root) == 5
    said = capsys.readouterr().err
    assert said.startswith("error: internal error: ValueError('odd')\nhint: run again with -v")
    with pytest.raises(ValueError, match="odd"):
        cli.main(["plan", "-v"], root=product.root)


def test_an_unreadable_file_names_itself(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> str:
        raise PermissionError(13, "Permission denied", "/somewhere/recipe.toml")

    monkeypatch.setattr(Path, "read_text", refuse)
    ran = product.run("plan", "--format", "json")
    assert (ran.code, ran.json["error"]) == (5, "/somewhere/recipe.toml: Permission denied")


# Full disk: a small file system, in a user namespace where not root


def _on_small_disk(product: Product, folder: str, size: str, *call: str) -> Ran:
    command = " ".join(f"'{part}'" for part in [sys.executable, "-c", _MAIN, *call])
    mount = f"mount -t tmpfs -o size={size} tmpfs '{folder}'"
    script = f"set -e; {mount}; cd '{REPOSITORY}'; set +e; {command}; code=$?; ls -A '{folder}'"
    script += " >&2; exit $code"
    unshare = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
    done = subprocess.run([*unshare, "bash", "-c", script], capture_output=True, text=True,
                          env={**product.environment, "ROOT": str(product.root)},
                          check=False)  # fmt: skip
    if "mount:" in done.stderr or "unshare:" in done.stderr:
        pytest.skip(f"not run, no name space for a small disk: {mount}: {done.stderr.strip()}")
    assert "Traceback" not in done.stderr, done.stderr
    return Ran(done.returncode, done.stdout, done.stderr)


_MAIN = (
    "import os, sys; from pathlib import Path; from imagebuild.cli import main; "
    'sys.exit(main(sys.argv[1:], root=Path(os.environ["ROOT"])))'
)


def test_a_full_disk_during_a_build(product: Product, tmp_path: Path) -> None:
    large = {**release_files("0.31.0", "linux/amd64"), "vllm/large.bin": bytes(4 << 20)}
    build_wheel(product.wheels, tag=TAGS["linux/amd64"], files=large,
                requires=["torch==2.13.0", "flashinfer-python==0.7.0"])  # fmt: skip
    assert product.run("lock", "update", "--base-version", "0.31.0").code == 0
    dist = tmp_path / "small"
    dist.mkdir()
    ran = _on_small_disk(product, str(dist), "2m", *BUILD, "--dist", str(dist))
    assert ran.code == 5, ran
    assert "no space left there" in ran.err
    assert "hint: free some space, or build elsewhere: --dist DIR" in ran.err
    # Nothing half-written stays, only the lock file of builds.
    assert ran.err.rstrip().split("\n")[-1] == ".tiny-sm_120.lock"


def test_a_full_disk_during_a_download(product: Product, tmp_path: Path) -> None:
    cache = tmp_path / "small"
    cache.mkdir()
    product.extra["IMAGEBUILD_CACHE"] = str(cache)
    ran = _on_small_disk(product, str(cache), "4k", *BUILD)
    assert ran.code == 5, ran
    assert "IMAGEBUILD_CACHE=DIR" in ran.err
    assert not (product.root / "dist" / "tiny-sm_120").exists()


# Streams


def test_json_is_one_document_and_steps_go_to_stderr(product: Product) -> None:
    calls: list[tuple[str, ...]] = [
        ("plan", "--arch", "sm_120"), BUILD, ("audit",), ("verify", "--arch", "sm_120"),
        ("patches", "list"), ("patches", "show", GREETER), ("patches", "check"),
        ("patches", "revert", "--tree", SITE.format(root=product.root)),
        ("patches", "apply", "--tree", SITE.format(root=product.root)),
        ("lock", "show"), ("lock", "check"), ("lock", "update"), ("cache", "show"),
        ("cache", "prune", "--to", "1GiB"),
    ]  # fmt: skip
    for call in calls:
        ran = product.run(*call, "--format", "json")
        assert ran.code == 0, (call, ran)
        assert ran.json
        assert ran.out.count('"schema": 1') == 1
        if "revert" in call:  # once is enough
            continue
        text = product.run(*call)
        assert text.code == 0
        assert text.out
        assert not any("\x1b" in line or line.rstrip() != line for line in text.out.split("\n")), (
            text
        )
        assert not set(text.out) & set("│┃━┏┡"), call


@pytest.mark.parametrize("format_", [("--format", "json"), ("--format=json",)])
def test_a_call_that_cannot_be_parsed_answers_in_the_format_asked(
    format_: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["audit", *format_, "--no-such"]) == 2
    said = capsys.readouterr()
    assert json.loads(said.out)["exit_code"] == 2
    assert said.err.startswith("error: build.py")
    assert cli.main(["audit", "--no-such"]) == 2
    assert capsys.readouterr().out == ""


def test_a_reader_that_goes_away_changes_no_verdict(product: Product) -> None:
    product.only_locked("0.31.0")
    call = product.command("audit", "--against", "0.32.0")
    for form in ("text", "json"):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as broken:
            done = subprocess.run([*call, "--format", form], stdout=broken, stderr=subprocess.PIPE,
                                  text=True, env=product.environment, cwd=REPOSITORY,
                                  check=False)  # fmt: skip
        assert done.returncode == 1, done.stderr
        assert "Broken pipe" not in done.stderr
        assert "BrokenPipeError" not in done.stderr


def test_names_that_are_no_text(product: Product) -> None:
    odd = os.fsdecode(b"/tmp/\xff\xfe")
    for form in ("text", "json"):
        ran = product.spawn("verify", "--tree", odd, "--format", form)
        assert ran.code == 2
        assert r"/tmp/\xff\xfe: expected a site-packages folder" in ran.err
    product.extra["PYTHONIOENCODING"] = "ascii"
    assert product.spawn("verify", "--tree", "/tmp/ä").code == 2


def test_forced_colour_still_gives_lines(product: Product) -> None:
    product.extra["FORCE_COLOR"] = "1"
    ran = product.run("patches", "list")
    assert len(ran.out.rstrip().split("\n")) == 5
    assert not set(ran.out) & set("│┃━")


def on_terminal(product: Product, width: int, *call: str) -> str:
    """What a person sees; both streams go to one terminal."""
    master, slave = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {**product.environment, "TERM": "xterm", "NO_COLOR": "1"}
    process = subprocess.Popen(product.command(*call), stdin=slave, stdout=slave, stderr=slave,
                               env=environment, cwd=REPOSITORY)  # fmt: skip
    os.close(slave)
    seen = b""
    while True:
        try:
            block = os.read(master, 65536)
        except OSError:  # EIO: the other side is closed
            break
        if not block:
            break
        seen += block
    os.close(master)
    assert process.wait(timeout=60) == 0, seen
    return seen.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("width", [60, 200])
def test_a_table_on_a_terminal_loses_no_text(product: Product, width: int) -> None:
    seen = on_terminal(product, width, "lock", "show")
    assert "…" not in seen
    assert "│" in seen
    wheels = seen[seen.index("lock.toml") :]  # the second of the two tables
    table = [line for line in wheels.split("\n") if line[:1] == "│"]
    columns = zip(*(line.strip("│").split("│") for line in table), strict=True)
    joined = ["".join(cell.strip() for cell in column) for column in columns]
    for pin in json.loads(product.run("lock", "show", "--format", "json").out)["bases"]["0.31.0"][
        "wheels"
    ]["vllm"].values():
        assert pin["filename"] in joined[-1]
        assert pin["sha256"][:16] in joined[-2]


def test_help_and_start_up_import_nothing_large() -> None:
    code = (
        "import sys, imagebuild.cli\n"
        "try:\n    imagebuild.cli.main(['--help'])\n"
        "except SystemExit as end:\n    print(end.code)\n"
        "large = {'requests', 'urllib3', 'rich', 'packaging', 'pypi_simple', 'tomli_w', 'ssl'}\n"
        "print(sorted(large & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=REPOSITORY)  # fmt: skip
    lines = done.stdout.rstrip().split("\n")
    assert lines[-2:] == ["0", "[]"]
    assert lines[0].startswith("usage: build.py")


def test_help_names_every_verb_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for verb in ("plan", "build", "audit", "patches", "lock", "verify", "cache", "test"):
        assert f"\n    {verb} " in text
    assert "exit codes: 0 all well" in text


def test_what_follows_test_goes_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("imagebuild.testrun.run", lambda rest: seen.append(rest) or 3)
    assert cli.main(["test", "-k", "lock", "--format", "x"]) == 3
    assert seen == [["-k", "lock", "--format", "x"]]


def test_plan_shows_each_value_with_its_source(product: Product) -> None:
    ran = product.run("plan", "--arch", "sm_121", "--base-version", "0.32", "--format", "json")
    assert ran.code == 0
    values = {(row["name"], row["source"]): row["value"] for row in ran.json["values"]}
    assert values["gpu_arch", "flag"] == "sm_121"
    assert values["platform", "recipe.toml"] == "linux/arm64"
    assert values["vLLM", "flag"] == f"0.32.0 (commit {COMMITS['0.32.0']})"
    assert TAGS["linux/arm64"] in values["vllm", "lock.toml"]
    assert ran.json["up_to_date"] is False
    assert product.run("build", "--arch", "sm_121", "--base-version", "0.32").code == 0
    ran = product.run("plan", "--arch", "sm_121", "--base-version", "v0.32.0")
    assert "nothing to do: it is up to date" in ran.out


@pytest.mark.parametrize(
    ("machine", "arch"), [("x86_64", "sm_120"), ("aarch64", "sm_121"), ("riscv64", None)]
)
def test_the_arch_of_this_machine(
    product: Product, monkeypatch: pytest.MonkeyPatch, machine: str, arch: str | None
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    ran = product.run("plan", "--format", "json")
    if arch:
        assert ran.json["gpu_arch"] == arch
        return
    assert (ran.code, ran.json["hint"]) == (2, "add --arch sm_120 or --arch sm_121")
    # What names a tree needs no arch.
    assert product.run("patches", "check", "--against", "0.31.0").code == 0
    assert "expected a site-packages" in product.run("verify", "--tree", "/nowhere").err


def test_the_layer_holds_no_path_of_this_machine(product: Product) -> None:
    root = site(product).parent
    with tarfile.open(root / "layer.tar") as tar:
        for entry in tar.getmembers():
            data = tar.extractfile(entry)
            assert data is not None
            assert str(product.root).encode() not in data.read()
    assert str(product.root).encode() not in (root / "manifest.json").read_bytes()
