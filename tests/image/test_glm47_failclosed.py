"""The checks of the tool-parser plug-in, without vLLM; the parser itself is run by the deep probe
`imagebuild/deep/parser_contract.py`."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

SOURCE = Path(__file__).resolve().parents[2] / "image" / "runtime" / "glm47_failclosed.py"
_spec = importlib.util.spec_from_file_location("glm47_failclosed", SOURCE)
plugin = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = plugin
_spec.loader.exec_module(plugin)

OFFER = {
    "read": frozenset({"path", "lines"}),
    "read_all": frozenset({"path"}),
    "ping": frozenset(),
    "any": None,
}


def converter(raw, partial):
    """Stands in for the release's: what is no pair is passed over, the last equal key wins."""
    assert not partial
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", raw, re.DOTALL)
    return json.dumps({key.strip(): value for key, value in pairs}, ensure_ascii=False)


def pair(key, value):
    return f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"


def decide(name, raw="", *, closed=True, offer=None, convert=converter):
    return plugin.decide(
        name, raw, closed=closed, offer=OFFER if offer is None else offer, convert=convert
    )


@pytest.mark.parametrize(
    ("written", "tool"),
    [
        ("read", "read"),
        ("read_all", "read_all"),
        ("read</arg_key>", "read"),
        ("read_all now", "read_all"),
        ("read\n{", "read"),
        ("read2", None),
        ("read_al", None),
        ("read-", None),
        ("read.", None),
        ("reädé", None),
        ("readé", None),
        ("Read", None),
        (" read", None),
        ("", None),
    ],
)
def test_a_name_means_the_longest_offered_beginning(written, tool):
    assert plugin.resolve(written, OFFER) == tool


def test_an_empty_offered_name_means_nothing():
    assert plugin.resolve("anything", [""]) is None


@pytest.mark.parametrize(
    ("name", "raw", "arguments"),
    [
        ("read", pair("path", "/a") + "\n" + pair("lines", "3"), {"path": "/a", "lines": "3"}),
        ("read\n", "", {}),
        ("ping", " \n", {}),
        ("any", pair("whatever", "<b> & 数"), {"whatever": "<b> & 数"}),
        ("read", pair(" path ", ""), {"path": ""}),
    ],
)
def test_a_good_call_is_offered_as_written(name, raw, arguments):
    verdict = decide(name, raw)
    assert verdict.reason == ""
    assert verdict.name == name.strip()
    assert json.loads(verdict.arguments) == arguments


@pytest.mark.parametrize(
    ("name", "raw", "offered_as", "reason"),
    [
        ("reed", "", "reed", "there is no tool 'reed'; the tools are any, ping, read, read_all"),
        ("re ad", "", "unknown_tool", "the tool name 're ad' is not shaped like a name"),
        ("", pair("path", "x"), "unknown_tool", "the tool name '' is not shaped like a name"),
        ("8ball", "", "unknown_tool", "the tool name '8ball' is not shaped like a name"),
        ("x" * 65, "", "unknown_tool", f"the tool name '{'x' * 65}' is not shaped like a name"),
        ("read", pair("file", "x"), "read", "read has no argument 'file'; it takes lines, path"),
        ("read|", pair("file", "x"), "read", "read has no argument 'file'; it takes lines, path"),
        ("ping", pair("host", "x"), "ping", "ping has no argument 'host'; it takes none"),
        ("any", pair(" ", "x"), "any", "the arguments of any hold a value without a key"),
        (
            "read",
            pair("path", "a") + "<arg_key>lines</arg_key>3",
            "read",
            "the arguments of read hold '<arg_key>lines</arg_key>3', which is no key with its "
            "value",
        ),
        (
            "read",
            pair("path", "a") + pair("path ", "b"),
            "read",
            "the arguments of read give 'path' more than once",
        ),
    ],
)
def test_a_bad_call_is_offered_with_the_reason(name, raw, offered_as, reason):
    verdict = decide(name, raw)
    assert verdict.name == offered_as
    assert verdict.reason == reason
    assert json.loads(verdict.arguments) == {"_rejected_by_server": reason}


def test_a_call_that_is_cut_off_is_refused():
    """The converter leaves the unfinished value out, and what remains looks complete."""
    raw = pair("path", "/a") + "<arg_key>lines</arg_key><arg_value>1"
    assert decide("read", raw, closed=False).reason == "the call of read was cut off before its end"
    assert decide("read", closed=False).reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "the arguments of read are a JSON list, expected an object"),
        ("null", "the arguments of read are a JSON NoneType, expected an object"),
        ("{", "the arguments of read are no JSON: Expecting property name"),
    ],
)
def test_arguments_must_be_an_object(text, reason):
    assert decide("read", convert=lambda *_: text).reason.startswith(reason)


def test_a_converter_that_raises_refuses_the_call():
    def broken(raw, partial):
        raise TypeError("no")

    assert decide("read", convert=broken).reason == "the arguments of read are no JSON: no"


def test_without_offered_tools_only_the_shape_counts():
    assert decide("whatever", pair("a", "b"), offer={}).reason == ""
    assert decide("what ever", offer={}).reason


def test_an_offered_name_needs_no_shape():
    assert decide("8 数", offer={"8 数": None}).reason == ""


def test_a_long_name_is_cut_in_the_reason():
    assert len(decide("x " * 500).reason) < 200


plain = st.text(st.characters(blacklist_characters="<", blacklist_categories=["Cs"]))


@given(st.dictionaries(st.sampled_from(["path", "lines"]), plain))
def test_whatever_the_values_are_a_good_call_passes(arguments):
    verdict = decide("read", "".join(pair(*item) for item in arguments.items()))
    assert (verdict.reason, json.loads(verdict.arguments)) == ("", arguments)


