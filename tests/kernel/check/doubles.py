"""Right and wrong kernels in torch on the CPU, run through the check; prints JSON. No pytest here.

Run by a Python that has torch: `doubles.py FOLDER_OF_THE_PACKAGE`. Every wrong kernel has one fault
that some real kernel had; the check must call each of them wrong and the right one right.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

sys.path.insert(0, sys.argv[1])

import torch
from glm53_sparse_mla.check import attention, cases, flashkda, inputs, reference, report

torch.set_num_threads(1)
STATE = {"calls": 0}


def right(given, out, lse, *, sm_scale, kv_scale, splits):
    o, s = reference.attention(given.q, given.kv, given.indices, sm_scale=sm_scale,
                               kv_scale=kv_scale)  # fmt: skip
    out.copy_(o)
    lse.copy_(s)


def wrong(change: Callable) -> Callable:
    """The right kernel with its results changed."""

    def kernel(given, out, lse, **options):
        right(given, out, lse, **options)
        change(given, out, lse, options)

    return kernel


def of_other_inputs(change: Callable) -> Callable:
    """The right kernel on changed inputs."""

    def kernel(given, out, lse, **options):
        given, options = change(given, options)
        right(given, out, lse, **options)

    return kernel


def noise(_given, out, _lse, _options):
    out += torch.randn_like(out, dtype=torch.float32) * 0.01 * out.abs().max()


def one_token_off(_given, out, _lse, _options):
    out[-1] *= 1.01


def base_two(_given, _out, lse, _options):
    lse *= 1.4426950408889634


def nan_for_masked(given, out, _lse, _options):
    out[(given.indices < 0).all(1)] = torch.nan


def zero_lse_for_masked(given, _out, lse, _options):
    lse[(given.indices < 0).all(1)] = 0.0


def reads_row_0(given, out, _lse, _options):
    """Loads row 0 for a masked index and multiplies it with a weight of zero."""
    has_mask = (given.indices < 0).any(1)
    out += torch.where(has_mask[:, None, None], 0.0 * given.kv[0].float(), 0.0).bfloat16()


def not_repeatable(_given, out, _lse, _options):
    STATE["calls"] += 1
    if STATE["calls"] % 2:
        out[0, 0, 0] = torch.nextafter(out[0, 0, 0], torch.tensor(9.0, dtype=torch.bfloat16))


def depends_on_batch(given, out, _lse, options):
    if options["splits"] and len(given.q) == 1:
        out[0, 0, 0] = torch.nextafter(out[0, 0, 0], torch.tensor(9.0, dtype=torch.bfloat16))


def leaves_a_head(_given, out, _lse, _options):
    out[:, -1] = torch.nan  # as it was before the launch


def cut(given, options):
    """Forgets the columns after a round number, where the newest tokens stand."""
    return replace(given, indices=given.indices[:, :64]), options


def no_kv_scale(given, options):
    return given, {**options, "kv_scale": 1.0}


def only_minus_one(given, options):
    """Takes other negative numbers for rows."""
    rows = given.indices.where(given.indices == -1, given.indices.abs() % len(given.kv))
    return replace(given, indices=rows.where(given.indices < 0, given.indices)), options


def stops_at_hole(given, options):
    """Takes the first masked index for the end."""
    ended = (given.indices < 0).cumsum(1) > 0
    return replace(given, indices=given.indices.masked_fill(ended, -1)), options


def once_each(given, options):
    """Counts a row once however often it is named."""
    rows = given.indices.clone()
    for row in rows:
        seen: set[int] = set()
        for at, value in enumerate(row.tolist()):
            if value >= 0 and value in seen:
                row[at] = -1
            seen.add(value)
    return replace(given, indices=rows), options


def fp32_overflow(given, options):
    """Exponentials without the maximum taken off."""
    rows = reference.gather(given.kv, given.indices.clamp(min=0)).float() * options["kv_scale"]
    scores = torch.einsum("thd,twd->thw", given.q.float(), rows) * options["sm_scale"]
    kept = torch.where(torch.exp(scores).isinf().any(), torch.nan, 1.0)
    return replace(given, q=given.q * kept.bfloat16()), options


RESULTS = {"noise": noise, "one_token_off": one_token_off, "base_two": base_two,
           "nan_for_masked": nan_for_masked, "zero_lse_for_masked": zero_lse_for_masked,
           "reads_row_0": reads_row_0, "not_repeatable": not_repeatable,
           "depends_on_batch": depends_on_batch, "leaves_a_head": leaves_a_head}  # fmt: skip
INPUTS = {"cut": cut, "no_kv_scale": no_kv_scale, "only_minus_one": only_minus_one,
          "stops_at_hole": stops_at_hole, "once_each": once_each,
          "fp32_overflow": fp32_overflow}  # fmt: skip
KERNELS = {"right": right, **{name: wrong(one) for name, one in RESULTS.items()},
           **{name: of_other_inputs(one) for name, one in INPUTS.items()}}  # fmt: skip


def small() -> Iterator[cases.Case]:
    """The check's own kinds of cases, small enough for a CPU."""
    for dtype in cases.DTYPES:
        base = cases.Case(dtype, 2, dtype, tokens=len(cases.MASKS), width=67, masks=cases.MASKS,
                          rows=512, columns=80)  # fmt: skip
        yield replace(base, splits=(None, 3))
        yield replace(base, amplitude=40.0, has_gaps=True, row_stride=528)
        yield replace(base, page_gap=True, is_paged=True, rows=1024, expected_width=10)
    yield cases.Case("random", 8, "bf16", tokens=8, rows=4096, is_random=True)


