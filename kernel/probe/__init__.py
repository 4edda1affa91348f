"""Isolates the fault of NVFP4 experts whose activation scale was never set. Needs torch, no vLLM."""
