"""The chat template: the checkpoint's own, with our edits, which must fit."""

from __future__ import annotations

import json
from pathlib import Path

from serving import places, smallfile
from serving.errors import CheckError
from serving.resolve import Plan


def edited(plan: Plan) -> bytes:
    """The template that vLLM gets.

    Raises:
        CheckError: there is none, or the edits do not fit it.
    """
    # Here, since it reads all of the patching engine.
    import glm_chat_template

    from imagebuild.errors import BuildError

    place, text = _source(plan)
    try:
        made: str = glm_chat_template.apply_template(text)
    except BuildError as error:
        hint = f"; {error.hint}" if error.hint else ""
        lines = " ".join(line.strip() for line in str(error).splitlines())
        raise CheckError(f"{place}: {lines}{hint}") from error
    return made.encode()


def _source(plan: Plan) -> tuple[Path, str]:
    asked = plan.settings.text("CHAT_TEMPLATE_FILE")
    folder = Path(plan.settings.text("MODEL_DIR"))
    place = Path(asked) if asked else folder / places.TEMPLATE
    if not asked and not place.is_file():
        return _inside(folder / "tokenizer_config.json", place)
    try:
        return place, smallfile.read(place, smallfile.TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckError(f"{place}: the chat template cannot be read: {error}") from error


def _inside(config: Path, instead_of: Path) -> tuple[Path, str]:
    """Older checkpoints keep the template in the tokenizer's configuration."""
    try:
        found = json.loads(config.read_bytes()).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        found = None
    if not isinstance(found, str):
        raise CheckError(f"expected a chat template in {instead_of} or {config}, found none")
    return config, found
