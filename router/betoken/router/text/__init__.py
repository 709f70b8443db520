"""Text in and out: tokenizer, chat template, stop strings, detokenizing."""
