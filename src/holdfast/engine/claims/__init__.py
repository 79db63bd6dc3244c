"""Who owns a run, who reads it, and whether they still live."""
