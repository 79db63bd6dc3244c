"""The state: how modules, optimizers, generators and trees are captured and loaded."""
