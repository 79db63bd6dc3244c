"""Parts of a call of `fit`: its start, its steps, its saves and its end."""
