"""Settings of the tests of examples: what the command line changes must not reach other tests."""

from __future__ import annotations

import os

os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # of LightningCLI's calls: none is ours to change
