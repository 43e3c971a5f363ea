"""Monte-Carlo tree search over batches of trees; read :mod:`alfx.tree_search.batched_search` first."""
