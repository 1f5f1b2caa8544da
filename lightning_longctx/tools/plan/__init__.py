"""``longctx plan``: whether a model at a length fits a device, before anything is launched.

One training step of the configured model runs on tensors without memory, in one process, and every storage that would
exist is counted: FSDP2, the exchange of heads, recompute, the chunked loss and the optimizer are the code of training.
"""
