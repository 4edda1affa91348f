"""What starts and guards `vllm serve` in the container. Standard library only.

One start, in the order of `serving.state.STAGES`; each stage is seen in the state file:

1. preflight      knobs (`knobs`, `resolve`), then this machine: GPUs, limits, ports, disk,
                  checkpoint,
                  template (`preflight`, `checkpoint`, `network`, `caches`)
2. discover       which rank this is and where the head is (`cluster`, `discover`, `election`)
3. join           every rank shows its `fingerprint`; one that differs stops all ranks
4. numeric_check  our kernels against their reference on this card, a few seconds (`numeric`)
5. load, warmup   `vllm serve` runs as a child (`process`); its log says which of the two it is at
6. self_test      on the head: a real conversation with the API (`selftest`)
7. serving        until a signal or until a process or a rank is lost
8. draining       requests in flight end, the child's whole process group ends, then this one

`main` tells the story; nothing else starts or ends a process, or exits. Every problem is a sentence
in `ServingError`, all problems of a step at once. Exit codes are `serving.errors`' table.

A module must not read the environment by itself: `resolve` reads it once, and the frozen `Plan`
holds what was decided.
"""
