"""Times the kernel beside every other kernel that a user could pick, on one GPU in one run."""
