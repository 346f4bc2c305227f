"""Scores of final replies. Text of the policy is never executed here: it is parsed, or handed to a worker process or a sandbox."""
