"""Finding a checkpoint by the name a person gives, and keeping it while it is read."""
