"""Tests of ``longctx report``."""
