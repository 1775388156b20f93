"""Name a file with its hash in an SBOM, as what its components are in: `python -m tools.packaging.sbom SBOM FILE`."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path


def add(sbom: Path, file: Path) -> None:
    """Make a file the subject of an SBOM."""
    with file.open("rb") as opened:
        digest = sha256(opened.read()).hexdigest()
    content = json.loads(sbom.read_text(encoding="utf-8"))
    subject = {"type": "file", "name": file.name, "hashes": [{"alg": "SHA-256", "content": digest}]}
    content["metadata"]["component"] = {"bom-ref": file.name, **subject}
    sbom.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    add(*map(Path, sys.argv[1:]))
