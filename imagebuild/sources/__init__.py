"""Where upstream bytes come from: package indexes, wheels and the cache."""
