"""Plans a load: each stored value, where it goes, and whether it fits."""
