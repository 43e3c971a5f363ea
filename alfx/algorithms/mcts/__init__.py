"""Parts of the tree search algorithm and of its models."""
