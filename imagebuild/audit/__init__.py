"""The drift audit: what a release of vLLM means for every patch, and how that is reported."""
