"""Bringing a repository that an earlier mergefs made to the format of this one. See spec/migration.md."""
