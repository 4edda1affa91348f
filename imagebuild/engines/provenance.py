"""How a result was made: an in-toto statement with SLSA provenance, unsigned.

It holds neither time nor place, so the same result gives the same bytes. Whoever signs an image
signs this as well.
"""

from __future__ import annotations

import json
from typing import Any

from imagebuild.engines.made import Made, commit_of

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
_BUILDER = "urn:imagebuild:build.py"


def provenance(made: Made) -> bytes:
    """The statement as JSON with sorted keys and a final newline."""
    content = {
        "_type": STATEMENT,
        "subject": [
            {"name": name, "digest": {"sha256": digest}} for name, digest in made.subjects.items()
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"urn:imagebuild:{made.engine}:1",
                "externalParameters": {
                    "recipe": made.recipe.name,
                    "base": made.base.version,
                    "gpu_arch": list(made.gpu_arches),
                },
                "internalParameters": {
                    "epoch": made.base.epoch,
                    "series": made.series.digest,
                    **made.inputs,
                },
                "resolvedDependencies": _dependencies(made),
            },
            # Unsigned, and nobody's service: whoever called build.py.
            "runDetails": {"builder": {"id": _BUILDER}},
        },
    }
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def _dependencies(made: Made) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "uri": f"pkg:pypi/{project}@{made.base.versions[project]}",
         "digest": {"sha256": sha256}}
        for project, name, sha256 in made.wheels()
    ]  # fmt: skip
    reference, digest = made.base_image
    if reference and made.engine == "docker":
        found.append({
            "name": reference.partition("@")[0],
            "uri": f"oci://{reference.partition('@')[0]}",
            "digest": {"sha256": digest.removeprefix("sha256:")},
        })  # fmt: skip
    for name, source in made.sources.items():
        url, commit = commit_of(source)
        found.append({"name": name, "uri": f"git+{url}", "digest": {"gitCommit": commit}})
    found += [{"name": pin.filename, "uri": pin.url, "digest": {"sha256": pin.sha256}}
              for pin in made.debs]  # fmt: skip
    commit, _, dirty = made.revision.partition("-")
    if commit:
        found.append({
            "name": "this project",
            "digest": {"gitCommit": commit},
            **({"annotations": {"edited": True}} if dirty else {}),
        })  # fmt: skip
    return found
