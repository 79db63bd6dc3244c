"""The demo: train, be killed, resume, and compare with an undisturbed run.

`story` runs it, `worker` is the training process that gets killed, `report` prints the result.
"""
