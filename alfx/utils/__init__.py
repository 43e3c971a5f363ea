"""Small independent modules of mathematics and bookkeeping; the first paragraph of each describes it."""
