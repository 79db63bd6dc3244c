"""Training state: capture and load of modules, optimizers, generators and plain trees."""
