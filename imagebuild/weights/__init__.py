"""Model weights, listed, fetched and verified file by file. Knows nothing of images and patches."""
