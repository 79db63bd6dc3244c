"""When to save, what to keep, how it is called: pure functions, without torch."""
