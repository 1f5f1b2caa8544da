"""Settings of the tests of examples: a plan reads its recipe as the command line does, in this process."""

from __future__ import annotations

import os

os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # of LightningCLI's calls: none is ours to change
