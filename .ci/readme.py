"""Prints a command of README.md, so that what a newcomer types and what is tested cannot drift apart.

usage: python .ci/readme.py train|test
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def commands() -> dict[str, str]:
    """The two blocks of shell commands that install something: the first trains, the second tests."""
    blocks = re.findall(r"^```bash\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    train, test = (block.strip() for block in blocks if "pip install" in block)
    return {"train": train, "test": test}


if __name__ == "__main__":
    print(commands()[sys.argv[1]])
