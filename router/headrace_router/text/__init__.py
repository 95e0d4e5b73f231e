"""Chat templates, tokenizing, detokenizing, stop strings, and the model card that combines them."""
