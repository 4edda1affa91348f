"""Checks the kernel, and FlashKDA, on the card that is there against fp64.

`python -m glm53_sparse_mla.check [--quick]`. What this folder imports at module level is the
standard library; torch comes in when a check runs, so that its absence is a sentence.
"""
