"""Answers that were interrupted, and what goes on with them: identities, records, replays."""
