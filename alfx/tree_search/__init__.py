"""Monte-Carlo tree search over batches of trees; read :mod:`alfx.tree_search.search` first."""
