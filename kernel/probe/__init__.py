"""Isolates the fault of NVFP4 experts whose activation scale was never set. No vLLM is needed."""
