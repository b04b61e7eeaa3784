"""Models between repositories: only what the other side lacks travels."""
