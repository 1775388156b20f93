"""Approve commands: read them, judge them by the policy, and post approvals to IMDS."""
