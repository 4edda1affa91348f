"""Deep probes: each module runs real upstream code from `sys.path` and imports vLLM itself."""
