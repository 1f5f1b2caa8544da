"""The error of a command line that cannot be understood, for messages that have no single field."""

from __future__ import annotations

__all__ = ["CommandLineError"]


class CommandLineError(Exception):
    """Arguments or a configuration that cannot be understood. Printed as one line; the exit code is 2."""
