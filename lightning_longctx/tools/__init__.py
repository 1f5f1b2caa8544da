"""The commands of ``longctx`` that are no training run: each reads the same configuration file as ``longctx fit``.

A tool is a module with ``main(words, read) -> int``: ``words`` follow the command, and ``read`` turns those that belong
to the configuration into a :class:`~lightning_longctx.tools.configuration.RunConfiguration`. The exit code is 0 (fine)
or 1 (a finding); what makes a tool unable to run is raised, and becomes one line and exit code 2.
"""
