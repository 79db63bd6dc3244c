"""The course of a call of `fit`, from the resume to the last checkpoint."""
