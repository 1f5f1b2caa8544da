"""Settings of the tests of documentation: they run the command line, as tests/cli does."""

from __future__ import annotations

import os

os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # of LightningCLI's calls: none is ours to change

from tests.cli.conftest import _same_process_after  # noqa: E402, F401  # a fixture of each test here
