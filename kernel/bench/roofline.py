"""Draws the roofline of a run: how much of what memory and tensor cores give is used."""

from __future__ import annotations

from pathlib import Path

from kernel.bench import cases
from kernel.bench.results import Results
from kernel.bench.targets import read_bandwidth

MATMUL_CASE = "prefill 4096 h64 bf16 matmul"
_SHOWN = {"glm53_sparse_mla": ("#c0392b", "o"), "triton": ("#2980b9", "s"), "fa2": ("#27ae60", "^"),
          "sm120cfg": ("#16a085", "v"), "fa3": ("#8e44ad", "D"), "flashmla": ("#7f8c8d", "P"),
          "tilelang": ("#d35400", "X"), "gather": ("#000000", "_")}  # fmt: skip


def draw(results: Results, path: Path) -> None:
    """Writes a PNG. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.2))
    _roofline(left, results)
    _decode(right, results)
    figure.suptitle(f"{results.machine} ({results.date})", fontsize=9)
    figure.tight_layout()
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary, dpi=110, metadata={"Software": None})
    plt.close(figure)
    temporary.replace(path)


def _roofline(axes, results: Results) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Work over bytes against work over time; the roofs are measured in the same run."""
    bandwidth = read_bandwidth(results)
    product = results.time(MATMUL_CASE, "torch")
    peak = 2 * 8192**3 / product  # floating-point operations a microsecond
    span = [4, 1000]
    axes.plot(span, [min(x * bandwidth, peak) / 1e6 for x in span], alpha=0)
    ridge = peak / bandwidth
    axes.plot([span[0], ridge, span[1]], [span[0] * bandwidth / 1e6, peak / 1e6, peak / 1e6],
              color="black", lw=1, label="read bandwidth, 8192^3 product")  # fmt: skip
    for kernel, (color, marker) in _SHOWN.items():
        points = []
        for case in cases.cases():
            row = results.find(case.name, kernel)
            # Smaller batches are bound by launches and latency, not by either roof.
            is_shown = case.phase == "decode" and case.size >= 64 and kernel != "gather"
            if row and is_shown:
                points.append((case.flop / row.bytes, case.flop / row.microseconds / 1e6))
        if points:
            axes.scatter(*zip(*points, strict=True), s=24, c=color, marker=marker, label=kernel)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must be moved",
             ylabel="TFLOP/s", title="decode of 64 tokens and more, rows cold")  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)


def _decode(axes, results: Results) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Time over batch size, 16 heads, bf16, with gathering alone as the floor."""
    sizes = [1, 8, 64, 128, 256]
    for kernel, (color, marker) in _SHOWN.items():
        rows = [(size, results.find(f"decode bs{size} h16 bf16", kernel)) for size in sizes]
        known = [(size, row.microseconds) for size, row in rows if row]
        if known:
            style = "--" if kernel == "gather" else "-"
            axes.plot(*zip(*known, strict=True), style, c=color, marker=marker, ms=5, lw=1,
                      label=kernel)  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="tokens of as many requests",
             ylabel="microseconds a layer", title="decode, 16 heads, bf16")  # fmt: skip
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=7)
