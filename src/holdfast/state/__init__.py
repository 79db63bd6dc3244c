"""What is saved: modules, optimizers, generators, trees; and how it is applied."""
