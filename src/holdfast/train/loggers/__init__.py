"""Loggers: where the metrics of a training are written."""
