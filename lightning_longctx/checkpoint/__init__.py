"""Checkpoints as directories: written behind training, committed last, found only if whole, loaded without code.

Torch only; nothing here knows Lightning. The callback writes through :class:`~lightning_longctx.checkpoint.writer.
CheckpointWriter`, the strategy and the tools read.
"""
