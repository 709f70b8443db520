"""Drafters behind one protocol, a file or folder each. They know sequences and ids, not links or services."""
