from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from serving.profiles import PROFILES

from imagebuild.cli import main

MORE = ["--api-key-secret", "keys", "--node-label", "gpu=gb10", "--node-label", "zone=eu-1_a.b",
        "--node-label", "example.com/spare=", "--replicas", "3"]  # fmt: skip
DRAFTER = {"gb10-4x": ["--drafter-path", "/srv/drafter"]}


def render(capfd, deployment: str, *more: str) -> list[dict[str, Any]]:
    words = ["--deployment", deployment, "--image", "reg/glm:1", "--model-path", "/srv/model"]
    assert main(["render", "kubernetes", *words, *more]) == 0
    return list(yaml.safe_load_all(capfd.readouterr().out))


def pods(workers: dict[str, Any]) -> list[dict[str, Any]]:
    spec = workers["spec"]["leaderWorkerTemplate"]
    return [spec["leaderTemplate"], spec["workerTemplate"]]


def env(pod: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom"))
            for each in pod["spec"]["containers"][0]["env"]}  # fmt: skip


@pytest.mark.parametrize("deployment", PROFILES)
@pytest.mark.parametrize("more", [[], MORE])
def test_valid_by_kubernetes_own_schemas(capfd, deployment: str, more: list[str]) -> None:
    workers, service = render(capfd, deployment, *DRAFTER.get(deployment, []), *more)
    kubernetes_validate.validate(service, "1.33", strict=True)
    profile = PROFILES[deployment]
    assert workers["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    assert workers["spec"]["leaderWorkerTemplate"]["size"] == profile.nodes
    assert workers["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    for pod in pods(workers):
        # The set's own schema is a custom resource's; its templates are Kubernetes' pods.
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod["metadata"]},
             "spec": pod["spec"]}, "1.33", strict=True)  # fmt: skip
        limits = pod["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == profile.gpus
        assert ("rdma/hca_shared_devices_a" in limits) is profile.has_fabric
        assert pod["spec"].get("hostNetwork", False) is profile.has_fabric
        assert env(pod)["GLM_DEPLOYMENT"] == deployment
        assert ("GLM_HEAD" in env(pod)) is (profile.nodes > 1)


def test_the_validator_would_see_a_fault(capfd) -> None:
    _, service = render(capfd, "gb10-2x")
    service["spec"]["ports"][0]["porrt"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, "1.33", strict=True)


def test_ranks_follow_the_controller(capfd) -> None:
    workers, service = render(capfd, "gb10-2x")
    for pod in pods(workers):
        names = [each["name"] for each in pod["spec"]["containers"][0]["env"]]
        assert names[:2] == ["GLM_HEAD", "GLM_RANK"]
        assert env(pod)["GLM_HEAD"] == "$(LWS_LEADER_ADDRESS)"
        assert "worker-index" in env(pod)["GLM_RANK"]["fieldRef"]["fieldPath"]
    leader, worker = pods(workers)
    assert (
        service["spec"]["selector"] == leader["metadata"]["labels"] != worker["metadata"]["labels"]
    )


def expanded(value: str) -> str:
    """As the kubelet does it with a value: $(NAME) is a variable, $$ is one $."""
    return re.sub(r"\$\$|\$\(\w+\)", lambda m: "$" if m[0] == "$$" else "EXPANDED", value)


def test_knobs_reach_every_rank_as_text(capfd) -> None:
    hostile = '["--hf-overrides", "{\\"a\\": \\"$(id) $$x $y # : \'\\"}"]'
    workers, _ = render(capfd, "rtx6000-4x", "--set", f"GLM_EXTRA_ARGS={hostile}", "--set",
                        "GLM_API_PORT=8100", "--set", "GLM_MODEL_DIR=/m")  # fmt: skip
    for pod in pods(workers):
        assert expanded(env(pod)["GLM_EXTRA_ARGS"]) == hostile
        container = pod["spec"]["containers"][0]
        assert container["ports"] == [{"name": "api", "containerPort": 8100}]
        assert container["volumeMounts"][0]["mountPath"] == "/m"


@pytest.mark.parametrize("name", ["on", "true", "null", "y", "e1"])
def test_names_stay_text(capfd, name: str) -> None:
    workers, service = render(capfd, "rtx6000-4x", "--name", name, "--namespace", name)
    for made in (workers, service):
        assert (made["metadata"]["name"], made["metadata"]["namespace"]) == (name, name)
    assert service["spec"]["selector"] == {"app": name, "role": "leader"}
    assert all(pod["metadata"]["labels"]["app"] == name for pod in pods(workers))


def test_a_start_is_not_ended_before_it_gives_up_itself(capfd) -> None:
    workers, _ = render(capfd, "gb10-2x", "--set", "GLM_LOAD_TIMEOUT_S=7200",
                        "--set", "GLM_JOIN_TIMEOUT_S=3600")  # fmt: skip
    for pod in pods(workers):
        probe = pod["spec"]["containers"][0]["startupProbe"]
        assert 3600 + 7200 < probe["failureThreshold"] * probe["periodSeconds"] < 14400


@pytest.mark.parametrize(("words", "found"), [
    (["--deployment", "gb10-9x"], "GLM_DEPLOYMENT='gb10-9x' is no deployment"),
    (["--set", "GLM_TP=3"], "GLM_TP='3'"), (["--set", "GLM_NO=1"], "there is no such knob"),
    (["--set", "GLM_HEAD=10.0.0.1"], "--set GLM_HEAD: the manifest sets it itself"),
    (["--set", "PATH=/x"], "expected a name that starts with GLM_"),
    (["--set", "GLM_TP"], "--set: expected NAME=VALUE"), (["--name", "GLM 53"], "--name: expected"),
    (["--model-path", "here"], "--model-path: expected an absolute path"),
    (["--model-path", "/m/../x"], "--model-path: expected"), (["--image", "x\ny"], "--image: exp"),
    (["--cache-path", "/a\nb"], "--cache-path: expected"), (["--image=-x"], "--image: expected"),
    (["--node-label", "a: b=c"], "--node-label: expected"), (["--node-label", "a=b c"], "'a=b c'"),
    (["--cluster", "ray", "--set", "GLM_CLUSTER=mentat"], "GLM_CLUSTER=mentat, but this image"),
    (["--set", "GLM_SPECULATION=dflash2"], "--drafter-path: speculation is dflash2"),
    (["--drafter-path", "/srv/d"], "speculation is mtp"), (["--rdma", "x y"], "--rdma: expected"),
])  # fmt: skip
def test_what_cannot_be_meant(capfd, words: list[str], found: str) -> None:
    base = ["--deployment", "gb10-2x", "--image", "x", "--model-path", "/srv/model"]
    assert main(["render", "kubernetes", *base, *words]) == 2
    assert found in capfd.readouterr().err


def test_output_and_json(capfd, tmp_path: Path) -> None:
    words = ["--deployment", "gb10-2x", "--image", "x", "--model-path", "/m", "--format", "json"]
    assert main(["render", "kubernetes", *words, "--output", str(tmp_path / "o.yaml")]) == 0
    assert json.loads(capfd.readouterr().out)["manifests"] == (tmp_path / "o.yaml").read_text()
    assert main(["render", "kubernetes"]) == 2
    assert "expected --deployment, --image, --model-path" in capfd.readouterr().err
