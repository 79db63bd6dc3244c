"""The page of `holdfast serve`: answers of the commands, rendered. Needs `holdfast-torch[web]`."""
