"""Runs one deep probe: the part that is executed by the Python under test, as a script.

Standard library only at module level. The answer goes to a file, since upstream code prints what
it likes; a file without an answer means that the process died.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path

FRAMES = 3


def main(job_file: str) -> int:
    """Runs the job of that file and writes its answer beside it."""
    path = Path(job_file)
    job = json.loads(path.read_text("utf-8"))
    root = Path(job["tree"])
    # The tree is found before anything installed; this project last, so that it hides nothing.
    sys.path.insert(0, str(root))
    sys.path.append(job["project"])
    if job["stubs"]:
        from imagebuild.smoke import stubs

        stubs.install()
    answer = _answer(job, root)
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(answer), "utf-8")
    temporary.replace(path.with_suffix(".answer"))
    return 0


def _answer(job: dict[str, str], root: Path) -> dict[str, object]:
    probe = importlib.import_module(job["module"])
    try:
        for name in job["imports"]:
            _import_from(root, name)
        evidence = probe.probe()
    except Exception as error:
        return {"ok": False, "evidence": _sentence(error)}
    if not isinstance(evidence, str) or not evidence.strip():
        return {"ok": False, "evidence": f"the probe returned {evidence!r}, expected a sentence"}
    return {"ok": True, "evidence": " ".join(evidence.split()), "torch": _torch()}


def _import_from(root: Path, name: str) -> None:
    """Imports a module and makes sure that it is the tree's and not an installed one."""
    try:
        module = importlib.import_module(name)
    except Exception as error:
        raise RuntimeError(f"{name} does not import: {_sentence(error)}") from error
    place = Path(str(module.__file__)).resolve()
    if not place.is_relative_to(root.resolve()):
        raise RuntimeError(f"{name} came from {place}, which is not in the tree")


def _sentence(error: BaseException) -> str:
    """The error in a line; one that no probe worded says where it came from."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, RuntimeError) and type(error).__module__.startswith(
        ("imagebuild.", "builtins")
    ):
        return text
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(frames))
    return f"{type(error).__name__}: {text} ({where})"


def _torch() -> str:
    torch = sys.modules.get("torch")
    return str(getattr(torch, "__version__", ""))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
