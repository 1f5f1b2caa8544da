"""``longctx probe``: how one's own documents pack, before any accelerator is paid for.

The real transform, packing, collation and sequence-parallel slice run, one independent stream for each data-parallel
rank, without a model, an accelerator or a process group. The other policies then choose from the recorded lengths.
"""
