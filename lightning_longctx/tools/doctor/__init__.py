"""``longctx doctor``: does this model train alike in every layout? Proven on the model itself, on CPU processes."""
