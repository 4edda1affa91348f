"""Packages are installed by hash or not at all; a cluster's parts are complete or refused."""

from __future__ import annotations

import contextlib
import hashlib
import io
from pathlib import Path

import pytest

from imagebuild.steps import cluster, debs


def package(folder: Path, name: str = "a_1_all.deb", content: bytes = b"deb") -> str:
    (folder / name).write_bytes(content)
    return f"{hashlib.sha256(content).hexdigest()}  {name}\n"


def test_no_packages_is_said_and_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert debs.main([str(tmp_path)]) == 0
    assert "--build-context debs=DIR" in capsys.readouterr().out


def test_good_sums(tmp_path: Path) -> None:
    (tmp_path / "SHA256SUMS").write_text(package(tmp_path) + package(tmp_path, "b_2_all.deb", b"x"))
    assert debs.check(tmp_path) == []


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        (None, "found none"),
        ("", "a_1_all.deb: not listed"),
        ("0" * 64 + "  a_1_all.deb\n", "expected sha256 000"),
        ("{good}" + "1" * 64 + "  gone.deb\n", "gone.deb: listed, not there"),
        ("{good}nonsense\n", "a line of SHA256SUMS"),
        ("{good}" + "1" * 64 + "  ../up.deb\n", "a line of SHA256SUMS"),
    ],
)
def test_sums_that_do_not_hold_stop_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sums: str | None, expected: str
) -> None:
    good = package(tmp_path)
    if sums is not None:
        (tmp_path / "SHA256SUMS").write_text(sums.replace("{good}", good))
    assert debs.main([str(tmp_path)]) == 4
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("machine", "code"), [("amd64", 0), ("arm64", 4)])
def test_each_architecture_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, code: int
) -> None:
    """A machine whose folder is missing must not end green without its packages."""
    (tmp_path / "amd64").mkdir()
    (tmp_path / "amd64" / "SHA256SUMS").write_text(package(tmp_path / "amd64"))
    commands = []

    class Done:
        returncode, stdout = 0, f"{machine}\n"

    monkeypatch.setattr(
        debs.subprocess, "run", lambda command, **_: commands.append(command[:2]) or Done
    )
    assert debs.main([str(tmp_path)]) == code
    assert commands[1:] == ([["dpkg", "--install"]] if code == 0 else [])


def test_a_base_that_has_all_packages_gets_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "SHA256SUMS").write_text("")
    assert debs.main([str(tmp_path)]) == 0
    assert "the base has them all" in capsys.readouterr().out


def test_dpkg_that_fails_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "SHA256SUMS").write_text(package(tmp_path))
    commands, epochs = [], []

    class Done:
        returncode = 1

    def run(command: list[str], *, env: dict[str, str], **_options: object) -> type[Done]:
        commands.append(command)
        epochs.append(env.get("SOURCE_DATE_EPOCH"))
        return Done

    monkeypatch.setattr(debs.subprocess, "run", run)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1791186062")
    assert debs.main([str(tmp_path)]) == 5
    assert epochs == ["1791186062"]  # a script of a package may write the day into a file
    assert commands == [["dpkg", "--install", "--force-unsafe-io", str(tmp_path / "a_1_all.deb")]]
    assert "depend" in capfd.readouterr().err


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(cluster, "_BIN", folder)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def mentat(folder: Path, version: str = "0.17.1", name: str = "mentat") -> Path:
    folder.mkdir()
    text = (
        f'#!/bin/sh\ncase "$0" in *ray) echo "{name} as ray {version}";;\n'
        f'*) echo "mentatd {version}";; esac\n'
    )
    (folder / "mentatd").write_text(text)
    (folder / "mentatd-probe-machine").write_text("#!/bin/sh\n")
    return folder


def test_mentat_answers_under_both_names(tmp_path: Path, bin_folder: Path) -> None:
    given = mentat(tmp_path / "given")
    assert cluster.main(["mentat", str(given), "--version", "0.17.1"]) == 0
    assert (bin_folder / "ray").readlink() == Path("mentatd")
    assert (bin_folder / "mentatd-probe-machine").stat().st_mode & 0o777 == 0o755


@pytest.mark.usefixtures("bin_folder")
@pytest.mark.parametrize(
    ("lacking", "version", "code", "expected"),
    [
        ("mentatd-probe-machine", "0.17.1", 4, "mentatd-probe-machine"),
        ("", "", 4, "--mentat-version"),
        ("", "0.18.0", 3, "expected 0.18.0"),
    ],
)
def test_mentat_that_is_not_whole_is_refused(
    tmp_path: Path, lacking: str, version: str, code: int, expected: str
) -> None:
    given = mentat(tmp_path / "given")
    if lacking:
        (given / lacking).unlink()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert cluster.main(["mentat", str(given), "--version", version]) == code
    assert expected in said.getvalue()


def test_mentat_beside_ray_is_refused(
    tmp_path: Path, bin_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bin_folder / "ray").write_text("#!/bin/sh\n")
    (bin_folder / "ray").chmod(0o755)
    assert cluster.main(["mentat", str(mentat(tmp_path / "given")), "--version", "0.17.1"]) == 2
    assert "share a name" in capsys.readouterr().err


def test_what_the_base_has_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(cluster, "_run", lambda command: ran.append(list(command)) or "")
    known = {"packaging": "25.0", "typing-extensions": "4.15.0", "ray": "2.40.0"}
    monkeypatch.setattr(cluster, "_installed", known.get)
    wheels = [tmp_path / f"{name}-9-py3-none-any.whl"
              for name in ("msgpack", "packaging", "ray", "typing_extensions")]  # fmt: skip
    cluster._install(wheels, "ray")
    assert [Path(word).name.partition("-")[0] for word in ran[0][-2:]] == ["msgpack", "ray"]
    assert ran[0][2:4] == ["pip", "install"]
    said = capsys.readouterr().out
    assert "packaging-9-py3-none-any.whl is left out: the base has packaging 25.0" in said
    assert "the base has typing-extensions 4.15.0" in said
    ran.clear()
    cluster._install(wheels[1:2], "ray")
    assert not ran


def test_ray_must_be_there_and_be_ray(
    tmp_path: Path,
    bin_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cluster.main(["ray", str(tmp_path)]) == 4
    assert "--build-context ray=DIR" in capsys.readouterr().err
    ray = bin_folder / "ray"
    ray.write_text("#!/bin/sh\necho mentat as ray\n")
    ray.chmod(0o755)
    assert cluster.main(["ray", str(tmp_path)]) == 3
    ray.write_text("#!/bin/sh\necho ray, version 2.50.0\n")
    assert cluster.main(["ray", str(tmp_path)]) == 5  # and nothing to import
    assert "No module named 'ray'" in capsys.readouterr().err
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for version, code in (("2.49.0", 3), ("2.50.0", 0)):
        (tmp_path / "ray.py").write_text(f"__version__ = {version!r}\n")
        assert cluster.main(["ray", str(tmp_path)]) == code
