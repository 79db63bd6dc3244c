"""The format of checkpoints (docs/format.md). Without torch: dtypes are names."""
