"""The pure layer: scheduler, KV blocks, engine, transfer protocol; no clock, thread, socket or tensor."""
