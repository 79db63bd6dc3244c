"""The main job on real input: train, be killed, resume, and compare with the undisturbed run.

`story` drives it, `worker` is the training process that gets killed, `report` shows what happened.
"""
