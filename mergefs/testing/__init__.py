"""What tests of mergefs use, and whoever writes a part of it may: nothing here is needed to run it."""
