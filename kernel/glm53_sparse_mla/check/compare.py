"""Holds one result against the reference: anomalies first, then three measures and the logarithm.

Every token is judged by itself, so that one wrong token of 4,096 is not averaged away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Limits:
    """What a result may differ by.

    Attributes:
        max_rel: largest difference over the largest value of the reference.
        norm_rel: norm of the difference over the norm of the reference.
        cosine: of both as vectors, at least.
        lse: absolute difference of the logarithms, for each 1,000 of their size where that is more:
            fp32 holds no more.
    """

    max_rel: float
    norm_rel: float
    cosine: float
    lse: float


# Rounding the output to bf16 alone is a norm-relative difference of 1.65e-3; these leave the
# rounding of the weights in, and nothing else. For 2,048 random keys, over all tokens of a case.
STRICT = Limits(max_rel=4.1e-3, norm_rel=2.0e-3, cosine=0.999998, lse=1e-3)
# For one token, whatever its mask: with few keys the weights' roundings do not average out. Largest
# found on an H200, 2026-11-29, over 1,300 launches: 4.07e-3 and 2.12e-3.
TOKEN = Limits(max_rel=8e-3, norm_rel=4.1e-3, cosine=0.99999, lse=1e-3)


@dataclass(frozen=True)
class Measures:
    """How far a result is from the reference, and what is wrong with it beyond that."""

    max_rel: float = 0.0
    norm_rel: float = 0.0
    cosine: float = 1.0
    lse: float = 0.0
    problems: tuple[str, ...] = ()

    def worst(self, other: Measures) -> Measures:
        """Of two, the worse in each respect."""
        return Measures(
            max(self.max_rel, other.max_rel),
            max(self.norm_rel, other.norm_rel),
            min(self.cosine, other.cosine),
            max(self.lse, other.lse),
            self.problems + other.problems,
        )


def measure(out: Tensor, expected: Tensor) -> Measures:
    """The three measures of a whole tensor; a reference of zeros must be met exactly."""
    got, want = out.double().flatten(), expected.double().flatten()
    if not bool(got.isfinite().all()):
        return Measures(float("inf"), float("inf"), -1.0, problems=("NaN or infinite values",))
    norm = float(want.norm())
    if norm == 0.0:
        is_zero = bool((got == 0).all())
        return Measures() if is_zero else Measures(float("inf"), float("inf"), 0.0)
    difference = got - want
    return Measures(
        float(difference.abs().max() / want.abs().max()),
        float(difference.norm() / norm),
        # Rounding can put it a hair above one.
        min(1.0, float(got @ want) / max(norm * float(got.norm()), 1e-300)),
    )


def compare(
    out: Tensor, lse: Tensor | None, expected: Tensor, expected_lse: Tensor, *, is_random: bool
) -> Measures:
    """Judges one launch.

    Args:
        out: [T, H, D] of the kernel.
        lse: [T, H] of the kernel, or None where it was not asked for.
        expected: [T, H, D] fp64.
        expected_lse: [T, H] fp64; -inf for a token without keys.
        is_random: every token has 2,048 random keys or so, hence the strict limits hold.

    Returns:
        The measures, the worst token's unless `is_random`; each miss is one of `problems`.
    """
    problems = _tokens(out, expected, expected_lse)
    whole = measure(out, expected)
    distance = 0.0
    if lse is not None:
        distance, found = _logarithms(lse, expected_lse)
        problems += found
    if is_random:
        problems += misses(whole, STRICT)
        shown = whole
    else:
        shown = _worst_token(out, expected)
    problems += misses(Measures(lse=distance), TOKEN)
    return Measures(shown.max_rel, shown.norm_rel, shown.cosine, distance, tuple(problems))


def misses(found: Measures, limits: Limits) -> list[str]:
    """What of the measures is beyond the limits."""
    pairs = (("max-relative", found.max_rel, limits.max_rel),
             ("norm-relative", found.norm_rel, limits.norm_rel),
             ("lse", found.lse, limits.lse))  # fmt: skip
    problems = [f"{name} {value:.3g}, expected at most {limit:g}"
                for name, value, limit in pairs if not value <= limit]  # fmt: skip
    if not found.cosine >= limits.cosine:
        problems.append(f"cosine {found.cosine:.7f}, expected at least {limits.cosine:g}")
    return problems


def _per_token(out: Tensor, expected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three measures of each token; NaN where the token has some."""
    got, want = out.double().flatten(1), expected.double().flatten(1)
    tiny = 1e-300
    difference = got - want
    norm, top = want.norm(dim=1), want.abs().amax(1)
    max_rel = difference.abs().amax(1) / top.clamp(min=tiny)
    norm_rel = difference.norm(dim=1) / norm.clamp(min=tiny)
    cosine = (got * want).sum(1) / (norm * got.norm(dim=1)).clamp(min=tiny)
    return max_rel, norm_rel, cosine


def _worst_token(out: Tensor, expected: Tensor) -> Measures:
    has_keys = expected.flatten(1).abs().amax(1) > 0
    if not bool(has_keys.any()):
        return Measures()
    parts = _per_token(out[has_keys], expected[has_keys])
    if not all(bool(part.isfinite().all()) for part in parts):
        return Measures(float("inf"), float("inf"), -1.0)
    max_rel, norm_rel, cosine = parts
    return Measures(float(max_rel.max()), float(norm_rel.max()), min(1.0, float(cosine.min())))


def _tokens(out: Tensor, expected: Tensor, expected_lse: Tensor) -> list[str]:
    """Anomalies, then each token against the limits of one token."""
    problems = []
    broken = (~out.double().isfinite()).flatten(1).any(1)
    if bool(broken.any()):
        problems.append(f"NaN or infinite values in {_which(broken)}")
    is_empty = (expected_lse == float("-inf")).all(1)
    written = is_empty & (out.double() != 0).flatten(1).any(1) & ~broken
    if bool(written.any()):
        problems.append(f"expected zeros where every key is masked, found others in "
                        f"{_which(written)}")  # fmt: skip
    max_rel, norm_rel, cosine = _per_token(out, expected)
    wrong = (max_rel > TOKEN.max_rel) | (norm_rel > TOKEN.norm_rel) | (cosine < TOKEN.cosine)
    wrong &= ~is_empty & ~broken
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        one = Measures(float(max_rel[at]), float(norm_rel[at]), float(cosine[at]))
        problems.append(f"{_which(wrong)}: {'; '.join(misses(one, TOKEN))}")
    return problems


def _logarithms(lse: Tensor, expected: Tensor) -> tuple[float, list[str]]:
    """Largest distance where there are keys; elsewhere -inf is expected."""
    has_keys = expected != float("-inf")
    problems = []
    if bool((lse.double()[~has_keys] != float("-inf")).any()):
        problems.append("expected an lse of -inf where every key is masked, found another")
    found = lse.double()[has_keys]
    if not bool(found.isfinite().all()):
        return float("inf"), [*problems, "expected finite lse where there are keys"]
    wanted = expected[has_keys]
    distance = (found - wanted).abs() / (wanted.abs() / 1000).clamp(min=1.0)
    return (float(distance.max()) if distance.numel() else 0.0), problems


def _which(flags: Tensor) -> str:
    at = flags.nonzero().flatten().tolist()
    more = f" and {len(at) - 4} more" if len(at) > 4 else ""
    return f"token {', '.join(map(str, at[:4]))}{more} of {len(flags)}"
