"""The project's Dockerfile is clean, by hadolint and by our rules; each rule finds its fault."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from imagebuild.config import ROOT
from imagebuild.lint.dockerfile import RULES, check, check_file

DOCKERFILE = ROOT / "Dockerfile"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HASH = "0" * 64

# By rule: instructions with one fault in the line that ends in "  # here".
FAULTS: list[tuple[str, str]] = [
    ("frontend", "# syntax=docker/dockerfile:1  # here\n"),
    ("base-unpinned", "FROM debian:12  # here\n"),
    ("base-unpinned", "ARG OTHER=debian:12\nFROM ${OTHER}  # here\n"),
    ("add-unpinned", "ADD https://example.org/a.tgz /a  # here\n"),
    ("add-unpinned", "ADD https://example.org/a.git#main /a  # here\n"),
    ("add-unpinned", f"ADD https://example.org/a.git#{COMMIT[:12]} /a  # here\n"),
    ("add-unpinned", "ADD ${NOWHERE} /a  # here\n"),
    ("fetch-unchecked", "RUN curl -fLO https://example.org/a  # here\n"),
    ("fetch-unchecked", "RUN set -e; \\\n  A=1 /usr/bin/wget https://example.org/a  # here\n"),
    ("git-unpinned", "RUN git clone --branch v1 https://example.org/a.git  # here\n"),
    ("pip-unhashed", "RUN python3 -m pip install wheel==1.0  # here\n"),
    ("pip-unhashed", "RUN true && \\\n  pip3 install -r a.txt  # here\n"),
    ("pip-unhashed", "RUN uv pip install wheel  # here\n"),
    ("apt", "RUN apt-get install -y git  # here\n"),
    ("swallowed", "RUN make || true  # here\n"),
    ("swallowed", "RUN make || :  # here\n"),
    ("swallowed", 'RUN ["sh", "-c", "make || true"]  \n'),
    ("swallowed", "RUN for f in a b; do \\\n  make $f || echo skipped; \\\n  done  # here\n"),
    ("exit-zero", "RUN set -e; make; exit 0  # here\n"),
    ("errexit-off", "RUN set +e; make  # here\n"),
    ("loop-swallows", "RUN for f in a b; do \\\n  make $f; \\\n done  # here\n"),
    ("loop-swallows", "RUN set -e; while read f; do make $f; done < list && ls  # here\n"),
    ("loop-swallows", "RUN if true; then for f in a; do make $f; done; fi  # here\n"),
    ("sequence-swallows", "RUN cd /src; make  # here\n"),
    ("sequence-swallows", "RUN make & make install  # here\n"),
    ("pipe-swallows", "RUN tar c a | tar x  # here\n"),
    ("pipe-swallows", 'RUN A="$(cat a | sort)" make  # here\n'),
]
CLEAN = [
    f"ADD https://example.org/a.git#{COMMIT} /a\n",
    f"ADD --checksum=sha256:{HASH} https://example.org/a.tgz /a\n",
    "ADD a.txt /a\n",
    f"RUN curl -fLO https://example.org/a && echo '{HASH}  a' | sha256sum -c\n".replace(
        "RUN ", "RUN set -o pipefail && "),
    f"RUN git clone https://example.org/a.git && git -C a checkout {COMMIT}\n",
    "RUN pip install --require-hashes -r a.txt\n",
    "RUN set -ex; for f in a b; do make $f; done\n",
    "RUN for f in a b; do make $f || exit 1; done\n",
    "RUN if [ -e a ]; then make; fi\n",
    "RUN make || { echo 'no luck'; exit 1; }\n",
    "RUN echo 'a || true; exit 0 | b'\n",
    "RUN make  # || true\n",
    'SHELL ["bash", "-eo", "pipefail", "-c"]\nRUN make; tar c a | tar x\n',
    "RUN <<END\nset -e\nfor f in a b; do\n  make $f\ndone\nmake install\nEND\n",
    "RUN make 2>&1 && make install >/dev/null\n",
]  # fmt: skip


def dockerfile(text: str) -> str:
    """A whole file around some instructions."""
    if text.startswith(("# syntax", "FROM", "ARG")):
        return text if "FROM" in text else f"{text}FROM scratch\n"
    return f"FROM base@sha256:{HASH}\n{text}"


@pytest.mark.parametrize(("code", "text"), FAULTS)
def test_each_rule_finds_its_fault_and_its_line(code: str, text: str) -> None:
    whole = dockerfile(text).replace("  # here", "")
    found = check(whole, "some/Dockerfile")
    assert code in {one.code for one in found}, found
    fault = next(one for one in found if one.code == code)
    assert (fault.file, fault.level) == ("some/Dockerfile", "error")
    assert fault.fix == RULES[code]
    lines = whole.splitlines()
    words = ("make", "curl", "wget", "pip", "apt", "git", "tar", "cat", "ADD", "FROM", "syntax",
             "set +e")  # fmt: skip
    assert any(word in lines[fault.line - 1] for word in words), (fault, lines[fault.line - 1])


def test_every_rule_has_a_planted_fault() -> None:
    assert {code for code, _text in FAULTS} == set(RULES)


@pytest.mark.parametrize("text", CLEAN)
def test_what_is_right_is_not_found(text: str) -> None:
    assert check(dockerfile(text)) == []


def test_lines_of_continued_instructions_and_heredocs() -> None:
    text = (
        f"FROM base@sha256:{HASH}\n"
        "RUN --network=none \\\n"
        "    # a comment inside\n"
        "    true && \\\n"
        "    make || true\n"
        "RUN <<END\n"
        "make one\n"
        "make two\n"
        "END\n"
    )
    assert [(one.line, one.code) for one in check(text)] == [
        (5, "swallowed"),
        (7, "sequence-swallows"),
    ]


def test_build_arguments_decide_what_is_pinned() -> None:
    text = "ARG BASE=debian:12\nFROM ${BASE}\n"
    assert [one.code for one in check(text)] == ["base-unpinned"]
    assert check(text, arguments={"BASE": f"debian@sha256:{HASH}"}) == []


def test_our_dockerfile_is_clean() -> None:
    assert check_file(DOCKERFILE) == []


def test_our_dockerfile_with_a_fault_is_not_clean(tmp_path: Path) -> None:
    """The check above looks at the real file: one more line in it is found."""
    copy = tmp_path / "Dockerfile"
    text = DOCKERFILE.read_text()
    copy.write_text(text + "RUN python3 -c 'x' || true\n")
    (fault,) = check_file(copy)
    assert (fault.code, fault.line) == ("swallowed", len(text.splitlines()) + 1)


def hadolint(path: Path) -> list[dict[str, object]]:
    tool = Path(sys.executable).with_name("hadolint")
    command = [str(tool), "--config", str(ROOT / ".hadolint.yaml"), "--format", "json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return list(json.loads(done.stdout))


def test_hadolint_finds_nothing() -> None:
    assert hadolint(DOCKERFILE) == []


def test_hadolint_would_find_a_fault(tmp_path: Path) -> None:
    copy = tmp_path / "Dockerfile"
    copy.write_text(DOCKERFILE.read_text() + "RUN sudo make\n")
    assert [one["code"] for one in hadolint(copy)] == ["DL3004"]
