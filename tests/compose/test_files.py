"""The compose files as data; `docker compose config` and real starts are in tests/engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving.profiles import PROFILES
from serving.table import KNOBS

COMPOSE = Path(__file__).resolve().parents[2] / "compose"
FILES = sorted(COMPOSE.glob("*.yaml"))
OVERRIDES = sorted((COMPOSE / "overrides").glob("*.yaml"))


def service(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())["services"]["glm53"]
    return found


def test_one_file_a_deployment() -> None:
    assert [file.stem for file in FILES] == sorted(PROFILES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
class TestDeployment:
    def test_every_knob_is_passed_through_and_none_has_a_value(self, file: Path) -> None:
        environment = service(file)["environment"]
        assert environment.pop("GLM_DEPLOYMENT") == file.stem
        assert set(environment) == set(KNOBS) - {"GLM_DEPLOYMENT"}
        assert set(environment.values()) == {None}, "a default here would hide the entry point's"

    def test_nothing_is_folded_into_a_shell(self, file: Path) -> None:
        """A folded command is one string to a shell: a deleted flag splits it in two."""
        assert not {"command", "entrypoint"} & set(service(file))

    def test_what_such_a_machine_needs(self, file: Path) -> None:
        found = service(file)
        assert (found["network_mode"], found["ipc"]) == ("host", "host")
        assert found["ulimits"] == {"memlock": -1, "stack": 67108864, "core": 0}
        assert found["logging"]["options"] == {"max-size": "50m", "max-file": "5"}
        has_fabric = PROFILES[file.stem].has_fabric
        assert found.get("devices", []) == (["/dev/infiniband"] if has_fabric else [])
        [gpu] = found["deploy"]["resources"]["reservations"]["devices"]
        assert gpu["capabilities"] == ["gpu"] and gpu["count"] == "all"

    def test_a_missing_folder_is_said_in_words(self, file: Path) -> None:
        model = service(file)["volumes"][0]
        assert model["read_only"] is True and model["bind"] == {"create_host_path": False}
        assert re.fullmatch(r"\$\{MODEL_HOST_DIR:\?.+\}", model["source"])
        assert re.fullmatch(r"\$\{IMAGE:\?.+\}", service(file)["image"])

    def test_places_follow_their_knobs(self, file: Path) -> None:
        """A default that stands here, too, must be the entry point's."""
        for name, value in re.findall(r"\$\{(GLM_\w+):-([^}]*)\}", file.read_text()):
            assert {default.text for default in KNOBS[name].defaults.values()} == {value}, name

    def test_it_drains_longer_than_the_entry_point(self, file: Path) -> None:
        drain = int(KNOBS["GLM_DRAIN_TIMEOUT_S"].defaults[file.stem].text)
        assert service(file)["stop_grace_period"] == f"${{STOP_GRACE:-{drain + 30}s}}"


@pytest.mark.parametrize("file", OVERRIDES, ids=lambda file: file.stem)
def test_overrides_set_only_knobs_that_there_are(file: Path) -> None:
    assert set(service(file).get("environment", {})) <= set(KNOBS)
    for name in re.findall(r"\$\{(GLM_\w+)", file.read_text()):
        assert name in KNOBS


def test_secrets_are_files() -> None:
    """What a container's environment holds stands in `docker inspect`."""
    for file in OVERRIDES:
        found = yaml.safe_load(file.read_text())
        environment = found["services"]["glm53"].get("environment", {})
        hidden = {name for name in environment if re.search("KEY|TOKEN|PASSWORD", name)}
        assert all(environment[name].startswith("/run/secrets/") for name in hidden), file
        assert all(set(secret) == {"file"} for secret in found.get("secrets", {}).values()), file
