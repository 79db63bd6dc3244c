"""How, in time and under failure: stage, save, load, claim, commit, resolve."""
