"""Rewards: verifiers run in a process of their own, and shaping as pure functions of arrays."""
