"""Runs image/runtime/glm_topk.py on a GPU against a NumPy reference of its rule, and times it.

A plain script, since it needs a GPU, torch, Triton and NumPy, and nothing of vLLM:

    python3 tests/gpu/glm_topk_device.py [--vllm-library FILE] [--skip-timing] > result.json

One JSON object goes to stdout, a line a case to stderr. Exit status 1 when a case fails.
--vllm-library is vLLM's _C_stable_libtorch.abi3.so, for the stock kernel; where it cannot be
loaded, or is not given, torch.topk(sorted=False) stands in for it, and the result says so.
"""

# ruff: noqa: PLR0917 - the shapes of the calls it stands for; it reports on its two streams

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

SOURCE = Path(__file__).resolve().parents[2] / "image" / "runtime" / "glm_topk.py"
POISON = 0x5A5A5A5A
K = 512


def load_module() -> Any:
    """The module as vLLM would import it, with the real Triton behind vLLM's name for it."""
    shim = types.ModuleType("vllm.triton_utils")
    shim.tl, shim.triton = tl, triton
    sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    sys.modules["vllm.triton_utils"] = shim
    spec = importlib.util.spec_from_file_location("glm_topk", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Torch:
    """torch as the module sees it, with a stock kernel of our choice."""

    def __init__(self, stock: Callable[..., None]) -> None:
        self.ops = types.SimpleNamespace(_C=types.SimpleNamespace(top_k_per_row_prefill=stock))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def stand_in(
    logits: Any, starts: Any, ends: Any, out: Any, rows: int, s0: int, s1: int, k: int
) -> None:
    """torch.topk in the place of vLLM's kernel, for rows that start at any column."""
    columns = torch.arange(logits.shape[1], device="cuda")
    inside = (columns >= starts[:, None]) & (columns < ends[:, None])
    width = min(k, logits.shape[1])
    ids = torch.where(inside, logits, -torch.inf).topk(width, sorted=False).indices
    out[:, :k] = -1
    out[:, :width] = torch.where(inside.gather(1, ids), ids - starts[:, None], -1).int()


def no_list(*args: Any) -> None:
    """Leaves the buffer as it was."""


def random_list(
    logits: Any, starts: Any, ends: Any, out: Any, rows: int, s0: int, s1: int, k: int
) -> None:
    """Ids that are mostly no winners, some outside the row."""
    out[:, :k] = torch.randint(-9, logits.shape[1] + 99, (rows, k), device="cuda").int()


def one_pool_list(
    logits: Any, starts: Any, ends: Any, out: Any, rows: int, s0: int, s1: int, k: int
) -> None:
    """The row's best pool k times."""
    stand_in(logits, starts, ends, out, rows, s0, s1, k)
    out[:, :k] = out[:, :1].clone()


def reference(scores: np.ndarray, k: int) -> np.ndarray:
    """The rule for one row of float32 scores: k int32 ids, ascending, then -1."""
    scores = np.where(np.isnan(scores), -np.inf, scores) + np.float32(0)
    ids = np.arange(len(scores), dtype=np.int32)
    if len(scores) > k:
        threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
        better = ids[scores > threshold]
        tied = ids[scores == threshold][: k - len(better)]
        ids = np.sort(np.concatenate([better, tied]))
    return np.concatenate([ids, np.full(k - len(ids), -1, np.int32)])


def references(logits: Any, starts: Any, ends: Any, k: int) -> np.ndarray:
    scores, columns = logits.cpu().numpy(), logits.shape[1]
    bounds = zip(starts.cpu().tolist(), ends.cpu().tolist(), strict=True)
    return np.stack(
        [
            reference(row[start : max(start, min(end, columns))], k)
            for row, (start, end) in zip(scores, bounds, strict=True)
        ]
    )


def fill(kind: str, rows: int, columns: int, seed: int) -> Any:
    """Scores [rows, columns] float32 on the GPU."""
    source = torch.Generator("cuda").manual_seed(seed)
    noise = torch.randn((rows, columns), generator=source, device="cuda")
    chance = torch.rand((rows, columns), generator=source, device="cuda")
    if kind == "equal":
        return torch.full_like(noise, 1.25)
    if kind == "many ties":
        return torch.floor(noise * 2) / 2
    if kind == "masked":  # fewer finite scores than k in most rows
        return torch.where(chance < 0.98, -torch.inf, noise)
    if kind == "signed zeros":
        return torch.where(chance < 0.5, 0.0, -0.0)
    if kind == "zeros and few others":
        return torch.where(chance < 0.99, torch.where(noise < 0, 0.0, -0.0), noise)
    if kind == "nan and inf":
        noise = torch.where(chance < 0.3, torch.nan, noise)
        noise = torch.where((chance > 0.3) & (chance < 0.6), -torch.nan, noise)
        return torch.where(chance > 0.999, torch.inf, noise)
    if kind == "wide range":
        return noise * torch.exp2(torch.floor(chance * 250) - 140)
    return noise


def prefill_bounds(rows: int, columns: int, kind: str, seed: int) -> tuple[Any, Any]:
    """Row bounds: compressed rows start at 0; the others lie somewhere; some are short or empty."""
    source = np.random.default_rng(seed)
    starts = np.zeros(rows, np.int32)
    if kind == "offset":
        starts = source.integers(0, max(columns // 2, 1), rows, dtype=np.int32)
    lengths = source.integers(0, columns + 1, rows, dtype=np.int32)
    lengths[: rows // 2] = columns
    if kind == "short":
        lengths = source.integers(-2, 2 * K, rows, dtype=np.int32)
    ends = starts + lengths  # may lie behind the last column
    return torch.from_numpy(starts).cuda(), torch.from_numpy(ends.astype(np.int32)).cuda()


CASES = [
    # name of the scores, rows, columns, bounds, k
    *(
        (scores, rows, columns, bounds, k)
        for scores in (
            "random", "equal", "many ties", "masked", "signed zeros", "zeros and few others",
            "nan and inf", "wide range",
        )
        for rows, columns, bounds, k in (
            (64, 700, "whole", K),
            (64, 2048, "short", K),
            (64, 8192, "offset", K),
            (48, 65536, "whole", K),
            (16, 65536, "offset", 511),
        )
    ),
    ("random", 4096, 8192, "whole", K),
    ("many ties", 4096, 65536, "offset", K),
    ("random", 5, 262149, "whole", K),
    ("equal", 3, 262149, "offset", K),
    ("many ties", 9, 131072, "whole", 2048),
    ("random", 9, 131072, "whole", 1),
    ("random", 9, 131072, "whole", 4096),
    ("random", 3, 1, "whole", K),
]  # fmt: skip


def prefill_problems(module: Any, stock: Callable[..., None]) -> Iterator[tuple[str, list[str]]]:
    """All cases with the stock kernel, and some with lists that no kernel should make."""
    yield from _prefill_problems(module, "stock", stock, CASES)
    hostile = [
        case
        for case in CASES
        if case[0] in ("random", "many ties", "nan and inf", "zeros and few others")
    ]
    for name, lists in (("none", no_list), ("random", random_list), ("one pool", one_pool_list)):
        yield from _prefill_problems(
            module, name, lists, [c for c in hostile if c[1] * c[2] < 1 << 22]
        )


def _prefill_problems(
    module: Any, listed: str, stock: Callable[..., None], cases: list[tuple[Any, ...]]
) -> Iterator[tuple[str, list[str]]]:
    """Each case twice from poisoned buffers, against the reference and against itself."""
    module.torch = Torch(stock)
    # vLLM's kernel takes no row stride: like its caller, give it rows of exactly k columns.
    spare = 0 if listed == "stock" else 5
    for seed, (scores, rows, columns, bounds, k) in enumerate(cases):
        logits = fill(scores, rows, columns + 3, seed)[:, :columns]  # a row stride of its own
        starts, ends = prefill_bounds(rows, columns, bounds, seed)
        expected = references(logits, starts, ends, k)
        outs = []
        for _ in range(2):
            wide = torch.full((rows, k + spare), POISON, dtype=torch.int32, device="cuda")
            given = logits.clone() if logits.is_contiguous() else logits
            module.prefill(given, starts, ends, wide, rows, given.stride(0), given.stride(1), k)
            outs.append(wide.cpu().numpy())
        problems = []
        if not np.array_equal(outs[0], outs[1]):
            problems.append("two runs differ")
        if not np.array_equal(outs[0][:, :k], expected):
            wrong = int((outs[0][:, :k] != expected).any(1).sum())
            problems.append(f"{wrong} of {rows} rows differ from the reference")
        if (outs[0][:, k:] != POISON).any():
            problems.append("wrote behind column k")
        yield f"prefill {scores}, {rows} x {columns}, {bounds}, k {k}, list {listed}", problems


def decode_problems(module: Any, stock: Callable[..., None]) -> Iterator[tuple[str, list[str]]]:
    """Captures decode once; each replay has other scores and lengths, as in a server."""
    for rows, next_n, shape, columns in (
        (1, 1, "rows", 65536),
        (64, 1, "rows", 131072),
        (32, 8, "2-D", 16384),
        (32, 4, "requests", 65536),
    ):
        total = rows * next_n
        lengths = {
            "rows": (total, 1), "2-D": (rows, next_n), "requests": (rows, 1),
        }[shape]  # fmt: skip
        logits = torch.empty((total, columns), device="cuda")
        seq_lens = torch.full(lengths, columns, dtype=torch.int32, device="cuda")
        out = torch.empty((total, K), dtype=torch.int32, device="cuda")
        zeros = torch.zeros(total, dtype=torch.int32, device="cuda")
        offsets = torch.arange(next_n, dtype=torch.int32, device="cuda") - next_n + 1

        def listing(logits: Any, seq_lens: Any, next_n: int, out: Any, k: int, most: int,
                    zeros: Any = zeros, offsets: Any = offsets) -> None:  # fmt: skip
            ends = seq_lens.reshape(-1)
            if len(ends) != len(logits):
                ends = (ends[:, None] + offsets).clamp(min=0).reshape(-1)
            stock(logits, zeros, ends, out, len(logits), logits.stride(0), 1, k)

        select = module.decode(listing)

        def step(select: Any = select, args: Any = (logits, seq_lens, next_n, out, K, 7)) -> None:
            select(*args)

        logits.copy_(fill("random", total, columns, 1))
        step()  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        problems = []
        for seed, kind in enumerate(("random", "many ties", "equal", "nan and inf")):
            logits.copy_(fill(kind, total, columns, seed))
            source = np.random.default_rng(seed)
            given = source.integers(0, columns + 1, lengths, dtype=np.int32)
            given.flat[0], given.flat[-1] = 0, 3  # a padded row and a short one
            seq_lens.copy_(torch.from_numpy(given))
            ends = given.reshape(-1)
            if shape == "requests":
                ends = (given.reshape(-1, 1) - next_n + 1 + np.arange(next_n)).clip(0).reshape(-1)
            ends = torch.from_numpy(ends.astype(np.int32))
            expected = references(logits, torch.zeros_like(ends), ends, K)
            results = []
            for run in (graph.replay, graph.replay, step):
                out.fill_(POISON)
                run()
                results.append(out.cpu().numpy())
            if not all(np.array_equal(result, expected) for result in results):
                problems.append(f"{kind}: differs from the reference or between replays")
        yield f"decode under a graph, {shape}, {total} x {columns}", problems


def merge_problems(module: Any, stock: Callable[..., None]) -> Iterator[tuple[str, list[str]]]:
    """Splits pools over ranks, merges as vLLM does (by score bits, then id), and orders."""
    module.torch = Torch(stock)
    for world, interleave, kind in (
        (2, 1, "signed zeros"),
        (4, 16, "nan and inf"),
        (2, 16, "many ties"),
    ):
        rows, columns = 8, 4096 * world
        whole = fill(kind, rows, columns, world)
        zeros = torch.zeros(rows, dtype=torch.int32, device="cuda")
        expected = references(whole, zeros, zeros + columns, K)
        candidates = []
        for rank in range(world):
            ids = torch.arange(columns, device="cuda")
            ids = ids[ids // interleave % world == rank]
            local = whole[:, ids].contiguous()
            out = torch.empty((rows, K), dtype=torch.int32, device="cuda")
            module.prefill(local, zeros, zeros + len(ids), out, rows, local.stride(0), 1, K)
            chosen = out.long()
            candidates.append((local.gather(1, chosen).cpu().numpy(), ids[chosen].cpu().numpy()))
        bits = np.concatenate([c[0] for c in candidates], 1).view(np.int32).astype(np.int64)
        keys = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
        ids = np.concatenate([c[1] for c in candidates], 1)
        order = np.lexsort((ids, -keys))[:, :K]
        merged = np.take_along_axis(ids, order, 1).astype(np.int32)
        shuffled = np.random.default_rng(0).permuted(merged, axis=1)
        merged = torch.from_numpy(shuffled).cuda()
        module.ascending(merged, world)
        same = np.array_equal(merged.cpu().numpy(), expected)
        yield f"merge of {world} ranks, {kind}", [] if same else ["differs from the reference"]
    rows = torch.tensor([[-1, 7, -1, 3, 0], [-1] * 5, [4, 3, 2, 1, 0]], dtype=torch.int32)
    wide = torch.full((3, 9), POISON, dtype=torch.int32)
    wide[:, 2:7] = rows
    wide = wide.cuda()
    module.ascending(wide[:, 2:7], 2)
    wanted = [[0, 3, 7, -1, -1], [-1] * 5, [0, 1, 2, 3, 4]]
    clean = (wide[:, :2] == POISON).all() and (wide[:, 7:] == POISON).all()
    good = wide[:, 2:7].tolist() == wanted and bool(clean)
    yield "order of padded rows in a wider buffer", [] if good else ["wrong order"]


def graph_time(call: Callable[[], object], calls: int, repeats: int = 15) -> float:
    """Median microseconds of one call among `calls` in one graph: no launch gaps, L2 as it is."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return statistics.median(times)


def stock_library(path: str | None) -> str:
    """Loads vLLM's kernels; "" when they are there, else why not."""
    if path is None:
        return "no library given"
    try:
        torch.ops.load_library(path)
        torch.ops._C.top_k_per_row_prefill  # noqa: B018 - raises when it is not registered
    except (OSError, AttributeError, RuntimeError) as error:
        return str(error).partition("\n")[0]
    return ""


def stock_calls(logits: Any, starts: Any, ends: Any, out: Any) -> dict[str, Callable[[], object]]:
    rows, columns = logits.shape
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    lengths = (ends - starts).reshape(-1, 1).contiguous()
    stock = torch.ops._C
    return {
        "top_k_per_row_prefill": lambda: stock.top_k_per_row_prefill(
            logits, starts, ends, out, rows, logits.stride(0), logits.stride(1), K
        ),
        "top_k_per_row_decode": lambda: stock.top_k_per_row_decode(
            logits, 1, lengths, out, rows, logits.stride(0), logits.stride(1), K
        ),
        "persistent_topk": lambda: stock.persistent_topk(
            logits, lengths, out, workspace, K, columns
        ),
    }


def decode_with_persistent(module: Any, logits: Any, ends: Any, out: Any) -> Callable[[], object]:
    """What a decode step costs with the rule, on top of vLLM's persistent kernel."""
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    lengths = ends.reshape(-1, 1).contiguous()

    def persistent(logits: Any, lengths: Any, next_n: int, out: Any, k: int, most: int) -> None:
        torch.ops._C.persistent_topk(logits, lengths, out, workspace, k, logits.shape[1])

    select = module.decode(persistent)
    return lambda: select(logits, lengths, 1, out, K, 0)


def timings(module: Any, stock: Callable[..., None], has_stock: bool) -> list[dict[str, Any]]:
    """Times of whole rows of random scores; `length` pools of `columns` are used."""
    found = []
    for rows, columns, length in (
        (1, 16384, 16384), (1, 65536, 65536), (1, 131072, 16384), (1, 131072, 131072),
        (8, 65536, 65536), (64, 65536, 65536), (256, 65536, 65536), (256, 131072, 4096),
        (512, 65536, 65536),
        (4096, 2048, 2048), (4096, 8192, 8192), (4096, 32768, 32768), (4096, 65536, 65536),
    ):  # fmt: skip
        logits = fill("random", rows, columns, 3)
        starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
        ends = starts + length
        out = torch.full((rows, K), -1, dtype=torch.int32, device="cuda")
        calls: dict[str, Callable[[], object]] = {
            "glm_topk": lambda x=logits, s=starts, e=ends, o=out: module.prefill(
                x, s, e, o, x.shape[0], x.stride(0), x.stride(1), K
            ),
            "torch.topk": lambda x=logits[:, :length]: torch.topk(x, K, sorted=False),
        }
        if has_stock:
            calls |= stock_calls(logits, starts, ends, out)
            calls["glm_topk on persistent_topk"] = decode_with_persistent(module, logits, ends, out)
        module.torch = Torch(stock)
        row: dict[str, Any] = {"rows": rows, "columns": columns, "length": length, "us": {}}
        for name, call in calls.items():
            try:
                count = 3 if rows * length > 1 << 25 else 20
                row["us"][name] = round(graph_time(call, count), 2)
            except RuntimeError as error:
                row["us"][name] = str(error).partition("\n")[0]
        found.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The timings as docs/deterministic-topk.md has them."""
    names = list(rows[0]["us"]) if rows else []
    lines = [
        "| rows x columns, used | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for row in rows:
        shape = f"{row['rows']} x {row['columns']}, {row['length']}"
        lines.append(f"| {shape} | " + " | ".join(str(row["us"][name]) for name in names) + " |")
    return "\n".join(lines)


def stock_disagreement(module: Any) -> list[dict[str, Any]]:
    """How often two runs of the stock kernel differ, in order and as sets, where scores tie."""
    found = []
    for kind, rows, columns in (("random", 512, 65536), ("many ties", 512, 65536)):
        logits = fill(kind, rows, columns, 5)
        starts = torch.zeros(rows, dtype=torch.int32, device="cuda")
        outs: list[Any] = []
        mine = torch.full((rows, K), -1, dtype=torch.int32, device="cuda")
        module.prefill(logits.clone(), starts, starts + columns, mine, rows, columns, 1, K)
        for _ in range(2):
            out = torch.full((rows, K), -1, dtype=torch.int32, device="cuda")
            stock_calls(logits, starts, starts + columns, out)["top_k_per_row_prefill"]()
            outs.append(out)
        sets = [out.sort(1).values for out in outs]
        found.append(
            {
                "scores": kind,
                "rows": rows,
                "rows_in_other_order": int((outs[0] != outs[1]).any(1).sum()),
                "rows_with_other_pools": int((sets[0] != sets[1]).any(1).sum()),
                "rows_with_pools_unlike_the_rule": int((sets[0] != mine).any(1).sum()),
            }
        )
    return found


def main() -> int:
    """Runs all cases, then the timings; 0 when every case is right."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-library", metavar="FILE", help="for the stock kernel's time")
    parser.add_argument("--skip-timing", action="store_true", help="correctness only")
    parser.add_argument(
        "--shape", metavar="BLOCK:WARPS:PROGRAMS", action="append", default=[],
        help="time another size of program, such as 2048:4:1024; may be given several times",
    )  # fmt: skip
    options = parser.parse_args()
    module = load_module()
    missing = stock_library(options.vllm_library)
    stock = stand_in if missing else torch.ops._C.top_k_per_row_prefill
    cases = []
    for check in (prefill_problems, decode_problems, merge_problems):
        for name, problems in check(module, stock):
            cases.append({"name": name, "problems": problems})
            verdict = "; ".join(problems) or "ok"
            print(f"{name}: {verdict}", file=sys.stderr, flush=True)
    result = {
        "schema": 1,
        "gpu": torch.cuda.get_device_name(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "stock_kernel": missing or "loaded",
        "cases": cases,
        "timings": [],
    }
    if not missing:
        result["stock_runs"] = stock_disagreement(module)
    if not options.skip_timing:
        result["timings"] = timings(module, stock, not missing)
        for shape in options.shape:
            module._BLOCK, module._WARPS, module._PROGRAMS = map(int, shape.split(":"))
            result[f"timings {shape}"] = timings(module, stock, False)
    print(table(result["timings"]), file=sys.stderr)
    print(json.dumps(result, indent=1))
    return int(any(case["problems"] for case in cases))


if __name__ == "__main__":
    sys.exit(main())
