"""One fit: from the resume to the last checkpoint."""
