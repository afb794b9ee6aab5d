"""Tests of commands: each is run as a user runs it, in this process."""
