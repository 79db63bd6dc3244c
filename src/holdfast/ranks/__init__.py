"""Agreement of the ranks of a run, by small messages through the leader; brings no transport."""
