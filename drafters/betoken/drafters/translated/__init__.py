"""Drafts of models with another tokenizer than the target's, translated to the target's ids."""
