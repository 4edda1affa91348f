"""The smoke environment: a pinned venv without a GPU in which the trees' own Python code runs."""
