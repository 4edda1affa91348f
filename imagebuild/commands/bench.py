"""`bench serve`: time to first token, decode rate and acceptance of a running server, or of two."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from imagebuild.commands.context import Context
from imagebuild.errors import EngineError, ReviewError, UsageError
from imagebuild.files import write_atomically
from imagebuild.servebench.client import Server
from imagebuild.servebench.load import Level, Shape, measure, prompt

_FIGURES = ("ttft", "ttft_p99", "decode", "throughput", "acceptance")
_COLUMNS = ("at a time", "first token ms", "p99 ms", "tokens/s each", "tokens/s all", "accepted")


def serve(context: Context) -> int:
    """Measures one server, or two in turn; returns 1 where requests failed."""
    arguments, console = context.arguments, context.console
    baseline = _baseline(arguments.baseline) if arguments.baseline else None
    shape = Shape(
        prompt_tokens=arguments.prompt_tokens,
        output_tokens=arguments.output_tokens,
        requests=arguments.requests,
        repeats=arguments.repeats,
    )
    key = _key(arguments.api_key_file)
    servers = [Server(url, model=arguments.model, key=key, timeout=arguments.timeout)
               for url in (arguments.url, arguments.versus) if url]  # fmt: skip
    for number, server in enumerate(servers):
        if not server.settle(prompt(-1 - number, shape)):
            console.note(f"{server.name}: refuses ignore_eos, so answers may be shorter than asked")
    measured = measure(servers, arguments.concurrency, shape, step=console.step)
    rows = [_rows(levels) for levels in measured]
    for server, levels, figures in zip(servers, measured, rows, strict=True):
        console.table(f"{server.name} ({server.model}), medians of {shape.repeats}",
                      _COLUMNS, [_cells(row) for row in figures])  # fmt: skip
        _failures(context, server, levels)
    ratios = None
    if len(rows) == 2:
        ratios = _ratios(rows[0], rows[1])
    elif baseline is not None:
        ratios = _ratios(baseline, rows[0])
    if ratios:
        base = servers[0].name if len(rows) == 2 else arguments.baseline
        _show_ratios(context, base, ratios)
    document: dict[str, object] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": arguments.label,
        "shape": vars(shape),
        "servers": [{"url": server.name, "model": server.model, "levels": figures}
                    for server, figures in zip(servers, rows, strict=True)],
        "ratios": ratios,
    }  # fmt: skip
    if arguments.output:
        text = json.dumps({"schema": 1, **document}, indent=2) + "\n"
        write_atomically(Path(arguments.output), text.encode())
    console.document(document)
    return ReviewError.exit_code if any(row["failures"] for each in rows for row in each) else 0


def _key(file: str | None) -> str | None:
    where = file or "OPENAI_API_KEY"
    try:
        text = Path(file).read_text("utf-8") if file else os.environ.get(where, "")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file}: expected a file with an API key, found {error}") from error
    key = text.strip()
    if not key.isascii() or not key.isprintable() or " " in key:  # else a header cannot have it
        raise UsageError(f"{where}: expected an API key on one line, found something else")
    return key or None


def _rows(levels: Sequence[Level]) -> list[dict[str, Any]]:
    return [
        {"concurrency": level.concurrency, **{name: level.median(name) for name in _FIGURES},
         "repeats": [{name: getattr(run, name) for name in _FIGURES} for run in level.runs],
         "failures": len(level.failures)}
        for level in levels
    ]  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    def show(value: float | None, scale: float, digits: int) -> str:
        return "-" if value is None else f"{value * scale:.{digits}f}"

    return [str(row["concurrency"]), show(row["ttft"], 1000, 0), show(row["ttft_p99"], 1000, 0),
            show(row["decode"], 1, 1), show(row["throughput"], 1, 1),
            show(row["acceptance"], 1, 2)]  # fmt: skip


def _failures(context: Context, server: Server, levels: Sequence[Level]) -> None:
    for level in levels:
        if level.failures:
            context.console.note(f"{server.name}: {len(level.failures)} requests failed with "
                                 f"{level.concurrency} at a time; {level.failures[0]}")  # fmt: skip
    if levels and all(level.median("ttft") is None for level in levels):
        raise EngineError(f"{server.name}: expected answers, found that every request failed: "
                          f"{levels[0].failures[0]}")  # fmt: skip


def _ratios(base: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Figures of `other` by those of `base`, where both measured the same concurrency."""
    known = {row["concurrency"]: row for row in base}
    return [
        {"concurrency": row["concurrency"],
         **{name: row[name] / known[row["concurrency"]][name]
            if row[name] and known[row["concurrency"]].get(name) else None for name in _FIGURES}}
        for row in other if row["concurrency"] in known
    ]  # fmt: skip


def _show_ratios(context: Context, base: str, ratios: list[dict[str, Any]]) -> None:
    rows = [[str(row["concurrency"]), *("-" if row[name] is None else f"{row[name]:.2f}x"
             for name in _FIGURES)] for row in ratios]  # fmt: skip
    columns = ("at a time", "first token", "p99", "tokens/s each", "tokens/s all", "accepted")
    context.console.table(f"as ratios of {base}", columns, rows)


def _baseline(file: str) -> list[dict[str, Any]]:
    """The levels of an earlier --output."""
    try:
        content = json.loads(Path(file).read_bytes())
        levels = content["servers"][0]["levels"]
        if content["schema"] != 1 or not all(isinstance(row["concurrency"], int) for row in levels):
            raise ValueError("another schema")
        if any(not isinstance(row.get(name), (int, float, type(None)))
               for row in levels for name in _FIGURES):  # fmt: skip
            raise ValueError("figures that are no numbers")
        return list(levels)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError,
            RecursionError) as error:  # fmt: skip
        raise UsageError(f"{file}: expected what --output wrote, found {error!r}") from error
