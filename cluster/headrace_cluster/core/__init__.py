"""Decisions of the controller, pure: events and a clock in, actions out."""
