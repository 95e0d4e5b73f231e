"""Profiles of steps: a bounded window of this rank's steps as a Chrome trace, on request."""
