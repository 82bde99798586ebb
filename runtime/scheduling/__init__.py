"""Continuous batching as plain decisions: who waits, who runs, what the next step does."""
