"""The published schema says what the JSON report holds: all of it, and nothing else."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from imagebuild.audit.report import render
from imagebuild.audit.results import Audit
from imagebuild.patching.evaluate import Verdict
from imagebuild.patching.workspace import State
from tests.support import audits
from tests.support.product import REPOSITORY, Product

SCHEMA = json.loads((REPOSITORY / "docs" / "audit.schema.json").read_text())


def closed(node: Any) -> Any:
    """The schema as one that admits no field that it does not name."""
    if isinstance(node, list):
        return [closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    found = {key: closed(value) for key, value in node.items()}
    if "properties" in found:
        found["additionalProperties"] = False
    return found


STRICT = Draft202012Validator(closed(SCHEMA))


def document(audit: Audit) -> Any:
    return json.loads(render("json", audit, audits.about()))


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize(
    "audit",
    [audits.full(), audits.hostile()[0], audits.audit(), audits.audit(audits.all_green())],
    ids=["full", "hostile", "nothing", "green"],
)
def test_a_report_holds_what_the_schema_names(audit: Audit) -> None:
    STRICT.validate(document(audit))


def test_what_the_command_prints_is_valid(product: Product) -> None:
    for arguments in (["--against", ">=0.31"], ["--against", ">=5"], ["--against", "0.32.0"]):
        STRICT.validate(product.run("audit", *arguments, "--format", "json").json)


def test_a_field_that_is_missing_unknown_or_of_another_type_is_found() -> None:
    good = document(audits.full())
    for change in (
        lambda d: d.pop("conclusion"),
        lambda d: d["releases"][2].pop("pin_changes"),
        lambda d: d["releases"][2]["patches"][0].update(verdict="fine"),
        lambda d: d["releases"][2]["patches"][0].update(more=1),
        lambda d: d["releases"][2]["patches"][3]["findings"][0].update(line="7"),
        lambda d: d["watch"].update(lock_code=2),
    ):
        bad = copy.deepcopy(good)
        change(bad)
        assert not STRICT.is_valid(bad)


def test_its_words_are_those_of_the_code() -> None:
    definitions = SCHEMA["$defs"]
    assert set(definitions["verdict"]["enum"]) == {verdict.value for verdict in Verdict}
    states = {state.value for state in State} - {State.PARTIAL.value}
    assert set(definitions["edit"]["properties"]["state"]["enum"]) == states
