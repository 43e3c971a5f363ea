"""Small named modules of maths and bookkeeping; each stands alone, see their first paragraphs."""
