"""What loggers leave in files, as curves: one small reader for each logger."""
