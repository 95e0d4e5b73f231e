"""The router's decisions, pure: clock, timers and transport are passed in."""
