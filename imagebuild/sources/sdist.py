"""Takes single files out of a source distribution. Runs nothing of it and writes nothing else."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path

from imagebuild.errors import IntegrityError, raise_collected

MEMBER_LIMIT = 16 << 20  # bytes


def extract(sdist: Path, paths: Collection[str], out: Path) -> None:
    """Writes `paths`, which are relative to the sdist's one folder, below `out`.

    Args:
        sdist: a .tar.gz whose hash was checked.
        paths: plain files, such as "csrc/core/registration.h".
        out: gets them under the same names.

    Raises:
        IntegrityError: it is no such archive, or lacks a file.
    """
    missing = set(paths)
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                path = member.name.partition("/")[2]
                if path not in missing or not member.isfile() or member.size > MEMBER_LIMIT:
                    continue
                data = archive.extractfile(member)
                if data is None:
                    continue
                # The name is one of ours, so that no member decides where it goes.
                (out / path).parent.mkdir(parents=True, exist_ok=True)
                (out / path).write_bytes(data.read())
                missing.discard(path)
                if not missing:
                    return
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise IntegrityError(f"{sdist.name}: expected an sdist as .tar.gz, found: {error}"
                             ) from error  # fmt: skip
    problems = [f"{path}: expected a file, found none" for path in sorted(missing)]
    raise_collected(IntegrityError, f"{sdist.name} lacks files", problems)
