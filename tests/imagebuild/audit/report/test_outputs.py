"""Reports through the command line: one to stdout, any number to files, in one run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from imagebuild.audit.report import FORMATS
from imagebuild.options.series import AUDIT_FORMATS
from tests.support.product import GREETER, TAGS, Product, Ran, release_files
from tests.support.wheels import build_wheel


def drifted(product: Product) -> None:
    """A release of which the greeter's text is gone."""
    files = release_files("0.33.0", "linux/amd64")
    files["vllm/_version.py"] = b"__version__ = '0.33.1'\n__commit_id__ = 'gddddddd'\n"
    files["vllm/greeter.py"] = files["vllm/greeter.py"].replace(b'"hello"', b'"hi"')
    build_wheel(product.wheels, version="0.33.1", tag=TAGS["linux/amd64"], files=files,
                requires=["flashinfer-python==0.7.2"])  # fmt: skip


def starts(name: str, text: str) -> bool:
    """Whether a text looks like a report in that format; each one's own tests say more."""
    if name == "json":
        return json.loads(text)["schema"] == 1
    if name == "sarif":
        return json.loads(text)["version"] == "2.1.0"
    if name == "junit":
        return ET.fromstring(text).tag == "testsuites"
    first = {"text": "vLLM", "markdown": "# Drift audit", "html": "<!doctype html>",
             "github": "::error "}[name]  # fmt: skip
    return text.lstrip().startswith(first)


def test_the_formats_are_those_of_the_command_line() -> None:
    assert AUDIT_FORMATS == FORMATS


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_stdout_alone_and_the_code_stays(product: Product, name: str) -> None:
    drifted(product)
    ran = product.run("audit", "--against", "0.33.1", "--format", name)
    assert ran.code == 3
    assert name == "text" or starts(name, ran.out), ran.out[:200]
    assert GREETER in ran.out
    assert ran.out.endswith("\n")


def test_one_run_writes_every_report(product: Product, tmp_path: Path) -> None:
    drifted(product)
    files = {name: tmp_path / "new folder" / f"audit.{name}" for name in FORMATS}
    asked = [word for name, file in files.items() for word in ("--report", f"{name}={file}")]
    ran = product.run("audit", "--against", "0.33.1", "--format", "github", *asked)
    assert ran.code == 3
    assert ran.out.startswith("::error file=patches/tiny/vllm_greeter_polite_words.py,line=1,")
    for name, file in files.items():
        text = file.read_text()
        assert name == "text" or starts(name, text), text[:200]
        assert GREETER in text
        assert f"- {name} report: {file}\n" in ran.err
    plain = product.run("audit", "--against", "0.33.1")
    assert files["text"].read_text().split("\n")[0] == plain.out.split("\n")[0]
    assert [file.name for file in files["text"].parent.iterdir() if file.name[0] == "."] == []


def test_a_report_stands_although_the_audit_is_red(product: Product, tmp_path: Path) -> None:
    file = tmp_path / "audit.json"
    file.write_text("of yesterday")
    drifted(product)
    ran = product.run("audit", "--against", "0.33.1", "--report", f"json={file}")
    assert (ran.code, json.loads(file.read_text())["exit_code"]) == (3, 3)


def refused(product: Product, *asked: str) -> Ran:
    """A call that must fail before anything is fetched."""
    words = [word for text in asked for word in ("--report", text)]
    ran = product.run("audit", *words)
    assert (ran.code, ran.out) == (2, "")
    assert product.server.asked == []
    return ran


@pytest.mark.parametrize("text", ["", "html", "html=", "=a.html", "pdf=a.pdf", "HTML=a"])
def test_what_is_no_format_and_file(product: Product, text: str) -> None:
    ran = refused(product, text)
    assert f"--report: expected FORMAT=FILE, found {text!r}" in ran.err
    assert "formats: text, json, markdown, html, sarif, junit, github" in ran.err


def test_a_file_that_cannot_be_one(product: Product, tmp_path: Path) -> None:
    assert "expected a file, found a folder" in refused(product, f"html={tmp_path}").err
    assert "expected a file, found a folder" in refused(product, f"html={tmp_path}/new/").err
    assert "found a device or pipe" in refused(product, "sarif=/dev/null").err
    one, other = tmp_path / "a", tmp_path / "b" / ".." / "a"
    assert "found it twice" in refused(product, f"html={one}", f"sarif={other}").err
    assert list(tmp_path.glob("*a*")) == []


def test_a_folder_that_cannot_be_written(product: Product, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = product.run("audit", "--report", f"html={tmp_path / 'file' / 'a.html'}")
    assert ran.code == 5
    assert f"{tmp_path / 'file'}: expected" in ran.err
