"""``longctx report``: one page of a run, or of several beside each other, from the files that a run leaves."""
