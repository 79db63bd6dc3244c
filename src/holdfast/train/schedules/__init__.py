"""Schedules of learning rates: curves by the run's progress, and when other schedulers step."""
