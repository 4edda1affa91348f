"""Read-only tools for agents, over the Model Context Protocol's HTTP form (JSON-RPC 2.0).

Nothing here writes, starts or searches files: what can be read is the state and the end of the log.
Source: modelcontextprotocol.io, specification of 2025-06-18.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = "2025-06-18"
_LARGEST_ANSWER = 16_384  # characters: an agent's context is small
_LOG_TAIL = 256 << 10  # bytes that are looked at
_PARSE, _INVALID, _NO_METHOD, _BAD_PARAMS = -32700, -32600, -32601, -32602


@dataclass(frozen=True)
class Source:
    """Where answers come from.

    Attributes:
        status, cluster: give the JSON documents of the same names.
        log: vLLM's log, or None.
    """

    status: Callable[[], Mapping[str, Any]]
    cluster: Callable[[], Mapping[str, Any]]
    log: Path | None


_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
_LOG_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "lines": {"type": "integer", "minimum": 1, "maximum": 500, "default": 100},
        "contains": {"type": "string", "description": "only lines with this text, in any case"},
    },
}
_TOOLS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "status": ("What this rank is doing: stages, health, error, route, knobs.", _NO_ARGUMENTS),
    "cluster": ("Stage, health and fingerprint of every rank.", _NO_ARGUMENTS),
    "log": ("The end of vLLM's log on this rank.", _LOG_ARGUMENTS),
}


class _RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def answer(body: bytes, source: Source) -> object | None:
    """The answer to a message or a batch; None where none is expected."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError):
        return _error(None, _PARSE, "no JSON")
    if isinstance(message, list):
        if not message:
            return _error(None, _INVALID, "an empty batch")
        answers = [found for each in message[:32] if (found := _one(each, source)) is not None]
        return answers or None
    return _one(message, source)


def _one(message: object, source: Source) -> dict[str, Any] | None:
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return _error(None, _INVALID, "expected a JSON-RPC request")
    if "id" not in message:  # a notification
        return None
    if not isinstance(message["id"], (str, int, float)):
        return _error(None, _INVALID, "expected an id that is a text or a number")
    params = message.get("params")
    try:
        if params is not None and not isinstance(params, dict):
            raise _RpcError(_BAD_PARAMS, "expected params as an object")
        result = _result(message["method"], params or {}, source)
    except _RpcError as error:
        return _error(message["id"], error.code, str(error))
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def _error(identity: object, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": identity, "error": {"code": code, "message": text}}


def _result(method: str, params: Mapping[str, Any], source: Source) -> dict[str, Any]:
    if method == "initialize":
        return {
            "protocolVersion": VERSION,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "glm53-status", "version": "1"},
        }
    if method == "ping":
        return {}
    if method == "tools/list":
        hints = {"readOnlyHint": True, "openWorldHint": False}
        tools = [
            {"name": name, "description": text, "inputSchema": schema, "annotations": hints}
            for name, (text, schema) in _TOOLS.items()
        ]
        return {"tools": tools}
    if method == "tools/call":
        text = _call(params, source)
        if len(text) > _LARGEST_ANSWER:
            text = "[cut]\n" + text[-_LARGEST_ANSWER:]
        return {"content": [{"type": "text", "text": text}], "isError": False}
    raise _RpcError(_NO_METHOD, f"no method {method}")


def _call(params: Mapping[str, Any], source: Source) -> str:
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(arguments, dict):
        raise _RpcError(_BAD_PARAMS, "expected arguments as an object")
    if name == "status":
        return json.dumps(source.status(), indent=1)
    if name == "cluster":
        return json.dumps(source.cluster(), indent=1)
    if name == "log":
        return _log(arguments, source.log)
    raise _RpcError(_BAD_PARAMS, f"no tool {name}; there are {', '.join(_TOOLS)}")


def _log(arguments: Mapping[str, Any], file: Path | None) -> str:
    count, contains = arguments.get("lines", 100), arguments.get("contains", "")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 500:
        raise _RpcError(_BAD_PARAMS, "expected lines from 1 to 500")
    if not isinstance(contains, str):
        raise _RpcError(_BAD_PARAMS, "expected contains as text")
    if file is None:
        return "there is no log"
    try:
        with file.open("rb") as log:
            size = log.seek(0, 2)
            log.seek(max(size - _LOG_TAIL, 0))
            text = log.read(_LOG_TAIL).decode("utf-8", "replace")
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    # Terminal codes of progress bars are noise to whoever reads text.
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).splitlines()
    found = [line for line in lines if contains.lower() in line.lower()]
    return "\n".join(found[-count:]) or "no such lines"
