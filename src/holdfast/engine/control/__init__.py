"""What others ask of a training that runs, and what its end waits for."""