fragments = st.sampled_from(
    [
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "path",
        "lines",
        " ",
        "x",
        "<tool_call>",
    ]
)


@given(st.lists(fragments, max_size=12).map("".join), st.text(max_size=8))
def test_nothing_is_passed_on_that_was_not_checked(raw, name):
    """Either every character stands in a pair with a key of the schema, or it is a refusal."""
    verdict = decide("read" + name, raw)
    arguments = json.loads(verdict.arguments)
    if verdict.reason:
        assert arguments == {"_rejected_by_server": verdict.reason}
        return
    assert verdict.name in OFFER
    assert OFFER[verdict.name] is None or set(arguments) <= OFFER[verdict.name]
    size = sum(
        len(part)
        for part in re.findall(r"<arg_key>.*?</arg_key>\s*<arg_value>.*?</arg_value>", raw)
    )
    assert size + len(re.findall(r"\s", re.sub(r"<arg_key>.*?</arg_value>", "", raw))) == len(raw)


@pytest.mark.parametrize(
    ("schema", "keys"),
    [
        (None, None),
        ({}, None),
        ({"type": "object"}, None),
        ({"properties": None}, None),
        ({"properties": {}}, set()),
        ({"properties": {"a": {}, "b": {}}}, {"a", "b"}),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"a"}),
        ({"properties": {"a": {}}, "additionalProperties": True}, None),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, None),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, None),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]}, None),
    ],
)
def test_which_keys_a_schema_closes(schema, keys):
    assert plugin.known_keys(schema) == keys


def test_tools_of_both_apis_are_offered():
    chat = SimpleNamespace(function=SimpleNamespace(name="a", parameters={"properties": {"x": {}}}))
    response = SimpleNamespace(named=[("b", None), ("c", {"properties": {}})])
    nothing = SimpleNamespace(named=[])
    offer = plugin.offer_of([chat, response, nothing], lambda tool: tool.named)
    assert offer == {"a": {"x"}, "b": None, "c": set()}
    assert plugin.offer_of(None, lambda tool: tool.named) == {}


@pytest.mark.parametrize(
    ("environ", "closed", "as_text"),
    [
        ({}, True, False),
        ({"GLM47_FAIL_CLOSED": "", "GLM47_REJECT_AS_TEXT": ""}, True, False),
        ({"GLM47_FAIL_CLOSED": "0"}, False, False),
        ({"GLM47_FAIL_CLOSED": "1", "GLM47_REJECT_AS_TEXT": "1"}, True, True),
    ],
)
def test_the_knobs(environ, closed, as_text):
    assert plugin.settings(environ) == plugin.Settings(closed, as_text)


@pytest.mark.parametrize("name", ["GLM47_FAIL_CLOSED", "GLM47_REJECT_AS_TEXT"])
@pytest.mark.parametrize("value", ["2", "true", "on", " 1", "01"])
def test_a_knob_that_is_neither_stops_the_start(name, value):
    with pytest.raises(
        ValueError, match=rf"^{name}='{value}': expected 0 or 1, or unset for [01]$"
    ):
        plugin.settings({name: value})


@pytest.fixture
def vllm(monkeypatch):
    """A double of the modules that the plug-in asks for, with what each must have."""
    for name, (place,) in plugin._PLACES.items():
        module = sys.modules.get(place)
        if module is None:
            module = types.ModuleType(place)
            monkeypatch.setitem(sys.modules, place, module)
        setattr(module, name, type(name, (), {}))
    parser = sys.modules["vllm.parser.glm47_moe"].Glm47MoeParser
    for member in plugin._MEMBERS:
        setattr(parser, member, lambda self: None)
    registered = {}
    sys.modules[
        "vllm.tool_parsers.abstract_tool_parser"
    ].ToolParserManager.register_module = staticmethod(
        lambda name, module: registered.update({name: module})
    )
    plugin.parser_class.cache_clear()
    yield SimpleNamespace(parser=parser, registered=registered)
    plugin.parser_class.cache_clear()


def test_it_registers_the_release_s_tool_parser_over_our_engine(vllm):
    plugin.register(plugin.Settings(fail_closed=True, reject_as_text=False))
    ((name, registered),) = vllm.registered.items()
    assert name == "glm47_failclosed"
    assert registered.__mro__[1].__name__ == "Glm47MoeModelToolParser"
    assert issubclass(registered._parser_engine_cls, vllm.parser)


def test_switched_off_it_registers_the_release_s_own(vllm):
    plugin.register(plugin.Settings(fail_closed=False, reject_as_text=False))
    assert vllm.registered["glm47_failclosed"].__name__ == "Glm47MoeModelToolParser"


@pytest.mark.parametrize("member", plugin._MEMBERS)
def test_a_member_that_is_gone_upstream_is_loud(vllm, member):
    """An override of nothing would let calls go out unchecked."""
    delattr(vllm.parser, member)
    with pytest.raises(ImportError, match=f"Glm47MoeParser of this vLLM has no {member}$"):
        plugin.register(plugin.Settings(fail_closed=True, reject_as_text=False))


@pytest.mark.parametrize("name", plugin._PLACES)
def test_a_name_that_moved_upstream_is_loud(vllm, monkeypatch, name):
    place = plugin._PLACES[name][0]
    monkeypatch.delattr(sys.modules[place], name)
    with pytest.raises(ImportError, match=rf"keeps {name} in none of {re.escape(place)} \("):
        plugin.register(plugin.Settings(fail_closed=True, reject_as_text=False))
