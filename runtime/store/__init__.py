"""Models on disk: where they are, whether they are complete, and how to get one."""
