"""What a rollout engine is, and the rules every engine is held to."""
