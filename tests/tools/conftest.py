"""Settings of the tool tests: a tool reads its configuration as the command line does, in this process."""

from __future__ import annotations

import os

os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # of LightningCLI's calls: none is ours to change
