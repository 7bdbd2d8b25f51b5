"""Text in and out: tokenizers, chat templates, incremental text and stop strings."""
