"""What a model's answer consists of: text, reasoning and calls of tools."""
