"""Proof that a training resumes exactly: runs with kills, and why two runs differ."""
