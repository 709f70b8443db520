"""Several sources behind one drafter, chosen by measured speed."""
