"""``longctx check``: all of a start but the training, in one process and without an accelerator.

Each check asks the code of the run or of another tool: nothing is judged here by rules of its own.
"""
