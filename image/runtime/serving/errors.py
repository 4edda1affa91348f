"""What can stop a start, and the exit code of each; the codes are documented in docs/knobs.md."""

from __future__ import annotations

from collections.abc import Sequence


class ServingError(Exception):
    """Root of all errors that a user sees; never a traceback.

    Attributes:
        problems: a sentence each.
        exit_code: of the container.
    """

    exit_code = 3

    def __init__(self, *problems: str) -> None:
        super().__init__("; ".join(problems))
        self.problems = problems


class KnobError(ServingError):
    """Knobs or arguments are unknown, malformed or contradict each other."""

    exit_code = 2


class CheckError(ServingError):
    """Preflight, numeric check or self-test failed."""

    exit_code = 3


class MismatchError(ServingError):
    """The ranks do not hold the same artefacts."""

    exit_code = 4


class EnvironmentFault(ServingError):  # noqa: N818 - OS has the name EnvironmentError
    """The machine, the network, another rank or a tool failed, or vLLM ended by itself."""

    exit_code = 5


EXIT_CODES: Sequence[tuple[int, str]] = (
    (0, "stopped by a signal, after the requests in flight had ended"),
    (2, "knobs or arguments unknown, malformed or contradictory; nothing was started"),
    (3, "preflight, numeric check or self-test failed"),
    (4, "a rank has another image, series, kernel, checkpoint, template or knobs"),
    (5, "the machine, the network, another rank or a tool failed, or vLLM ended by itself"),
    (130, "interrupted twice: the second signal did not wait for requests in flight"),
)


def raise_all(kind: type[ServingError], problems: Sequence[str]) -> None:
    """Raises one `kind` that holds every problem once; returns when there is none."""
    if problems:
        raise kind(*dict.fromkeys(problems))
