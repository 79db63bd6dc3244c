"""The format of checkpoints (docs/format.md). Without torch: dtypes are names.

Other bytes need a new version of the format: tests/format/test_golden.py, tests/golden.
"""
