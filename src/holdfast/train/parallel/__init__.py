"""Several ranks that train one model together."""