def broken(_given, _out, _lse, **_options):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


def summary(rows: list[attention.Row]) -> dict[str, object]:
    return {
        "ok": all(row.is_well for row in rows),
        "runs": sum(row.runs for row in rows),
        "problems": [problem for row in rows for problem in row.measures.problems],
        "lines": report.attention_lines(rows),
        "norm_rel": max(row.measures.norm_rel for row in rows),
    }


def naive() -> dict[str, float]:
    """The reference against a few lines of plain Python on a tiny case."""
    case = cases.Case("naive", 1, "fp8", tokens=4, width=5, rows=40,
                      masks=("none", "holes", "duplicates", "all"))  # fmt: skip
    given = inputs.make(case, "cpu")
    out, lse = reference.attention(given.q, given.kv, given.indices, sm_scale=0.5, kv_scale=2.0)
    worst = 0.0
    for t in range(4):
        keys = [2.0 * given.kv.float()[row].double() for row in given.indices[t] if row >= 0]
        scores = [float(given.q[t, 0].double() @ key) * 0.5 for key in keys]
        weights = [2.718281828459045 ** (one - max(scores)) for one in scores]
        want = sum((w * k for w, k in zip(weights, keys, strict=True)), torch.zeros(512).double())
        want = want / sum(weights) if keys else want
        worst = max(worst, float((out[t, 0] - want).abs().max()))
        if keys:
            logarithm = max(scores) + float(torch.tensor(sum(weights)).double().log())
            worst = max(worst, abs(float(lse[t, 0]) - logarithm))
        else:
            worst = max(worst, 0.0 if float(lse[t, 0]) == -torch.inf else 1.0)
    return {"distance": worst}


def matrix() -> dict[str, object]:
    """What the full matrix has, without running it."""
    every = list(cases.full())
    return {
        "heads": sorted({case.heads for case in every}),
        "widths": sorted({case.width for case in every}),
        "tokens": sorted({case.tokens for case in every}),
        "masks": sorted({mask for case in every for mask in case.masks}),
        "how": sorted({case.how for case in every}),
        "largest_pool": max(case.rows * case.row_stride for case in every),
        "named": [case.row for case in cases.named()],
        "quick": [case.row for case in cases.quick()][:6],
        "splits": sorted({one or 0 for case in every for one in case.splits}),
        "amplitudes": sorted({case.amplitude for case in every}),
    }


def poisoned() -> bool:
    """Whether every row that no token selects is NaN, row 0 with them."""
    for case in small():
        given = inputs.make(case, "cpu")
        used = set(given.indices[given.indices >= 0].tolist())
        unused = [row for row in range(len(given.kv)) if row not in used]
        if 0 in used or not bool(given.kv.float()[unused].isnan().all()):
            return False
        if bool(given.kv.float()[sorted(used)].isnan().any()):
            return False
    return True


def main() -> None:
    found = {name: summary(attention.check(small(), kernel, "cpu"))
             for name, kernel in KERNELS.items()}  # fmt: skip
    found["broken"] = summary(attention.check(small(), broken, "cpu"))
    exact = [flashkda.exact_increment(one) for one in flashkda.INCREMENT_LOGITS]
    print(json.dumps({"kernels": found, "naive": naive(), "matrix": matrix(),
                      "poisoned": poisoned(), "exact_increments": exact}))  # fmt: skip


main()
