"""From text to token ids and back: tokenizers and completions."""
