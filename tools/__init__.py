"""What stands around mergefs: synthetic checkpoints, the demonstration, the test runner."""
