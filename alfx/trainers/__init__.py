"""Training loops: when to unroll, train, evaluate, log and write checkpoints. Start with ``policy_trainer``."""
