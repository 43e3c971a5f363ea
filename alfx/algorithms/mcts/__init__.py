"""Parts of the tree search as an algorithm, and of the models that it plans with."""
