"""What doctor makes of a host: each lack is a finding, and the exit code follows."""

from __future__ import annotations

import ipaddress
import json
from pathlib import Path

import pytest
from serving import network

from imagebuild.cli import main
from imagebuild.config import ROOT
from imagebuild.doctor import host
from imagebuild.doctor.host import Asked, Finding
from imagebuild.errors import UsageError
from tests.image.serving.machines import checkpoint, gpus, machine

WELL = {
    ("docker", "version"): "29.1",
    ("docker", "buildx"): "v0.30",
    ("docker", "compose"): "v2.40",
    ("docker", "info"): '{"nvidia": {}, "runc": {}}',
}


class FakeTools(host.Tools):
    def __init__(self, **changed):
        self.answers = WELL | {("docker", name): text for name, text in changed.items()}

    def output(self, *command):
        return self.answers.get(command[:2])


def examine(deployment="rtx6000-4x", model=None, knobs=None, tools=None, **changed):
    asked = Asked(deployment, model, knobs or {})
    plan = host.plan_of(asked, ROOT / "image" / "runtime")
    found = host.examine(plan, asked, machine(deployment, **changed), tools or FakeTools())
    return {finding.code: finding for finding in found if finding.level != "ok"}, found


def test_all_is_well(tmp_path):
    bad, found = examine(model=checkpoint(tmp_path))
    assert bad == {}
    assert [finding.code for finding in found] == [
        "engine", "runtime", "gpu", "ports", "network", "space", "weights",
    ]  # fmt: skip
    assert host.exit_code(found, is_strict=True) == 0


@pytest.mark.parametrize(
    ("changed", "code", "part"),
    [
        ({"tools": FakeTools(version=None)}, "engine", "docker does not answer"),
        ({"tools": FakeTools(buildx=None)}, "engine", "docker buildx is not installed"),
        ({"tools": FakeTools(info='{"runc": {}}')}, "runtime", "nvidia-ctk is missing"),
        ({"cards": gpus("rtx6000-4x")[:2]}, "gpu", "expected 4 GPUs"),
        ({"error": "nvidia-smi cannot be run"}, "gpu", "no GPU can be seen"),
        ({"taken": frozenset({8002})}, "ports", "GLM_API_PORT=8002"),
        ({"space": 1 << 30}, "space", "expected 60 GiB for images, found 1"),
        ({"model": Path("/no/such")}, "weights", "is not there"),
    ],
)
def test_each_lack_is_a_failure(changed, code, part):
    bad, found = examine(**changed)
    assert bad[code].level == "fail"
    assert part in bad[code].message
    assert host.exit_code(found, is_strict=False) == 3


def test_warnings_count_when_strict():
    bad, found = examine(tools=FakeTools(info="no JSON"), filesystem_type="nfs4")
    assert {finding.level for finding in bad.values()} == {"warn"}
    assert host.exit_code(found, is_strict=False) == 0
    assert host.exit_code(found, is_strict=True) == 1


def test_a_ring_asks_for_its_ports(monkeypatch, tmp_path):
    # The one address that every machine has.
    port = network.Port("rocep1s0f0", "lo", ipaddress.IPv4Address("127.0.0.1"), 3, "ACTIVE", 200)
    monkeypatch.setattr(network, "rdma_ports", lambda *_: [port])
    knobs = {"GLM_TP": "RING4", "GLM_RING_PREVIOUS": "lo", "GLM_RING_NEXT": "eth1",
             "GLM_STATE_DIR": str(tmp_path)}  # fmt: skip
    bad, _ = examine("gb10-4x", knobs=knobs)
    assert bad["network"].level == "fail"
    assert "GLM_RING_NEXT=eth1: expected an RDMA device" in bad["network"].message
    assert list(tmp_path.iterdir()) == []


def test_network_file_system(tmp_path):
    bad, _found = examine(model=checkpoint(tmp_path), filesystem_type="nfs4")
    assert bad["weights"].fix == "copy it to a local disk"


def test_fabric_of_several_nodes(monkeypatch, tmp_path):
    monkeypatch.setattr(network, "addresses", dict)
    bad, _found = examine("gb10-2x")
    assert "expected an RDMA port" in bad["network"].message


def test_contradictions_are_usage():
    with pytest.raises(UsageError, match="GLM_BLOCK_SIZE=300"):
        examine(knobs={"GLM_BLOCK_SIZE": "300"})


def test_words_of_the_document():
    assert Finding("warn", "space", "little", "prune").document() == {
        "level": "warning", "code": "space", "file": None, "line": None, "message": "little",
        "fix": "prune",
    }  # fmt: skip


def test_verb(capsys):
    """On whatever machine this runs: a document, and a code that goes with it."""
    code = main(["doctor", "rtx6000-4x", "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == code
    assert found["ok"] == (code != 3)
    assert {finding["code"] for finding in found["findings"]} >= {"gpu", "weights"}
    assert main(["doctor", "gb10-3x"]) == 2
    assert main(["doctor", "gb10-2x", "--set", "GLM_TP"]) == 2
    assert "gb10-2x, gb10-4x" in capsys.readouterr().err
