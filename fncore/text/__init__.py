"""Text in and out: prompts, conversations, tokenizers and chat templates."""
